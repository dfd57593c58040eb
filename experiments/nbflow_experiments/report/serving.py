"""Figures of serving: batch against throughput, batching, shared prefixes, speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_experiments.figure_style import (
    Drawing,
    NotDrawn,
    equal_speed,
    legend_above,
    log_axis,
    new_figure,
    plain_numbers,
    range_bars,
    series_style,
)
from nbflow_experiments.report.data import Results

_MOST_LINES, _MOST_PANELS = 9, 3


def draw_throughput(results: Results) -> Drawing:
    """Return the figure: batch against decoding speed, a line per format, a panel per KV format."""
    rows = results.done[results.done.partition == results.partition]
    if "decode_tokens_per_s" not in rows or rows.batch.nunique() < 2:
        raise NotDrawn("")
    if rows.weights.nunique() > 1 and rows.batch.nunique() == 2 and rows.kv.nunique() == 1:
        raise NotDrawn("")  # the figure of the speed has the same numbers
    if rows.weights.nunique() == rows.kv.nunique() == 1 < results.done.partition.nunique():
        raise NotDrawn("")  # the figure of the partitions has them
    caches = list(dict.fromkeys(rows.kv))[:_MOST_PANELS]
    formats = list(dict.fromkeys(rows.sort_values("bits_per_weight", ascending=False).weights))
    shown = spread(formats, _MOST_LINES)
    panels = [(kv, "decode") for kv in caches]
    if len(caches) == 1 and "prefill_tokens_per_s" in rows:
        panels.append((caches[0], "prefill"))
    with new_figure(len(panels), 3.3) as (figure, axes):
        for panel, (kv, kind) in zip(axes, panels, strict=True):
            part = rows[rows.kv == kv]
            for i, name in enumerate(shown):
                line = part[part.weights == name].drop_duplicates("batch").sort_values("batch")
                _line(panel, series_style(i), line.batch, line, f"{kind}_tokens_per_s", kind, name)
            log_axis(panel, sorted(rows.batch.unique()), "sequences at once")
            panel.set_ylabel(f"{kind} (token/s), cache {kv}")
            panel.set_ylim(0, rows[f"{kind}_max_tokens_per_s"].max() * 1.08)
            plain_numbers(panel.yaxis)
        legend_above(figure, axes[0])
    caption = (
        f"Throughput with partition {results.partition}: all sequences of the batch "
        "together, median of the repetitions; bars reach from the slowest to the fastest. One "
        "panel per format of the key/value cache, one line per weight format."
    )
    if len(shown) < len(formats):
        caption += f" {len(shown)} of {len(formats)} formats are drawn."
    return Drawing(figure, "Batch size against throughput", caption)


def draw_batching(results: Results) -> Drawing:
    """Return the figure: requests together and one after the other, against their number."""
    rows = measured(results, "batching_speedup")
    kinds = (("batching", "together"), ("sequential", "one after the other"))
    with new_figure(3, 3.3) as (figure, axes):
        rates, ratios, waits = axes
        one = rows[rows.weights == results.weights].drop_duplicates("batch").sort_values("batch")
        for i, (name, label) in enumerate(kinds):
            _line(rates, series_style(i), one.batch, one, f"{name}_tokens_per_s", None, label)
            _line(waits, series_style(i), one.batch, one, f"{name}_ttft_s", None, label, scale=1e3)
        for i, (weights, part) in enumerate(rows.groupby("weights", sort=False)):
            part = part.drop_duplicates("batch").sort_values("batch")
            style = series_style(i + len(kinds))
            _line(ratios, style, part.batch, part, "batching_speedup", None, str(weights))
        equal_speed(ratios, "one after the other")
        ratios.legend(loc="lower right")
        for panel, label in (
            (rates, f"generated (token/s), {results.weights}"),
            (ratios, "speed-up by batching"),
            (waits, f"time to first token (ms), {results.weights}"),
        ):
            log_axis(panel, sorted(rows.batch.unique()), "requests at once")
            panel.set_ylabel(label)
            from_zero(panel)
            plain_numbers(panel.yaxis)
        legend_above(figure, rates)
    caption = (
        "Requests with prompts and outputs of different lengths that arrive at once: continuous "
        "batching against sequential execution. Speeds count generated tokens and include "
        "prefill; time to first token includes queueing. Medians."
    )
    return Drawing(figure, "Dynamic batching", caption)


def draw_prefix(results: Results) -> Drawing:
    """Return the figure: time to the first token against the length of the shared prefix."""
    rows = measured(results, "prefix_ttft_speedup")
    if rows.prefix.nunique() < 2:
        raise NotDrawn("the points that succeeded have only one length of the prefix")
    batches = spread(sorted(rows.batch.unique()), _MOST_PANELS)
    kinds = (
        ("prefix_cold_ttft_s", "nothing shared"),
        ("prefix_together_ttft_s", "shared, computed by the first request"),
        ("prefix_ttft_s", "shared, cached before"),
    )
    with new_figure(max(2, len(batches)), 3.3) as (figure, axes):
        for panel in axes[len(batches) :]:
            panel.set_axis_off()
        for panel, batch in zip(axes, batches, strict=False):
            part = rows[(rows.batch == batch) & (rows.weights == results.weights)]
            part = part.drop_duplicates("prefix").sort_values("prefix")
            for i, (metric, label) in enumerate(kinds):
                _line(panel, series_style(i), part.prefix, part, metric, None, label, scale=1e3)
            panel.set_xlabel(f"shared tokens of prompts of {int(rows.prompt.max())}")
            panel.set_ylabel(f"time to first token (ms), {_requests(batch)}")
            from_zero(panel)
        legend_above(figure, axes[0])
    caption = (
        f"Simultaneous requests whose prompts share a prefix ({results.weights} weights): "
        "median time to first token, queueing included."
    )
    return Drawing(figure, "Shared prefixes", caption)


def draw_speculation(results: Results) -> Drawing:
    """Return the figure: accepted draft tokens, and speed with its upper bound."""
    rows = measured(results, "speculation_speedup")
    rows = rows[rows.weights == results.weights]
    series = list(rows.groupby(["draft", "batch"], sort=False))[:_MOST_LINES]
    drafts, batches = (list(dict.fromkeys(key[k] for key, _ in series)) for k in (0, 1))
    with new_figure(3, 3.3) as (figure, (shares, steps, ratios)):
        for (draft, batch), part in series:
            part = part.drop_duplicates("n_draft").sort_values("n_draft")
            label = f"{draft}, {_requests(batch)}"
            style = series_style(drafts.index(draft), batches.index(batch))
            if "speculation_accepted_share" in part:
                _line(
                    shares, style, part.n_draft, part, "speculation_accepted_share", None, label,
                    scale=100,
                )  # fmt: skip
            _line(steps, style, part.n_draft, part, "speculation_tokens_per_step", None, label)
            _line(ratios, style, part.n_draft, part, "speculation_speedup", None, label)
        equal_speed(ratios, "without draft tokens")
        for panel, text in (
            (shares, "accepted draft tokens (%)"),
            (steps, "tokens per verification (bound)"),
            (ratios, "speed-up"),
        ):
            panel.set_xlabel("draft tokens per step")
            panel.set_xticks(sorted(rows.n_draft.unique()))
            panel.set_ylabel(text)
            from_zero(panel)
        legend_above(figure, steps, ratios)
    caption = (
        f"Speculative decoding of held-out text, greedy, {results.weights} weights: acceptance "
        "rate of draft tokens; tokens per verification, the speed-up bound for free drafting and "
        "verification at the cost of a decode step; and the measured speed-up. Bars are one "
        "standard error."
    )
    return Drawing(figure, "Speculative decoding", caption)


def measured(results: Results, metric: str) -> Any:
    """Return the points with a metric."""
    if metric not in results.done or not results.done[metric].notna().any():
        raise NotDrawn("")
    return results.done[results.done[metric].notna()]


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spaced values, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _line(
    panel: Any,
    style: dict[str, str],
    x: Any,
    rows: Any,
    metric: str,
    spread: str | None,
    label: str,
    scale: float = 1.0,
) -> None:
    """Draw a metric with error bars: range (`spread`) or standard error."""
    y = rows[metric].to_numpy() * scale
    bars = None
    if spread is not None:
        bars = range_bars(rows, spread)
    elif f"{metric}_stderr" in rows:
        bars = rows[f"{metric}_stderr"].to_numpy() * scale
    panel.errorbar(x.to_numpy(), y, yerr=bars, capsize=2.5, label=label, **style)


def from_zero(panel: Any) -> None:
    """Start the y axis at 0, with margin above."""
    panel.set_ylim(0, panel.dataLim.ymax * 1.08)


def _requests(n: int) -> str:
    return f"{n} request" + ("s" if n != 1 else "")

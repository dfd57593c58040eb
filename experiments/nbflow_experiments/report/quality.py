"""Figure: bits per weight against error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_experiments.figure_style import (
    Drawing,
    NotDrawn,
    format_axis,
    legend_above,
    new_figure,
    series_style,
)
from nbflow_experiments.report.data import Results
from nbflow_experiments.report.serving import spread

_PANELS = (
    ("kld_mean_nats", "KL divergence to f32\n(nat/token)", True),
    ("nll_difference_mean_nats", "loss of text minus f32's\n(nat/token)", False),
    ("perplexity", "perplexity", False),
    ("weight_error_relative", "relative weight error", True),
)
_NOT_QUALITY = (
    "weights", "partition", "ranks", "batch", "prompt", "decode", "prefix", "draft", "n_draft",
    "repeats", "warmup", "threads", "max_context",
)  # fmt: skip
_MOST_SERIES = 8  # more do not fit above the panels
_LONG_LABEL = 40  # characters
_SMALLEST = 1e-12  # a KL divergence below is rounding of float64 sums and is shown as 0


def draw(results: Results) -> Drawing:
    """Return the figure: one panel per error measure, one marker per format."""
    panels = [p for p in _PANELS if p[0] in results.done and results.done[p[0]].notna().any()]
    if any(metric == "nll_difference_mean_nats" for metric, _, _ in panels):
        panels = [p for p in panels if p[0] != "perplexity"]
    if not panels:
        raise NotDrawn("")
    if results.done.weights.nunique() < 2:
        raise NotDrawn("the points that succeeded have only one weight format")
    results, held = results.with_fewer_series(_NOT_QUALITY, _MOST_SERIES)
    every = results.series(_NOT_QUALITY)
    series = spread(every, _MOST_SERIES)
    height = 4.2 if results.done.weights.nunique() > 12 else 3.4  # names are upright
    if max(len(label) for label, _ in series) > _LONG_LABEL:
        height += 0.18 * len(series)  # one under the other
    with new_figure(len(panels), height) as (figure, axes):
        for panel, (metric, name, logarithmic) in zip(axes, panels, strict=True):
            _draw_panel(panel, results, series, metric, logarithmic)
            panel.set_ylabel(name)
        legend_above(figure, *axes)
    text = (
        "Error against storage, each where measured: mean Kullback-Leibler divergence from the "
        "float32 reference to the quantized model; loss of held-out text minus that of the "
        "reference, token by token (or perplexity); relative Frobenius error of the quantized "
        "matrices. Bars are one standard error. Open markers at the lower edge stand for no error."
    )
    if held:
        text += f" Drawn for {held}; the table has all."
    if len(series) < len(every):
        text += f" {len(series)} of {len(every)} combinations of settings; the table has all."
    title = "Bits per weight against error" + (f"; {held}" if held else "")
    return Drawing(figure, title, f"{text} {_spread(results)}")


def _draw_panel(
    panel: Any, results: Results, series: Sequence[tuple[str, Any]], metric: str, log: bool
) -> None:
    values = results.done[metric].dropna()
    positive = values[values > _SMALLEST]
    floor = float(positive.min()) / 6 if log and len(positive) else 0.0
    positions = format_axis(panel, results.done)
    if log and len(positive):
        panel.set_yscale("log")
        panel.set_ylim(floor / 1.8, float(positive.max()) * 3)
    for i, (label, part) in enumerate(series):
        rows = part[part[metric].notna()].drop_duplicates("weights")
        zero = (rows[metric] <= _SMALLEST).to_numpy() & log
        shift = 0.4 / len(series) * (i - (len(series) - 1) / 2)
        x = np.array([positions.index(name) for name in rows.weights]) + shift
        y = np.where(zero, floor, rows[metric].to_numpy())
        column = f"{metric}_stderr"
        error = rows[column].to_numpy() if column in rows else np.zeros(len(rows))
        low = np.minimum(error, 0.999 * y) if log else error
        bars = np.where(zero, 0.0, np.vstack([low, error]))
        style: dict[str, Any] = {"linestyle": "none", **series_style(i)}
        panel.errorbar(x, y, yerr=bars, capsize=2.5, label=label, **style)
        if zero.any():
            style |= {
                "markerfacecolor": "white",
                "zorder": 3,
                "label": f"{label}: no error".lstrip(": "),
            }
            panel.plot(x[zero], y[zero], **style)


def _spread(results: Results) -> str:
    """Return a sentence on how far the partitions differ in perplexity."""
    rows = results.done
    if "perplexity" not in rows or rows.partition.nunique() < 2:
        return ""
    more = [
        name for name in ("model", "kv", "kv_rotation", "state", "kv_keys", "seed") if name in rows
    ]
    names = ["weights", *results.varying(more)]
    groups = rows.groupby(names).perplexity
    largest = float(((groups.max() - groups.min()) / groups.mean()).max())
    return (
        f"Shown for partition {results.partition}; between partitions the perplexity differs by at "
        f"most {largest:.1e} (relative)."
    )

"""Figure: partitions against speed and bytes communicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_experiments.figure_style import (
    COLOURS,
    GREY,
    Drawing,
    NotDrawn,
    legend_above,
    new_figure,
    plain_numbers,
    range_bars,
)
from nbflow_experiments.report.data import Results

_PANELS = (
    ("prefill_tokens_per_s", "prefill (token/s)"),
    ("decode_tokens_per_s", "decode (token/s)"),
    ("traffic_bytes_per_token", "sent between ranks (kB/token)"),
)


def draw(results: Results) -> Drawing:
    """Return the figure: one group of bars per partition, one colour per batch size."""
    rows = results.done[results.done.weights == results.weights]
    names = list(dict.fromkeys(rows.partition))
    panels = [p for p in _PANELS if p[0] in rows and rows[p[0]].notna().any()]
    if not panels:
        raise NotDrawn("")
    if len(names) < 2:
        raise NotDrawn(f"the points of {results.weights} that succeeded have only one partition")
    series = [
        (label or results.weights, part[part.weights == results.weights])
        for label, part in results.series(("weights", "partition", "ranks"))
    ]
    with new_figure(len(panels), 3.3) as (figure, axes):
        for panel, (metric, label) in zip(axes, panels, strict=True):
            _draw_panel(panel, names, series, metric)
            panel.set_ylabel(label)
            panel.set_xlabel("partition (; by layers, & by tensors)")
        legend_above(figure, *axes)
    caption = (
        f"Partitions with {results.weights} weights. Numbers are ranks; ';' separates stages of "
        "layers, '&' ranks that share each layer. Speed: all sequences together, median of the "
        "repetitions, bars from the slowest to the fastest. Sent: payload of all ranks per token "
        "of prompt and continuation. Black lines are predictions: bytes from the partition, speeds "
        "(where there are lines) from the description of the machine."
    )
    return Drawing(figure, "Partitions against speed and communication", caption)


def _draw_panel(
    panel: Any, names: Sequence[str], series: Sequence[tuple[str, Any]], metric: str
) -> None:
    width = 0.8 / len(series)
    traffic = metric.startswith("traffic")
    scale = 1e-3 if traffic else 1.0
    for i, (label, part) in enumerate(series):
        part = part.drop_duplicates("partition").set_index("partition").reindex(names)
        x = np.arange(len(names)) + (i - (len(series) - 1) / 2) * width
        y = part[metric].to_numpy() * scale
        panel.bar(x, y, 0.92 * width, color=COLOURS[i % len(COLOURS)], label=label)
        expected = _predicted(part, metric)
        if expected is not None:
            ends = x - 0.46 * width, x + 0.46 * width
            word = "predicted" if i == 0 else None
            panel.hlines(expected * scale, *ends, color="black", linewidth=1.6, label=word)
        if traffic:
            continue
        base = metric.replace("_tokens_per_s", "")
        panel.errorbar(x, y, yerr=range_bars(part, base), linestyle="none", color=GREY, capsize=2)
    panel.grid(visible=False, axis="x")
    panel.set_xticks(np.arange(len(names)), names)
    plain_numbers(panel.yaxis)
    panel.set_ylim(bottom=0)


def _predicted(part: Any, metric: str) -> Any:
    """Return the prediction of a metric: bytes by the partition, speeds by the planner."""
    if metric.startswith("traffic"):
        tokens = part.batch * (part.prompt + part.decode)
        return (part.traffic_predicted_bytes / tokens).to_numpy()
    column = f"predicted_{metric}"
    return part[column].to_numpy() if column in part else None

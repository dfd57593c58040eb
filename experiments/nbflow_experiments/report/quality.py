"""Figure: bits per weight against error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_experiments.figure_style import (
    COLOURS,
    MARKERS,
    Drawing,
    NotDrawn,
    bits_axis,
    format_axis,
    new_figure,
    place_labels,
)
from nbflow_experiments.report.data import Results

_PANELS = (
    ("kld_mean_nats", "KL divergence to f32 (nat/token)", True),
    ("perplexity", "perplexity", False),
    ("weight_error_relative", "relative weight error", True),
)
_NOT_QUALITY = (
    "weights", "partition", "ranks", "batch", "prompt", "decode", "prefix", "draft", "n_draft",
    "repeats", "warmup", "threads", "max_context",
)  # fmt: skip
_MOST_LABELS = 12  # more labels overlap
_SMALLEST = 1e-12  # a KL divergence below is rounding of float64 sums and is shown as 0


def draw(results: Results) -> Drawing:
    """Return the figure: one panel per error measure, one marker per format."""
    panels = [p for p in _PANELS if p[0] in results.done and results.done[p[0]].notna().any()]
    if not panels:
        raise NotDrawn("")
    if results.done.weights.nunique() < 2:
        raise NotDrawn("the points that succeeded have only one weight format")
    series = results.series(_NOT_QUALITY)
    crowded = results.done.weights.nunique() > _MOST_LABELS
    with new_figure(len(panels), 3.8 if crowded else 3.2) as (figure, axes):
        for panel, (metric, name, logarithmic) in zip(axes, panels, strict=True):
            _draw_panel(panel, results, series, metric, logarithmic)
            panel.set_ylabel(name)
        if len(series) > 1:
            axes[0].legend(loc="lower left")
    text = (
        "Error against storage: mean Kullback-Leibler divergence from the float32 reference to "
        "the quantized model, perplexity of held-out text, and relative Frobenius error of the "
        "quantized matrices (each where measured). Bars are one standard error. Open "
        "markers at the lower edge stand for 0."
    )
    return Drawing(figure, "Bits per weight against error", f"{text} {_spread(results)}")


def _draw_panel(
    panel: Any, results: Results, series: Sequence[tuple[str, Any]], metric: str, log: bool
) -> None:
    values = results.done[metric].dropna()
    positive = values[values > _SMALLEST]
    floor = float(positive.min()) / 6 if log and len(positive) else 0.0
    drawn: list[tuple[str, float, float, float, float]] = []
    # Bars of formats with nearly the same bits would overlap: those get categorical positions.
    crowded = results.done.weights.nunique() > _MOST_LABELS
    positions = format_axis(panel, results.done) if crowded or not log else None
    if positions is None:
        bits_axis(panel, list(results.done.bits_per_weight))
    if log and len(positive):
        panel.set_yscale("log")
        panel.set_ylim(floor / 1.8, float(positive.max()) * 3)
    for i, (label, part) in enumerate(series):
        rows = part[part[metric].notna()].drop_duplicates("weights")
        zero = (rows[metric] <= _SMALLEST).to_numpy() & log
        x, y = rows.bits_per_weight.to_numpy(), rows[metric].to_numpy()
        if positions is not None:
            shift = 0.4 / len(series) * (i - (len(series) - 1) / 2)
            x = np.array([positions.index(name) for name in rows.weights]) + shift
        y = np.where(zero, floor, y)
        column = f"{metric}_stderr"
        error = rows[column].to_numpy() if column in rows else np.zeros(len(rows))
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        low = np.minimum(error, 0.999 * y) if log else error
        bars = np.where(zero, 0.0, np.vstack([low, error]))
        panel.errorbar(x, y, yerr=bars, linestyle="none", capsize=2.5, label=label, **style)
        panel.plot(x[zero], y[zero], linestyle="none", **style, markerfacecolor="white", zorder=3)
        drawn += list(zip(rows.weights, x, y, *bars, strict=True)) if i == 0 else []
    if positions is not None:
        return
    labels, xs, ys, below, above = zip(*drawn, strict=True)
    place_labels(panel, labels, xs, ys, (below, above))


def _spread(results: Results) -> str:
    """Return a sentence on how far the partitions differ in perplexity."""
    rows = results.done
    if "perplexity" not in rows or rows.partition.nunique() < 2:
        return ""
    names = ["weights", *results.varying([n for n in ("model", "kv", "seed") if n in rows])]
    groups = rows.groupby(names).perplexity
    largest = float(((groups.max() - groups.min()) / groups.mean()).max())
    return (
        f"Shown for partition {results.partition}; between partitions the perplexity differs by at "
        f"most {largest:.1e} (relative)."
    )

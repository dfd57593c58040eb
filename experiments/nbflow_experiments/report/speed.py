"""Figure: bits per weight against speed."""

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
    plain_numbers,
    range_bars,
    series_style,
)
from nbflow_experiments.optional_packages import require
from nbflow_experiments.report.data import Results

_PANELS = (("prefill", "prefill (token/s)"), ("decode", "decode (token/s)"))
_MOST_SERIES = 3  # more markers per format cannot be told apart


def draw(results: Results) -> Drawing:
    """Return the figure: prefill and decode speed of the formats, one colour per batch size."""
    rows = results.done[results.done.partition == results.partition]
    panels = [p for p in _PANELS if f"{p[0]}_tokens_per_s" in rows]
    if not panels:
        raise NotDrawn("")
    if rows.weights.nunique() < 2:
        raise NotDrawn("the points that succeeded have only one weight format")
    series = results.series(("weights", "partition", "ranks"))
    if len(series) > _MOST_SERIES:
        raise NotDrawn(
            f"each format has {len(series)} combinations of settings, and it shows {_MOST_SERIES}; "
            "the table has them all"
        )
    with new_figure(len(panels), 3.3) as (figure, axes):
        for panel, (name, label) in zip(axes, panels, strict=True):
            _draw_panel(panel, rows, series, results.partition, f"{name}_tokens_per_s")
            panel.set_ylabel(label)
        legend_above(figure, axes[0])
    caption = (
        f"Speed against storage with partition {results.partition}: all sequences of the batch "
        "together, median of the repetitions; bars reach from the slowest to the fastest."
    )
    return Drawing(figure, "Bits per weight against speed", caption)


def _draw_panel(
    panel: Any, rows: Any, series: Sequence[tuple[str, Any]], partition: str, metric: str
) -> None:
    """Draw one speed against the formats, ordered by their bits."""
    base = metric.removesuffix("_tokens_per_s")
    low, high = f"{base}_min_tokens_per_s", f"{base}_max_tokens_per_s"
    names = format_axis(panel, rows)
    for i, (label, whole) in enumerate(series):
        part = whole[(whole.partition == partition) & whole[metric].notna()]
        # Side by side, so that the bars of one format do not hide each other.
        shift = 0.5 / len(series) * (i - (len(series) - 1) / 2)
        x = np.array([names.index(name) for name in part.weights]) + shift
        y, bars = part[metric].to_numpy(), range_bars(part, base)
        style = series_style(i)
        panel.errorbar(x, y, yerr=bars, capsize=2.5, linestyle="none", label=label, **style)
    largest, smallest = rows[high].max(), rows[low].min()
    if largest > 8 * smallest:
        ticker = require("matplotlib.ticker")
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(ticker.LogLocator(10, subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.set_ylim(smallest / 1.4, largest * 1.4)
    else:
        panel.set_ylim(0, largest * 1.08)
    plain_numbers(panel.yaxis)

"""Figure: bytes of weights and key/value caches by weight format and partition."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_experiments.figure_style import (
    COLOURS,
    Drawing,
    NotDrawn,
    format_axis,
    legend_above,
    new_figure,
)
from nbflow_experiments.report.data import Results

_MOST_PANELS = 3


def draw(results: Results) -> Drawing:
    """Return the figure: stacked bars by format, a panel for the first partitions."""
    rows = results.done
    if "weight_bytes" not in rows or rows.weight_bytes.isna().all():
        raise NotDrawn("")
    if rows.weights.nunique() < 2:
        raise NotDrawn("the points that succeeded have only one weight format")
    batches = sorted({int(batch) for batch in rows.batch})
    shown = [b for b in (batches[0], batches[-1]) if b == batches[0] or len(batches) > 1]
    partitions = list(dict.fromkeys(rows.partition))[:_MOST_PANELS]
    with new_figure(len(partitions), 3.2) as (figure, axes):
        for panel, partition in zip(axes, partitions, strict=True):
            _draw_panel(panel, rows[rows.partition == partition], shown)
            panel.set_title(f"partition {partition}", fontsize=9)
        axes[0].set_ylabel("all ranks together (MB)")
        top = max(panel.get_ylim()[1] for panel in axes)
        for panel in axes:
            panel.set_ylim(0, top)
        legend_above(figure, axes[0])
    caption = (
        "Memory that the model holds, summed over its ranks: weights, and the key/value cache of "
        f"the batch ({' and '.join(map(str, shown))} sequences) on top. Peak memory of the "
        "process is in the table; it includes Python and the evaluation."
    )
    return Drawing(figure, "Bits per weight against memory", caption)


def _draw_panel(panel: Any, rows: Any, batches: list[int]) -> None:
    names = format_axis(panel, rows)
    width = 0.8 / len(batches)
    for i, batch in enumerate(batches):
        part = rows[rows.batch == batch].drop_duplicates("weights").set_index("weights")
        part = part.reindex(names)
        x = np.arange(len(names)) + (i - (len(batches) - 1) / 2) * width
        weights, cache = (part[f"{kind}_bytes"].to_numpy() / 1e6 for kind in ("weight", "kv"))
        panel.bar(x, weights, 0.92 * width, color=COLOURS[0], label="weights" if i == 0 else None)
        panel.bar(
            x, cache, 0.92 * width, bottom=weights, color=COLOURS[1 + i],
            label=f"cache, batch {batch}",
        )  # fmt: skip

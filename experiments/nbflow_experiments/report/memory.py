"""Figure: memory by weight format, partition, device and batch, with the memory plan."""

from __future__ import annotations

from collections.abc import Sequence
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
from nbflow_experiments.settings import OFFLOAD_SETTINGS

_MOST_PANELS = 3
_BUFFERS = (("workspace_bytes", "buffers", "#9A9A9A"), ("step_bytes", "steps, graphs", "#D0D0D0"))
_PLANNED = ("plan_weight_bytes", "plan_kv_bytes", "plan_workspace_bytes")


def draw(results: Results) -> Drawing:
    """Return the figure: stacked bars by format, a panel for the first partitions and devices."""
    rows = results.done
    if "weight_bytes" not in rows or rows.weight_bytes.isna().all():
        raise NotDrawn("")
    if rows.weights.nunique() < 2:
        raise NotDrawn("the points that succeeded have only one weight format")
    batches = sorted({int(batch) for batch in rows.batch})
    shown = [b for b in (batches[0], batches[-1]) if b == batches[0] or len(batches) > 1]
    settings = ["partition", "device", *results.varying(OFFLOAD_SETTINGS)]
    every = list(rows.groupby(settings, sort=False))
    groups = every[:_MOST_PANELS]
    with new_figure(len(groups), 3.2) as (figure, axes):
        for panel, ((partition, device, *offload), part) in zip(axes, groups, strict=True):
            _draw_panel(panel, part, shown)
            on = "" if device == "cpu" else f" on {device}"
            given = zip(settings[2:], offload, strict=True)
            moved = "".join(f"\n{name} {value:g}" for name, value in given if value)
            panel.set_title(f"partition {partition}{on}{moved}", fontsize=9)
        axes[0].set_ylabel("all ranks together (MB)")
        top = max(panel.get_ylim()[1] for panel in axes)
        for panel in axes:
            panel.set_ylim(0, top)
        legend_above(figure, *axes)
    caption = _caption(rows, shown)
    if len(groups) < len(every):
        caption += f" The first {len(groups)} of {len(every)} combinations are drawn."
    return Drawing(figure, "Bits per weight against memory", caption)


def _caption(rows: Any, batches: Sequence[int]) -> str:
    text = (
        "Memory that the model holds, summed over its ranks: weights, and the key/value cache of "
        f"the batch ({' and '.join(map(str, batches))} sequences) on top"
    )
    if _has(rows, _PLANNED):
        text += (
            ", with the pages in reserve, then the buffers of steps. Black lines are the memory "
            "plan's prediction of weights, cache and buffers, made without loading"
        )
    if _has(rows, ["vram_bytes"]):
        text += (
            ". Diamonds are the memory of the devices by their drivers' count, with everything "
            "that the plan leaves out; dotted lines the plan of devices alone, where other ranks "
            "are on the host"
        )
    return f"{text}. Peak memory of the process is in the table; it includes Python."


def _draw_panel(panel: Any, rows: Any, batches: Sequence[int]) -> None:
    names = format_axis(panel, rows)
    width = 0.8 / len(batches)
    for i, batch in enumerate(batches):
        part = rows[rows.batch == batch].drop_duplicates("weights").set_index("weights")
        part = part.reindex(names)
        x = np.arange(len(names)) + (i - (len(batches) - 1) / 2) * width
        bottom = np.zeros(len(names))
        for column, label, colour in _components(part, batch, i):
            height = part[column].fillna(0).to_numpy(float) / 1e6
            panel.bar(x, height, 0.92 * width, bottom=bottom, color=colour, label=label)
            bottom = bottom + height
        _draw_plan(panel, part, x, width, first=i == 0)


def _components(part: Any, batch: int, i: int) -> list[tuple[str, str | None, str]]:
    """Return column, label and colour of each part of a bar, from below."""
    is_planned = _has(part, _PLANNED)
    cache = "kv_allocated_bytes" if is_planned else "kv_bytes"  # older results have the second only
    found: list[tuple[str, str | None, str]] = [
        ("weight_bytes", "weights" if i == 0 else None, COLOURS[0]),
        (cache, f"cache, batch {batch}", COLOURS[1 + i]),
    ]
    for column, label, colour in _BUFFERS if is_planned else ():
        if _has(part, [column]):
            found.append((column, label if i == 0 else None, colour))
    return found


def _draw_plan(panel: Any, part: Any, x: np.ndarray, width: float, *, first: bool) -> None:
    """Draw the planned bytes, and the bytes of devices, over the bars of one batch."""
    ends = x - 0.46 * width, x + 0.46 * width
    if not _has(part, _PLANNED):
        return
    planned = part[list(_PLANNED)].sum(axis=1, min_count=len(_PLANNED)).to_numpy(float) / 1e6
    if _has(part, ["plan_step_bytes"]):
        planned = planned + part.plan_step_bytes.fillna(0).to_numpy(float) / 1e6
    panel.hlines(planned, *ends, color="black", linewidth=1.6, label="planned" if first else None)
    if not _has(part, ["vram_bytes"]):
        return
    measured = part.vram_bytes.to_numpy(float) / 1e6
    panel.plot(
        x, measured, linestyle="none", marker="D", markersize=4, markerfacecolor="white",
        markeredgecolor="black", label="VRAM" if first else None,
    )  # fmt: skip
    on_devices = part.plan_vram_bytes.to_numpy(float) / 1e6
    if (np.abs(on_devices - planned) > 1e-3 * planned).any():
        label = "planned VRAM" if first else None
        panel.hlines(on_devices, *ends, color="black", linestyles="dotted", label=label)


def _has(rows: Any, columns: Sequence[str]) -> bool:
    """Return whether every column is there with some numbers."""
    return all(column in rows and rows[column].notna().any() for column in columns)

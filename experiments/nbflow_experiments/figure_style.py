"""Style and shared helpers of the figures."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.utils.atomic_write import replace_atomically
from nbflow_experiments.optional_packages import require

# M. Okabe and K. Ito, "Color Universal Design", 2008: safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
_DPI = 200
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "svg.fonttype": "path",
    "figure.dpi": 100,
}
_FOOTER: dict[str, Any] = {"x": 0.008, "ha": "left", "fontsize": 6.5, "color": GREY}
_FOOTER_HEIGHT = 0.3


def launch_facts(launch: Mapping[str, Any]) -> str:
    """Return machine, date and commit of a launch (`store.provenance`) for a figure's footer."""
    rank = (launch.get("ranks") or [{}])[0]
    commit = str((launch.get("git") or {}).get("commit") or "?")[:8]
    machine = f"{rank.get('cpu_model', '?')}, {rank.get('cores', '?')} cores"
    return f"{machine}; {str(launch.get('started', '?'))[:10]}; commit {commit}"


class NotDrawn(Exception):
    """Results lack the data of a figure; the message names what is missing.

    An empty message means that the sweep did not measure it.
    """


@dataclass(frozen=True)
class Drawing:
    """A finished figure."""

    figure: Any
    title: str
    caption: str

    def save(self, folder: Path, name: str, origin: str) -> list[Path]:
        """Write ``NAME.png`` and ``NAME.svg``; equal results give equal files.

        The footer names the figure and `origin`: sweep, model, points, machine, date and commit.
        """
        files = []
        self.figure.supxlabel(f"{self.title}\n{origin}", **_FOOTER)
        for kind, meta in (("png", {"Software": None}), ("svg", {"Date": None})):
            path = folder / f"{name}.{kind}"
            # The salt makes the ids within an SVG the same each time.
            with (
                replace_atomically(path) as temporary,
                require("matplotlib").rc_context(_STYLE | {"svg.hashsalt": "nbflow"}),
            ):
                self.figure.savefig(temporary, format=kind, dpi=_DPI, metadata=meta)
            files.append(path)
        return files


@contextmanager
def new_figure(
    n_panels: int, height: float = 3.1, width: float = 3.45
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure with panels side by side, each `width` inches wide, in the report's style."""
    matplotlib = require("matplotlib")
    figure_module = require("matplotlib.figure")
    with matplotlib.rc_context(_STYLE):
        size = (width * n_panels, height + _FOOTER_HEIGHT)
        figure = figure_module.Figure(figsize=size, layout="constrained")
        figure.supxlabel("\n", **_FOOTER)  # room for the footer, before labels are placed
        panels = [figure.add_subplot(1, n_panels, i + 1) for i in range(n_panels)]
        figure.get_layout_engine().set(wspace=0.08)
        yield figure, panels
        figure.draw_without_rendering()


def bits_axis(panel: Any, bits: Sequence[float]) -> None:
    """Make the x axis one of bits per weight: logarithmic, with plain numbers."""
    low, high = min(bits), max(bits)
    ticks = [t for t in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if low / 1.1 <= t <= high * 1.1]
    log_axis(panel, ticks, "bits per weight (format)")
    panel.set_xlim(low / 1.18, high * 1.22)


def log_axis(panel: Any, ticks: Sequence[float], label: str) -> None:
    """Make the x axis logarithmic, with plain numbers at these ticks alone."""
    ticker = require("matplotlib.ticker")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    panel.set_xlabel(label)


def range_bars(rows: Any, name: str) -> np.ndarray:
    """Return error bars of a speed: from the slowest to the fastest repetition."""
    y, low, high = (rows[f"{name}_{end}tokens_per_s"].to_numpy() for end in ("", "min_", "max_"))
    return np.vstack([y - low, high - y])


def format_axis(panel: Any, rows: Any) -> list[str]:
    """Give every weight format of `rows` its own position, by bits; return their order."""
    formats = rows.drop_duplicates("weights").sort_values("bits_per_weight", kind="stable")
    names = list(formats.weights)
    crowded = len(names) > 12
    between = "  " if crowded else "\n"
    ticks = [f"{n}{between}{b:g}" for n, b in zip(names, formats.bits_per_weight, strict=True)]
    panel.set_xticks(range(len(names)), ticks, rotation=90 if crowded else 0)
    panel.set_xlabel("format and its bits per weight")
    panel.grid(visible=False, axis="x")
    return names


def place_labels(
    panel: Any,
    labels: Sequence[str],
    x: Sequence[float],
    y: Sequence[float],
    bars: tuple[Sequence[float], Sequence[float]] | None = None,
) -> None:
    """Write a label next to each point so that labels cover neither points nor each other.

    Each label takes the cheapest of several offsets from its point: without overlap, inside the
    panel, nearest to its own point.  All points and their error bars (`bars`: lengths below and
    above) count as occupied.
    """
    panel.figure.draw_without_rendering()
    scale = panel.figure.dpi / 72.0
    at = panel.transData.transform(np.column_stack([x, y]))
    ends = np.column_stack([at[:, 1], at[:, 1]])
    if bars is not None:
        for k, sign in enumerate((-1.0, 1.0)):
            reach = np.asarray(y, np.float64) + sign * np.asarray(bars[k], np.float64)
            ends[:, k] = panel.transData.transform(np.column_stack([x, reach]))[:, 1]
    taken = [_box(point, 7 * scale, 7 * scale) for point in at]
    taken += [
        (p[0] - 2 * scale, low, p[0] + 2 * scale, high)
        for p, (low, high) in zip(at, ends, strict=True)
    ]
    for i in np.argsort(-at[:, 1], kind="stable"):
        width, height = (5.2 * len(labels[i]) + 3.0) * scale, 9.5 * scale
        offsets = _label_offsets(width, height, scale, ends[i] - at[i, 1])
        costs = [
            _cost(_box(at[i] + place, width, height), taken, panel, at, i) + 2e-3 * scale * k
            for k, place in enumerate(offsets)
        ]
        place = offsets[int(np.argmin(costs))]
        taken.append(_box(at[i] + place, width, height))
        _write(panel, labels[i], (x[i], y[i]), place / scale)


def _write(panel: Any, text: str, at: tuple[float, float], offset: np.ndarray) -> None:
    """Write a label `offset` points away from a point."""
    halo = require("matplotlib.patheffects").withStroke(linewidth=2, foreground="white")
    note = panel.annotate(
        text,
        at,
        xytext=tuple(offset),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=8,
        color="#222222",
        path_effects=[halo],
        zorder=5,
    )
    note.set_in_layout(False)


def _label_offsets(width: float, height: float, scale: float, ends: np.ndarray) -> list[np.ndarray]:
    """Return offsets of a label's centre from its point, the preferred ones first."""
    side, above = width / 2 + 5 * scale, height / 2 + 4 * scale
    near = [(side, above * 0.6), (0, above), (side, 0), (-side, 0), (0, -above)]
    near += [(side, -above * 0.6), (-side, above * 0.6), (-side, -above * 0.6)]
    near += [(0, ends[1] + above * 0.8), (0, ends[0] - above * 0.8)]
    near += [(0, ends[1] + above * 1.9), (0, ends[0] - above * 1.9)]
    near += [(0, above * 1.9), (0, -above * 1.9), (0, above * 2.8), (0, -above * 2.8)]
    return [np.array(place) for place in near]


def _cost(
    box: tuple[float, ...], taken: Sequence[tuple[float, ...]], panel: Any, at: np.ndarray, own: int
) -> float:
    """Return the cost of a label box: overlap, overhang and ambiguity."""
    extent = panel.get_window_extent()
    area = (box[2] - box[0]) * (box[3] - box[1])
    outside = area - _overlap(box, (extent.x0 - 4, extent.y0, extent.x1 + 4, extent.y1 + 8))
    covered = sum(_overlap(box, other) for other in taken)
    gaps = [
        math.hypot(max(box[0] - px, px - box[2], 0.0), max(box[1] - py, py - box[3], 0.0))
        for px, py in at
    ]
    others = [gap for k, gap in enumerate(gaps) if not np.array_equal(at[k], at[own])]
    # A column below or above the point belongs to it even where others come near.
    aligned = abs((box[0] + box[2]) / 2 - at[own][0]) < 1.0
    confusing = bool(others) and min(others) < gaps[own] and not aligned
    far = aligned and gaps[own] > 40
    return float((20 * covered + 5 * outside) / area + 3.0 * confusing + 0.5 * far)


def _box(centre: np.ndarray, width: float, height: float) -> tuple[float, float, float, float]:
    """Return left, bottom, right, top of a box around a point."""
    x, y = float(centre[0]), float(centre[1])
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Return the intersection area of two boxes."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)


def svg_text(path: Path, title: str) -> str:
    """Return an SVG file as an element for an HTML page, its ids made unique by the file's name."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = f"{path.stem}-"
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", text)
    width = float(re.search(r' width="([\d.]+)pt"', text)[1])  # type: ignore[index]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    # Figures of two panels are as large in print as those of three: 1.4 pixels per point.
    style = f'style="max-width: {1.4 * width:.0f}px"'
    head = f'<svg role="img" {style} aria-label="{html.escape(title, quote=True)}"'
    return text.replace("<svg", head, 1)

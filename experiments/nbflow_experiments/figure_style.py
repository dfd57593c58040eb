"""Style and shared helpers of the figures."""

from __future__ import annotations

import html
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
    """Return machine, date and commit of a launch (`store.provenance`) for a figure's footer.

    The machine's GPUs belong to it if points ran on them, and the emulator if points ran in it.
    """
    rank = (launch.get("ranks") or [{}])[0]
    commit = str((launch.get("git") or {}).get("commit") or "?")[:8]
    machine = f"{rank.get('cpu_model', '?')}, {rank.get('cores', '?')} cores"
    if any("cuda" in device for device in launch.get("devices") or ()):
        machine += "".join(f", {gpu['name']}" for gpu in rank.get("gpus") or ())
    if launch.get("emulator"):
        machine += ", emulator without a GPU"
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
        if not self.figure.get_supxlabel():  # figures in a notebook have no footer
            width, height = self.figure.get_size_inches()
            self.figure.set_size_inches(width, height + _FOOTER_HEIGHT)
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
        size = (max(width * n_panels, 4.8), height)
        figure = figure_module.Figure(figsize=size, layout="constrained")
        panels = [figure.add_subplot(1, n_panels, i + 1) for i in range(n_panels)]
        figure.get_layout_engine().set(wspace=0.08)
        yield figure, panels
        figure.draw_without_rendering()


def series_style(i: int, j: int | None = None) -> dict[str, str]:
    """Return colour `i` and marker `j`; without `j` pairs that repeat after 49 series."""
    marker = i + i // len(COLOURS) if j is None else j
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[marker % len(MARKERS)]}


def legend_above(figure: Any, *panels: Any) -> None:
    """Put one legend of the panels above the figure, in as many columns as fit its width."""
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= {label: handle for handle, label in zip(handles, labels, strict=True)}
    container = require("matplotlib.container").Container  # series; predictions and zeros follow
    entries = dict(sorted(entries.items(), key=lambda entry: not isinstance(entry[1], container)))
    if not entries:
        return
    for columns in range(len(entries), 0, -1):
        legend = figure.legend(
            list(entries.values()), list(entries), loc="outside upper left", ncols=columns
        )
        width = legend.get_window_extent().width
        if width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def equal_speed(panel: Any, text: str) -> None:
    """Draw the line of a speed-up of 1 as an entry of the legend."""
    panel.axhline(1, color=GREY, linewidth=0.8, label=f"1.0: {text}")


def plain_numbers(axis: Any) -> None:
    """Write ticks as plain numbers with a thousands separator."""
    ticker = require("matplotlib.ticker")
    axis.set_major_formatter(
        ticker.FuncFormatter(lambda v, _: f"{v:,.0f}" if abs(v) >= 100 else f"{v:g}")
    )


def log_values(axis: Any) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 times powers of ten."""
    ticker = require("matplotlib.ticker")
    {"x": axis.axes.set_xscale, "y": axis.axes.set_yscale}[axis.axis_name]("log")
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


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
    # Text is as large in figures of two panels as in those of three; narrow pages scroll them.
    style = f'style="min-width: {0.95 * width:.0f}px; max-width: {1.4 * width:.0f}px"'
    head = f'<svg role="img" {style} aria-label="{html.escape(title, quote=True)}"'
    return text.replace("<svg", head, 1)

"""Figures and one HTML page from a results folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nbflow.utils.atomic_write import write_text
from nbflow_experiments.figure_style import Drawing, NotDrawn, svg_text
from nbflow_experiments.report import cascade, memory, partitions, quality, serving, speed
from nbflow_experiments.report.data import Results, load_results
from nbflow_experiments.report.html_page import render_page

_FIGURES: dict[str, Callable[[Results], Drawing]] = {
    "quality": quality.draw,
    "memory": memory.draw,
    "speed": speed.draw,
    "throughput": serving.draw_throughput,
    "partitions": partitions.draw,
    "batching": serving.draw_batching,
    "shared_prefix": serving.draw_prefix,
    "cascade": cascade.draw,
    "speculation": serving.draw_speculation,
}


def write_report(
    results: Path, out: Path | None = None, weights: str | None = None
) -> tuple[Path, list[Path]]:
    """Write the report of a sweep.

    Parameters
    ----------
    results : Path
        Results folder of ``nbflow sweep``; may be unfinished.
    out : Path, optional
        The page to write; by default ``report.html`` in the results folder.  The figures go into a
        folder ``figures`` next to it, each as PNG (200 dots per inch) and SVG.
    weights : str, optional
        Format shown in the figure of the partitions; by default the one nearest to 4.5 bits.

    Returns
    -------
    page : Path
        The HTML page; it needs no other file.
    figures : list of Path
        The figures.
    """
    data = load_results(results, weights)
    page = out or results / "report.html"
    folder = page.parent / "figures"
    sections: list[tuple[str, str, str]] = []
    written: list[Path] = []
    for name, draw in _FIGURES.items():
        try:
            drawing = draw(data)
        except NotDrawn as reason:
            if str(reason):  # else the sweep does not measure it
                sections.append((name, "", f"No figure '{name}': {reason}."))
            continue
        written += drawing.save(folder, name, data.origin)
        sections.append((name, svg_text(folder / f"{name}.svg", drawing.title), drawing.caption))
    write_text(page, render_page(data, sections, page.parent))
    return page, written

"""The HTML page of a report."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from nbflow_experiments.measures import MEASURES
from nbflow_experiments.report.data import Results, failure_text
from nbflow_experiments.report.summary import summary_html
from nbflow_experiments.settings import SETTINGS

_FIRST = (
    "bits_per_weight", "kld_mean_nats", "perplexity", "prefill_tokens_per_s",
    "decode_tokens_per_s", "weight_bytes", "kv_bytes", "peak_rss_bytes",
)  # fmt: skip
"""Columns that are visible without scrolling."""
_LAST = ("attempt", "wall_s")
"""Columns that describe the launch rather than the point."""
_HIDDEN = ("status", "error_type", "error_message", "error_step", "quality_shared_from")


def render_page(results: Results, sections: Sequence[tuple[str, str, str]], folder: Path) -> str:
    """Return the page.

    Parameters
    ----------
    results : Results
        Recorded results.
    sections : sequence of (name, SVG element, caption)
        The figures; one without a drawing shows its caption only.
    folder : Path
        Folder of the page, for links to the raw files.
    """
    template = resources.files("nbflow_experiments.report").joinpath("page.html")
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=_text(results.sweep["name"]),
        description=_text(results.sweep.get("description", "")),
        summary=summary_html(results, folder),
        facts=_facts(results),
        figures="\n".join(_figure(*section) for section in sections),
        points=_points(results),
        failures=_failures(results),
        measures=_measures(results),
        provenance=_provenance(results),
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _prose(text: str) -> str:
    """Return docstring text as HTML, names as code."""
    return re.sub(r"``(.+?)``|`(.+?)`", lambda m: f"<code>{m[1] or m[2]}</code>", _text(text))


def _facts(results: Results) -> str:
    """Return the constant settings and the machine."""
    launch = results.launches[-1] if results.launches else {}
    rank = (launch.get("ranks") or [{}])[0]
    ranks = launch.get("world_size", 1)
    fixed = {n: results.points[n].iloc[0] for n in SETTINGS if results.points[n].nunique() == 1}
    fixed = {name: value for name, value in fixed.items() if value != ""}
    facts = {
        "points": f"{len(results.done)} measured, {len(results.points) - len(results.done)} failed",
        "processor": f"{rank.get('cpu_model', '?')}, {rank.get('cores', '?')} cores",
        "devices": " | ".join(_devices(results)) or "processor",
        "ranks": f"{ranks} MPI ranks" if ranks > 1 else "threads of one process",
        "date": launch.get("started", "?"),
        "same for all": ", ".join(f"{name} {value}" for name, value in fixed.items()),
    }
    rows = (f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _devices(results: Results) -> list[str]:
    """Return the recorded hardware of the points."""
    found = results.done["devices"].dropna() if "devices" in results.done else ()
    return [str(text) for text in dict.fromkeys(found)]


def _figure(name: str, svg: str, caption: str) -> str:
    drawing = f'<div class="drawing">{svg}</div>' if svg else ""
    return f'<figure id="{name}">{drawing}<figcaption>{_text(caption)}</figcaption></figure>'


def _points(results: Results) -> str:
    """Return the sortable table of the points that succeeded."""
    done = results.done
    factors = [n for n in results.sweep["factors"] if n in done]
    factors.sort(key=lambda name: name != "weights")
    numbers = [
        c
        for c in done
        if c not in SETTINGS
        and c not in _HIDDEN
        and c != "point"
        and done[c].notna().any()
        and not (c == "partition_chosen" and (done[c] == done.partition).all())
        and not (c == "devices" and done[c].nunique() == 1)
    ]
    numbers = [c for c in numbers if c not in _LAST]
    first = [c for c in _FIRST if c in numbers]
    numbers = [*first, *(c for c in numbers if c not in first)]
    columns = [*factors, *numbers, *(c for c in _LAST if c in done), "point"]
    breakable = (_text(column).replace("_", "_<wbr>") for column in columns)
    head = "".join(f"<th>{column}</th>" for column in breakable)
    body = []
    for _, row in done.iterrows():
        body.append("<tr>" + "".join(_cell(row[column]) for column in columns) + "</tr>")
    return table(head, "\n".join(body))


def table(head: str, body: str) -> str:
    """Return a table whose columns can be sorted."""
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    """Return a table cell; numbers keep their full value for sorting."""
    if isinstance(value, str):
        return f'<td data-sort="{html.escape(value, quote=True)}">{_text(value)}</td>'
    number = math.nan if value is None else float(value)
    if math.isnan(number):
        return '<td data-sort="">-</td>'
    large = number == round(number) and abs(number) < 1e15
    text = f"{number:,.0f}" if large or abs(number) >= 1e5 else f"{number:.5g}"
    return f'<td class="number" data-sort="{number!r}">{text}</td>'


def _failures(results: Results) -> str:
    """Return the failed points with their errors."""
    if not results.failures:
        return "<p>None.</p>"
    items = []
    for failure in results.failures:
        config = ", ".join(f"{name} = {value}" for name, value in failure["config"].items())
        summary = _text(f"{config}: {failure_text(failure)}")
        trace = _text(failure["traceback"])
        items.append(f"<details><summary>{summary}</summary><pre>{trace}</pre></details>")
    return "\n".join(items)


def _measures(results: Results) -> str:
    """Return the definition of each measure, from its module docstring."""
    parts = []
    for name in results.sweep.get("measures", ()):
        about = results.sweep.get("about", {}).get(name) or MEASURES[name].about
        paragraphs = re.split(r"\n\s*\n", about.strip())
        text = "".join(f"<p>{_prose(' '.join(p.split()))}</p>" for p in paragraphs)
        parts.append(f"<h3>{_text(name)}</h3>{text}")
    return "\n".join(parts)


def _provenance(results: Results) -> str:
    parts = []
    for i, launch in enumerate(results.launches):
        rows = "".join(
            f"<tr><th>{_text(key)}</th><td>{_value(value)}</td></tr>"
            for key, value in launch.items()
        )
        parts.append(
            f"<details><summary>launch {i}, {_text(launch['started'])}</summary>"
            f"<table>{rows}</table></details>"
        )
    return "\n".join(parts)


def _value(value: Any) -> str:
    """Return a provenance entry: plain text, or JSON for structures."""
    if isinstance(value, Mapping | list):
        return f"<pre>{_text(json.dumps(value, indent=1))}</pre>"
    return _text(value)

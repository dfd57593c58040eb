"""Published tables of quality as files: numbers, source, and the convention behind them.

A file ``tables/ID.toml`` has

``title``, ``source``, ``date``
    What the table shows, where it was published, and when it was read there.
``model``, ``n_parameters``, ``text``
    Name on the Hugging Face Hub, size, and the text that was scored.
``[convention]``
    ``context``, ``scored``, ``stride`` as for `nbflow perplexity`; ``bos``: "window" (the first
    token of each window is BOS), "text" (the first of the text) or "none"; ``note``.
``[within]``
    Metric -> relative difference up to which a number agrees.
``[[rows]]``
    ``name``; ``load``: options of `nbflow.load`; ``file``: name of a checkpoint that another tool
    quantized, instead of the model; ``published``: metric -> value; ``stderr``: metric -> standard
    error; ``differs``: why the row cannot agree with nbflow, if it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nbflow.utils.toml_schema import check_keys, check_value, read_toml
from nbflow_experiments.scoring.windows import SCORED
from nbflow_kernels.errors import UsageError, unknown_name

TABLES = Path(__file__).with_name("tables")
BOS = ("window", "text", "none")
METRICS = ("ppl", "kld_mean", "kld_median", "same_top_p")
"""Metrics of `nbflow_experiments.scoring.statistics_table`."""


@dataclass(frozen=True)
class Convention:
    """Windows of a text and their scored tokens."""

    context: int
    scored: str
    stride: int = 0
    bos: str = "window"
    note: str = ""


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table."""

    name: str
    load: Mapping[str, Any]
    published: Mapping[str, float]
    stderr: Mapping[str, float]
    file: str = ""
    differs: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A table."""

    id: str
    title: str
    source: str
    date: str
    model: str
    n_parameters: float
    text: str
    convention: Convention
    within: Mapping[str, float]
    rows: tuple[PublishedRow, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that a row has, in the order of `METRICS`."""
        return tuple(m for m in METRICS if any(m in row.published for row in self.rows))

    @property
    def needs_reference(self) -> bool:
        """True if a metric compares with the unquantized model."""
        return any(metric != "ppl" for metric in self.metrics)


def known_tables() -> dict[str, Path]:
    """Return the tables of the package: id -> file."""
    return {path.stem: path for path in sorted(TABLES.glob("*.toml"))}


def load_table(name: str) -> PublishedTable:
    """Read a table of the package by id, or a file.

    Raises
    ------
    UsageError
        If the table does not exist or is not valid.
    """
    path = Path(name)
    if path.suffix != ".toml":
        known = known_tables()
        if name.upper() not in known:
            raise unknown_name("table", name, known)
        path = known[name.upper()]
    data, where = read_toml(path), str(path)
    names = [each.name for each in fields(PublishedTable) if each.name != "id"]
    check_keys(data, where, names)
    missing = [key for key in names if key not in data]
    if missing:
        raise UsageError(f"{where}: {missing[0]} is missing")
    rows = data["rows"]
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{where}: [[rows]] must describe at least one row")
    texts = ("title", "source", "date", "model", "text")
    return PublishedTable(
        id=path.stem,
        **{key: check_value(data[key], f"{where}: {key}", str) for key in texts},
        n_parameters=check_value(data["n_parameters"], f"{where}: n_parameters", float),
        convention=_convention(data["convention"], f"{where}: [convention]"),
        within=_numbers(data["within"], f"{where}: [within]"),
        rows=tuple(_row(row, f"{where}: [[rows]] {i + 1}") for i, row in enumerate(rows)),
    )


def _convention(table: Any, where: str) -> Convention:
    kinds = {"context": int, "scored": str, "stride": int, "bos": str, "note": str}
    check_keys(table, where, kinds)
    given = {key: check_value(v, f"{where}: {key}", kinds[key]) for key, v in table.items()}
    if "context" not in given or "scored" not in given:
        raise UsageError(f"{where}: context and scored are required")
    found = Convention(**given)
    if found.scored not in SCORED:
        raise UsageError(
            f"{where}: {unknown_name('choice of scored tokens', found.scored, SCORED)}"
        )
    if found.bos not in BOS:
        raise UsageError(f"{where}: {unknown_name('place of BOS', found.bos, BOS)}")
    return found


def _row(table: Any, where: str) -> PublishedRow:
    check_keys(table, where, [each.name for each in fields(PublishedRow)])
    if "name" not in table or "published" not in table:
        raise UsageError(f"{where}: name and published are required")
    load = table.get("load", {})
    if not isinstance(load, dict):
        raise UsageError(f"{where}: load must be a table of options, got {load!r}")
    return PublishedRow(
        name=check_value(table["name"], f"{where}: name", str),
        load=load,
        published=_numbers(table["published"], f"{where}: published"),
        stderr=_numbers(table.get("stderr", {}), f"{where}: stderr"),
        file=check_value(table.get("file", ""), f"{where}: file", str),
        differs=check_value(table.get("differs", ""), f"{where}: differs", str),
    )


def _numbers(table: Any, where: str) -> dict[str, float]:
    check_keys(table, where, METRICS)
    return {key: float(check_value(v, f"{where}: {key}", float)) for key, v in table.items()}

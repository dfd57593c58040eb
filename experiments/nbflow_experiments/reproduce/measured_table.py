"""Measure a published table: each row's numbers, the differences, and a verdict.

The model is loaded once for each row, one after the other.  A row that fails is a row with the
reason.  The unquantized model's logits, float32, are stored in a temporary file where a metric
needs them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import nbflow
from nbflow.distributed import SelfComm
from nbflow_experiments import backend
from nbflow_experiments.compare.checkpoint_files import FLOAT32
from nbflow_experiments.reproduce.published_table import PublishedRow, PublishedTable
from nbflow_experiments.scoring.logits_file import create, open_logits
from nbflow_experiments.scoring.score_text import file_reference, score_text
from nbflow_experiments.scoring.statistics_table import as_json, statistics
from nbflow_experiments.scoring.windows import Window, cut
from nbflow_kernels.errors import UsageError

SAME_SIZE = 0.02
"""Relative difference of the number of parameters up to which a model is the table's."""
AGREES, DIFFERS = "agrees", "differs"
N_ERRORS = 2.0
"""Standard errors of a difference within which it agrees."""


@dataclass(frozen=True)
class Outcome:
    """One measured row."""

    row: PublishedRow
    status: str
    """"done", or the reason why it failed."""
    ours: dict[str, float] = field(default_factory=dict)
    """Metric -> value."""
    stderr: dict[str, float] = field(default_factory=dict)
    """Metric -> standard error."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Metric -> "agrees", "differs", or why the two cannot be compared."""


def text_windows(table: PublishedTable, model: str, text: Path, limit: int = 0) -> list[Window]:
    """Return the table's windows of a text in the model's tokens, at most `limit` of them."""
    how = table.convention
    ids, bos = backend.tokenize(model, text)
    bos = None if how.bos == "none" else bos
    if how.bos == "text" and bos is not None and how.scored != "new":
        ids, bos = np.concatenate([[bos], ids]), None
    return cut(ids, how.context, how.stride, how.scored, bos)[: limit or None]


def measure_table(
    table: PublishedTable,
    model: str,
    windows: Sequence[Window],
    files: Path | None = None,
    threads: int | None = None,
    whole_text: bool = True,
) -> Iterator[Outcome]:
    """Measure each row of a table.

    Parameters
    ----------
    table : PublishedTable
        The table.
    model : str
        Its model, as for `nbflow.load`.  Another one is measured, too, but not judged.
    windows : sequence of Window
        `text_windows`.
    files : path, optional
        Folder of the checkpoints that rows name.
    threads : int, optional
        As for `nbflow.load`.
    whole_text : bool
        False if `windows` are a part: rows are not judged.
    """
    with tempfile.TemporaryDirectory(prefix="reproduce-") as folder:
        logits = Path(folder) / "logits.h5"
        with nbflow.load(model, comm=SelfComm(), threads=threads, **FLOAT32) as exact:
            n_parameters = exact.spec.n_parameters
            if table.needs_reference:
                with create(logits, {"model": model, **FLOAT32}) as file:
                    score_text(exact, windows, save=file)
        obstacle = _obstacle(table, n_parameters, whole_text)
        for row in table.rows:
            try:
                found = _measure(row, model, windows, files, logits, threads)
            except (UsageError, OSError, MemoryError) as error:
                yield Outcome(row, str(error) or type(error).__name__)
                continue
            yield _judged(table, row, found, obstacle)


def _obstacle(table: PublishedTable, n_parameters: int, whole_text: bool) -> str:
    """Return why numbers cannot be judged, or nothing."""
    if abs(n_parameters / table.n_parameters - 1) > SAME_SIZE:
        return f"stand-in of {n_parameters:,} parameters"
    return "" if whole_text else "part of the text"


def _measure(
    row: PublishedRow,
    model: str,
    windows: Sequence[Window],
    files: Path | None,
    logits: Path,
    threads: int | None,
) -> dict[str, float | None]:
    """Return the statistics of one row."""
    name = model
    if row.file:
        if files is None or not (files / row.file).exists():
            raise UsageError(f"needs {row.file}: name its folder with --files")
        name = str(files / row.file)
    options: dict[str, Any] = {"kv": "f32", **row.load}
    with nbflow.load(name, comm=SelfComm(), threads=threads, **options) as loaded:
        if not logits.exists():
            return as_json(statistics(score_text(loaded, windows)))
        with open_logits(logits) as stored:
            scores = score_text(loaded, windows, reference=file_reference(stored))
        return as_json(statistics(scores))


def _judged(
    table: PublishedTable, row: PublishedRow, found: dict[str, float | None], obstacle: str
) -> Outcome:
    """Return a row with its differences and verdicts."""
    ours, errors, verdicts = {}, {}, {}
    for metric, published in row.published.items():
        value = found.get(metric)
        ours[metric] = math.nan if value is None else value
        errors[metric] = found.get(f"{metric}_stderr") or 0.0
        allowed = max(
            table.within.get(metric, 0.0) * abs(published),
            N_ERRORS * math.hypot(errors[metric], row.stderr.get(metric, 0.0)),
        )
        close = abs(ours[metric] - published) <= allowed
        verdicts[metric] = obstacle or row.differs or (AGREES if close else DIFFERS)
    return Outcome(row, "done", ours, errors, verdicts)

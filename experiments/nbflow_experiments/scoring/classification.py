"""Labelled texts, and the measures of GLUE for a classifier's answers."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.utils.json_file import parse_lines
from nbflow_experiments.scoring.estimates import Estimate, estimate_share
from nbflow_kernels.errors import UsageError

TEXTS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"),
    ("question", "sentence"), ("#1 String", "#2 String"), ("text", "text_pair"),
    ("sentence", None), ("text", None),
)  # fmt: skip
"""Columns of the texts in GLUE's files and in those of transformers' examples."""
LABELS = ("label", "gold_label", "is_duplicate", "Quality", "score")
"""Columns of the label."""


@dataclass(frozen=True)
class Columns:
    """Columns of the texts and the label: names, or numbers from 1 in a file without names."""

    text: str
    pair: str | None
    label: str


@dataclass(frozen=True)
class Example:
    """One or two texts and their label, as the file writes it."""

    text: str
    pair: str | None
    label: str

    @property
    def texts(self) -> str | tuple[str, str]:
        """The text, or the pair of texts."""
        return self.text if self.pair is None else (self.text, self.pair)


def read_examples(
    path: Path, text: str | None = None, pair: str | None = None, label: str | None = None
) -> list[Example]:
    """Read labelled texts from tab-separated values or JSON lines.

    Parameters
    ----------
    path : Path
        ``.tsv`` with the names of the columns in the first line, or ``.jsonl`` with an object in
        each.
    text, pair, label : str, optional
        Columns (see `Columns`); by default those of `TEXTS` and `LABELS` that the file has.

    Raises
    ------
    UsageError
        If the file does not exist, is malformed, or lacks a column.
    """
    if not path.is_file():
        raise UsageError(f"the file {path} does not exist")
    if path.suffix not in (".tsv", ".jsonl"):
        raise UsageError(f"{path}: must be a .tsv or .jsonl file")
    has_names = path.suffix == ".jsonl" or not (text or "").isdecimal()
    rows: Iterator[tuple[str, Mapping[str, Any]]] = _tsv_rows(path, has_names)
    if path.suffix == ".jsonl":
        rows = parse_lines(path.read_text(encoding="utf-8"), str(path))
    columns, found = None, []
    for where, row in rows:
        columns = columns or _columns(row, where, text, pair, label)
        values = []
        for column in (columns.text, columns.pair, columns.label):
            if column is not None and row.get(column) is None:
                raise UsageError(f"{where}: lacks the column {column!r}")
            values.append("" if column is None else str(row[column]))
        found.append(Example(values[0], None if columns.pair is None else values[1], values[2]))
    if not found:
        raise UsageError(f"{path} holds no texts")
    return found


def _tsv_rows(path: Path, has_names: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and the columns of each line; GLUE's files have no quotation marks."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1)
        names = next(lines, (1, list[str]()))[1] if has_names else None
        for i, line in lines:
            keys = [str(k) for k in range(1, len(line) + 1)] if names is None else names
            if line:
                yield f"{path}:{i}", dict(zip(keys, line, strict=False))


def _columns(
    row: Mapping[str, Any], where: str, text: str | None, pair: str | None, label: str | None
) -> Columns:
    """Return the columns of a file from its first row."""
    label = label or next((name for name in LABELS if name in row), None)
    if text is None:
        text, pair = next(
            (names for names in TEXTS if all(n is None or n in row for n in names)), (None, None)
        )
    if text is None or label is None:
        missing = "text" if text is None else "label"
        raise UsageError(
            f"{where}: no known column holds the {missing}, name it with --{missing}; the columns "
            f"are {', '.join(row)}"
        )
    return Columns(text, pair, label)


def label_index(label: str, labels: Sequence[str]) -> int:
    """Return the number of a label that is written as a name of the model, or as a number."""
    lowered = [name.lower() for name in labels]
    if label.strip().lower() in lowered:
        return lowered.index(label.strip().lower())
    if label.strip().isdecimal() and int(label) < len(labels):
        return int(label)
    raise UsageError(
        f"the label {label!r:.60} is neither a number below {len(labels)} nor one of the model's: "
        f"{', '.join(labels)}"
    )


def measures(answers: np.ndarray, truth: np.ndarray, n_labels: int) -> dict[str, Estimate]:
    """Return accuracy, F1 and Matthews' correlation of predicted labels.

    F1 is that of label 1 for two labels, as in GLUE, else the mean over labels (macro).

    Examples
    --------
    >>> import numpy as np
    >>> found = measures(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0]), 2)
    >>> [round(found[name].mean, 4) for name in ("accuracy", "f1", "matthews")]
    [0.75, 0.6667, 0.5774]
    """
    table = np.zeros((n_labels, n_labels))
    np.add.at(table, (truth, answers), 1)
    right = np.diag(table)
    sums = table.sum(0) + table.sum(1)
    f1 = np.divide(2 * right, sums, out=np.zeros(n_labels), where=sums > 0)
    n = len(truth)
    found = {"accuracy": estimate_share(answers == truth)}
    present = sums > 0
    value = float(f1[1] if n_labels == 2 else f1[present].mean())
    found["f1" if n_labels == 2 else "f1_macro"] = Estimate(value, math.nan, n)
    covariance = float(right.sum() * n - table.sum(0) @ table.sum(1))
    spread = math.sqrt((n**2 - (table.sum(0) ** 2).sum()) * (n**2 - (table.sum(1) ** 2).sum()))
    found["matthews"] = Estimate(covariance / spread if spread else 0.0, math.nan, n)
    return found


def correlations(answers: np.ndarray, truth: np.ndarray) -> dict[str, Estimate]:
    """Return Pearson's and Spearman's correlation of predicted numbers."""
    pairs = {"pearson": (answers, truth), "spearman": (_ranks(answers), _ranks(truth))}
    return {
        name: Estimate(_correlation(*pair), math.nan, len(truth)) for name, pair in pairs.items()
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    spread = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / spread if spread else math.nan


def _ranks(x: np.ndarray) -> np.ndarray:
    """Return the ranks of numbers; equal ones share the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]

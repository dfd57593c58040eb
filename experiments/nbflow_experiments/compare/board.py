"""The board: weight formats by their divergence on one fixed model and text, at equal stored bits.

Model, text and windows never change, so that a row of today compares with one of next year: all
matrices of the bundled model in one format, quantized without calibration, against its float32
logits on the last 128 tokens of 64 windows of 256 tokens.  `board.json` has the published rows with
their means by window.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import nbflow
from nbflow.distributed.comm import SelfComm
from nbflow_experiments import backend
from nbflow_experiments.compare.bootstrap import Interval, paired
from nbflow_experiments.scoring.score_text import predictions, score_text
from nbflow_experiments.scoring.windows import Window, cut
from nbflow_kernels import FORMATS
from nbflow_kernels.errors import UsageError

MODEL = "tiny_python"
CONTEXT, N_WINDOWS = 256, 64
BUDGETS = (3.0, 3.5, 4.0, 5.0)
"""Largest stored bits per weight of each part of the board."""
ROWS = Path(__file__).with_name("board.json")


@dataclass(frozen=True)
class Entry:
    """A format on the board."""

    format: str
    quantizer: str
    bits: float
    """Stored bits per weight of a matrix, scales included."""
    windows: tuple[float, ...]
    """Mean divergence from float32 in each window, nat per token."""
    published: bool = True
    """False for formats that were measured just now."""

    @property
    def divergence(self) -> float:
        """Mean divergence from float32, nat per token."""
        return float(np.mean(self.windows))

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the divergence, by windows."""
        return float(1.96 * np.std(self.windows, ddof=1) / len(self.windows) ** 0.5)

    @property
    def budget(self) -> float:
        """Part of the board to which the format belongs."""
        return next(budget for budget in BUDGETS if self.bits <= budget)

    def against(self, other: Entry) -> Interval:
        """Return the difference to another entry, with its interval over the same windows."""
        return paired(np.array(other.windows), np.array(self.windows), 1)


def check_format(name: str) -> None:
    """Raise UsageError unless a format has a place on the board."""
    format = FORMATS[name]  # raises for an unknown name
    if format.bits_per_weight > BUDGETS[-1]:
        raise UsageError(
            f"format {name} stores {format.bits_per_weight:g} bits per weight; the board ends at "
            f"{BUDGETS[-1]:g}"
        )


def published() -> list[Entry]:
    """Return the published rows."""
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    return [Entry(**{**row, "windows": tuple(row["windows"])}) for row in data["entries"]]


def measure(name: str, quantizer: str = "auto", importance: str | None = None) -> Entry:
    """Measure a format.

    Parameters
    ----------
    name : str
        A name in `nbflow_kernels.FORMATS` with at most 5 stored bits per weight.
    quantizer, importance : str
        As for `nbflow.load`.

    Raises
    ------
    UsageError
        If the format is unknown, too large, or cannot be quantized like this.
    """
    check_format(name)
    options: dict[str, Any] = {
        "weights": name,
        "quantizer": quantizer,
        "importance": importance,
        "kv": "f32",
    }
    with nbflow.load(MODEL, comm=SelfComm(), **options) as model:
        exact = iter(_exact_logits())
        scores = score_text(model, _windows(), reference=lambda window: next(exact))
    means = scores.divergence.reshape(N_WINDOWS, -1).mean(axis=1)
    bits = float(FORMATS[name].bits_per_weight)
    windows = tuple(round(float(mean), 7) for mean in means)
    return Entry(FORMATS[name].name, quantizer, bits, windows, published=False)


def board(entries: Sequence[Entry]) -> dict[float, list[Entry]]:
    """Return the entries of each budget, the least divergence first."""
    parts: dict[float, list[Entry]] = {budget: [] for budget in BUDGETS}
    for entry in sorted(entries, key=lambda entry: entry.divergence):
        parts[entry.budget].append(entry)
    return parts


def as_json(entry: Entry) -> dict[str, object]:
    """Return plain data of an entry of `board.json`."""
    return {**asdict(entry), "windows": list(entry.windows)}


@cache
def _windows() -> tuple[Window, ...]:
    """Return the windows of the text."""
    ids, bos = backend.tokenize(MODEL, backend.text_file(MODEL))
    return tuple(cut(ids, CONTEXT, 0, "second-half", bos)[:N_WINDOWS])


@cache
def _exact_logits() -> tuple[np.ndarray, ...]:
    """Return the float32 model's logits of each window, (128, V)."""
    with nbflow.load(MODEL, comm=SelfComm(), weights="f32", kv="f32") as model:
        return tuple(predictions(model, window) for window in _windows())

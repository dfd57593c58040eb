"""Importance statistics: concentration of column importance within a matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

ACTIVE = 1e-5  # mean square above which llama.cpp's --show-statistics calls a column active


@dataclass(frozen=True)
class ColumnStatistics:
    """Distribution of column mean squares of a matrix; experts are pooled."""

    name: str
    n_columns: int
    """Columns, of all experts."""
    sum: float
    """Sum of the mean squares, in the square of the activations' unit."""
    least: float
    largest: float
    active_share: float
    """Share of columns with a mean square above `ACTIVE`."""
    entropy_share: float
    """Entropy of the distribution over columns, relative to log(columns): 1 if uniform."""
    top_percent_share: float
    """Share of the sum in the largest 1 % of the columns (at least one)."""
    cosine_to_previous: float
    """Cosine with the mean squares of the same matrix one layer before; NaN in the first layer."""


def column_statistics(importance: Mapping[str, np.ndarray]) -> list[ColumnStatistics]:
    """Return the statistics of each matrix.

    Parameters
    ----------
    importance : mapping
        From `nbflow.quantization.importance.read_importance`: name -> mean squares (K,),
        (experts, K) or second moments (K, K).

    Examples
    --------
    >>> one = column_statistics({"blk.0.ffn_up.weight": np.ones(200)})[0]
    >>> one.sum, one.entropy_share, one.top_percent_share
    (200.0, 1.0, 0.01)
    """
    vectors = {name: _squares(array) for name, array in importance.items()}
    return [_of(name, vector, vectors) for name, vector in vectors.items()]


def _squares(array: np.ndarray) -> np.ndarray:
    """Return mean squares of columns, float64, those of experts one after the other."""
    values = np.asarray(array, np.float64)
    is_full = (
        values.ndim == 2 and values.shape[0] == values.shape[1] and np.array_equal(values, values.T)
    )
    return values.diagonal() if is_full else values.reshape(-1)


def _of(name: str, squares: np.ndarray, others: Mapping[str, np.ndarray]) -> ColumnStatistics:
    total, n = float(squares.sum()), len(squares)
    share = squares / total if total > 0 else np.full(n, 1 / n)
    used = share[share > 0]
    entropy = -float(np.sum(used * np.log(used))) / math.log(n) if n > 1 else 1.0
    top = np.sort(share)[-max(1, n // 100) :].sum()
    earlier = _previous(name)
    before = others.get(earlier, np.zeros(0)) if earlier != name else np.zeros(0)
    norms = np.linalg.norm(squares) * np.linalg.norm(before)
    same = before.shape == squares.shape and norms > 0
    return ColumnStatistics(
        name=name,
        n_columns=n,
        sum=total,
        least=float(squares.min()),
        largest=float(squares.max()),
        active_share=float(np.mean(squares > ACTIVE)),
        entropy_share=round(entropy, 12),
        top_percent_share=round(float(top), 12),
        cosine_to_previous=float(squares @ before / norms) if same else math.nan,
    )


def _previous(name: str) -> str:
    """Return the name of the same matrix one layer before."""
    return re.sub(r"(?<=\.)\d+(?=\.)", lambda m: str(int(m[0]) - 1), name, count=1)

"""Divergence by position in the window, and by frequency of the predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_experiments.analysis.logit_comparison import Comparison
from nbflow_experiments.scoring.estimates import estimate_mean

Integers = NDArray[np.int64]


def token_rows(
    label: str, comparison: Comparison, targets: Sequence[NDArray[Any]]
) -> list[dict[str, Any]]:
    """Return a row for each group of predicted tokens.

    Parameters
    ----------
    label : str
        The change.
    comparison : Comparison
        Scores of the predicted tokens of all windows.
    targets : sequence of array of int, shape (T,)
        The predicted tokens of each window.

    Returns
    -------
    list of dict
        `by` "position": tokens of the window before the predicted one; `by` "count": how often the
        predicted token occurs among all of them.  Groups are powers of two, from `low` to `high`.
    """
    positions = np.concatenate([np.arange(1, len(window) + 1) for window in targets])
    tokens = np.concatenate(targets)
    _, index, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    keys = {"position": positions, "count": counts[index]}
    return [
        {"change": label, "by": by, **row}
        for by, values in keys.items()
        for row in _groups(values.astype(np.int64), comparison)
    ]


def _groups(values: Integers, comparison: Comparison) -> list[dict[str, Any]]:
    """Return a row for each power of two among the values."""
    level = np.floor(np.log2(values)).astype(int)
    rows = []
    for k in np.unique(level):
        members = level == k
        kld = estimate_mean(comparison.divergence[members])
        nll = estimate_mean(comparison.nll_difference[members])
        rows.append({
            "low": 2**k,
            "high": min(2 ** (k + 1) - 1, int(values.max())),
            "tokens": kld.n,
            "kld_mean_nats": kld.mean,
            "kld_mean_nats_stderr": kld.stderr,
            "nll_difference_mean_nats": nll.mean,
            "nll_difference_mean_nats_stderr": nll.stderr,
        })  # fmt: skip
    return rows

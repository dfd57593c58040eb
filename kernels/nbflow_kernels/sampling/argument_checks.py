"""Argument checks of the public sampling functions."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_ids, is_cuda, on_host, per_row
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling.cpu_filters import BY_RANK, FLOOR, MIN_P, OFF, TOP_K, TOP_P

NOT_PROBS = "must be finite, not negative and not all zero"
NOT_LOGITS = "must not have a NaN or +inf, nor be all -inf"


def check_valid(name: str, marks: Any, wanted: str, least: int = 0) -> None:
    """Raise if a kernel marked a row as invalid, by a number below `least`.

    Device arrays are not checked: that would synchronize.
    """
    if not is_cuda(marks) and (marks < least).any():
        raise UsageError(f"{name}: row {int(np.flatnonzero(marks < least)[0])} {wanted}")


def check_tie_break(tie_break: Any) -> bool:
    """Return True if the highest of equal elements are preferred, not the lowest."""
    if isinstance(tie_break, bool) or tie_break not in (0, 1, 2):
        raise UsageError(
            "tie_break must be 0 or 1, the lowest indices of equal elements, or 2, the highest; "
            f"got {tie_break!r}"
        )
    return bool(tie_break == 2)


def counts_per_row(name: str, value: Any, B: int) -> Any:
    """Return one float64 per row from integers of at least 1, or infinity."""
    counts = per_row(name, value, B)
    if not (counts >= 1).all() or (np.floor(counts) != counts).any():
        raise UsageError(f"{name} must be an integer of at least 1, got {counts.min():g}")
    return counts


def fractions_per_row(name: str, value: Any, B: int) -> Any:
    """Return one float64 per row from numbers in 0..1."""
    fractions = per_row(name, value, B)
    inside = (fractions >= 0) & (fractions <= 1)
    if not inside.all():
        raise UsageError(f"{name} must be 0..1, got {fractions[~inside][0]:g}")
    return fractions


def limits_of(B: int, **filters: Any) -> Any:
    """Return the parameters of the filters, float64 (B, 5), as in `sampling.cpu_filters`."""
    limits = np.tile(np.array(OFF), (B, 1))
    for name, value in filters.items():
        if name == "top_k":
            limits[:, TOP_K] = counts_per_row(name, value, B)
        elif name == "floor":
            limits[:, FLOOR] = value
        else:
            limits[:, MIN_P if name == "min_p" else TOP_P] = fractions_per_row(name, value, B)
            limits[:, BY_RANK] = name == "typical_p"
    return limits


def rows_of(indices: Any, R: int, name: str) -> Any:
    """Return the row of each draw, int32 (B,)."""
    if indices is None:
        return np.arange(R, dtype=np.int32)
    check_array("indices", indices, (None,), np.int32)
    check_ids("indices", indices, R, f"the rows of {name}")
    return indices


def streams(seed: Any, offset: Any, B: int) -> tuple[Any, Any]:
    """Return seed and offset of each row, uint64 (B,); without a seed, one of the system's."""
    seed = secrets.randbits(63) if seed is None else seed
    columns: list[Any] = []
    n_axes = 0
    for name, value in (("seed", seed), ("offset", offset)):
        array = np.asarray(on_host(value))
        if array.dtype.kind not in "iu":
            raise TypeError(
                f"{name} must be an integer of 64 bits or an array of them, got {value!r}"
            )
        if array.shape not in ((), (B,)):
            raise UsageError(f"{name} must be an integer or have shape ({B},), got {array.shape}")
        if array.size and int(array.min()) < 0:
            raise UsageError(f"{name} must not be negative, got {array.min()}")
        n_axes += array.ndim
        columns.append(np.array(np.broadcast_to(array.astype(np.uint64), B)))  # writable
    if n_axes == 0:
        columns[1] = columns[1] + np.arange(B, dtype=np.uint64)
    return columns[0], columns[1]

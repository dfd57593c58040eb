"""Checks of the arguments of norms."""

from __future__ import annotations

from typing import Any

from nbflow_kernels.arrays import check_array


def check_vectors(name: str, x: Any) -> None:
    """Raise unless `x` is (T, E) or (T, H, E)."""
    check_array(name, x, (None,) * (3 if getattr(x, "ndim", 2) == 3 else 2), rows=True)


def check_columns(name: str, weight: Any, x: Any) -> None:
    """Raise unless `weight` is None or has one number per column, or per head and column."""
    if weight is not None:
        per_head = x.ndim == 3 and getattr(weight, "ndim", 1) == 2
        check_array(name, weight, x.shape[1:] if per_head else x.shape[-1:])

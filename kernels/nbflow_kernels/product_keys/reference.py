"""Retrieval by product keys in NumPy float64, as in the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def product_key_routing(
    scores: Any, top_k: int, *, first: int = 0, n_experts: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """See `nbflow_kernels.product_key_routing`."""
    rows, other = np.split(np.asarray(scores, np.float64), 2, axis=1)
    sums = (rows[:, :, None] + other[:, None, :]).reshape(len(rows), rows.shape[1] ** 2)
    n = sums.shape[1] - first if n_experts is None else n_experts
    ids = np.argsort(-sums, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(sums, ids, axis=1)
    weights = np.exp(chosen - chosen[:, :1])
    ids = ids - first
    ids[(ids < 0) | (ids >= n)] = -1
    return weights / weights.sum(axis=1, keepdims=True), ids.astype(np.int32)


def gathered_dot(x: Any, table: Any, ids: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gathered_dot`."""
    rows, every = np.asarray(x, np.float64), np.asarray(table, np.float64)
    indices = np.asarray(ids)
    held = (indices >= 0) & (indices < len(every))
    if not len(every):
        return np.zeros(indices.shape)
    products = np.einsum("te,tre->tr", rows, every[np.where(held, indices, 0)])
    return np.where(held, products, 0.0)

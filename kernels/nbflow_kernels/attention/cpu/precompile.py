"""Compilations of a model's attention, for processes that compile ahead of its first token.

Attention takes a third of the time that an empty kernel cache costs before a model's first token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.cpu.scheduler import schedule
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cpu.compile_processes import Task
from nbflow_kernels.cpu.graph import GraphNode, missing_kernel, signature_of
from nbflow_kernels.cpu.parallel_for import capture
from nbflow_kernels.kv_cache.cpu import append_paged_kv_cache

_PAGE = 16


def attention_tasks(
    kinds: tuple[int, int], dims: tuple[int, int], has_extras: bool = False
) -> list[Task]:
    """Return the compilations that the cache lacks: attention, its schedule, the cache's rows.

    Parameters
    ----------
    kinds : tuple of int
        Cache formats of keys and values (`nbflow_kernels.kv_cache.cpu_codec.KINDS`).
    dims : tuple of int
        Head sizes of keys and values.
    has_extras : bool
        Whether the plans of the model have extras (`nbflow_kernels.attention.cpu.launch`).
    """
    tables: Any = (types.int64[::1], *4 * (types.int32[::1],), types.int64)
    attention, append = _attention(kinds, dims, has_extras), _append(kinds, dims)
    made = (
        missing_kernel(attention.kernel, signature_of(attention)),
        missing_kernel(schedule, tables, True),
        missing_kernel(append.kernel, signature_of(append)),
    )
    return [task for task in made if task is not None]


def _attention(kinds: tuple[int, int], dims: tuple[int, int], has_extras: bool) -> GraphNode:
    """Return the launch of a model's attention kernel, which is not made."""
    plan = AttentionPlan((1, 1, *dims), _PAGE, logits_soft_cap=float(has_extras))
    plan.n_shares = 1
    q, out = (np.zeros((1, 1, d), np.float32) for d in dims)
    keys, values = _caches(dims)
    with capture() as seen:
        launch.attend(plan, q, keys, values, out, None, kinds)
    (call,) = seen.calls
    return call


def _append(kinds: tuple[int, int], dims: tuple[int, int]) -> GraphNode:
    """Return the launch that appends keys and values to the cache, which is not made."""
    k, v = (np.zeros((1, 1, d), np.float32) for d in dims)
    keys, values = _caches(dims)
    token, indptr = np.zeros(1, np.int32), np.zeros(2, np.int32)
    with capture() as seen:
        append_paged_kv_cache(k, v, token, token, keys, values, token, indptr, "NHD", kinds)
    (call,) = seen.calls
    return call


def _caches(dims: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    keys, values = (np.zeros((1, _PAGE, 1, d), np.float32) for d in dims)
    return keys, values

"""Compilations of a model's attention, for processes that compile ahead of its first token.

Attention takes a third of the time that an empty kernel cache costs before a model's first token.
"""

from __future__ import annotations

import numpy as np
from numba import types

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.cpu.scheduler import schedule
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cpu.compile_processes import Task
from nbflow_kernels.cpu.graph import GraphNode, missing_kernel, signature_of
from nbflow_kernels.cpu.parallel_for import capture
from nbflow_kernels.kv_cache.cpu import append_paged_kv_cache

_PAGE = 16


def attention_tasks(
    kinds: tuple[int, int],
    dims: tuple[int, int],
    has_extras: bool = False,
    int8_scores: bool = False,
) -> list[Task]:
    """Return the compilations that the cache lacks: attention, its schedule, the cache's rows.

    Parameters
    ----------
    kinds : tuple of int
        Cache formats of keys and values (`nbflow_kernels.kv_cache.cpu_codec.KINDS`).
    dims : tuple of int
        Head sizes of keys and values.
    has_extras : bool
        Attention plans of the model have extras (`launch.has_extras`).
    int8_scores : bool
        Scores are products of int8 where the cache allows it (`launch.has_int8_scores`).
    """
    calls = [_attention(kinds, dims, has_extras, int8_scores, n) for n in (1, at.TILE_VECTORS)]
    calls.append(_append(kinds, dims))
    wanted = dict.fromkeys((call.kernel, signature_of(call)) for call in calls)
    made = (*(missing_kernel(*each) for each in wanted), schedule_task())
    return [task for task in made if task is not None]


def schedule_task() -> Task | None:
    """Return the compilation of the schedule, equal for all models; None if the cache has it."""
    return missing_kernel(schedule, 7 * (types.int64,), from_python=True)


def _attention(
    kinds: tuple[int, int],
    dims: tuple[int, int],
    has_extras: bool,
    int8_scores: bool,
    n_vectors: int,
) -> GraphNode:
    """Return the launch of a model's attention kernel, which is not made.

    `n_vectors` are query vectors of an item, many in prompts.
    """
    plan = AttentionPlan((1, 1, *dims), _PAGE, logits_soft_cap=float(has_extras))
    plan.n_shares, plan.header[at.MAX_VECTORS] = 1, n_vectors
    q, out = (np.zeros((1, 1, d), np.float32) for d in dims)
    keys, values = _caches(dims)
    with capture() as seen:
        launch.attend(plan, q, keys, values, out, None, kinds, int8_scores=int8_scores)
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

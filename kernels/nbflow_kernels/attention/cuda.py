"""Attention on CUDA devices: launchers, and the choice of the kernel.

=======================  =======================================================================
`general.cu`             every option, head size and format of the cache, in float32
`merge.cu`               sums of partial results
=======================  =======================================================================

A plan's work is divided anew for thread blocks (`device_items`), its tables are copied once for every
step (`device_plan`), and kernels read all of it through the header, as those of the CPU do.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels._dispatch import empty
from nbflow_kernels.attention import layout as at
from nbflow_kernels.attention.device_plan import device_plan
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.kvcache.cuda import format_type, strides
from nbflow_kernels.kvcache.rows import F16, F32

WARPS = 4
GENERAL_VECTORS = 16
"""Query vectors of a thread block of the general kernel."""
_GENERAL_KEYS = 32
_KEYS = "any* k, any* v, " + ", ".join(
    f"i64 {which}_{step}" for which in "kv" for step in ("page", "token", "head")
)


@functools.cache
def general_kernel(kind: int) -> cuda.Kernel:
    """Return the general kernel for a format of the cache."""
    return cuda.cpp_kernel(
        __file__, "general.cu", f"attend<{format_type(kind)}>",
        f"i64* header, any* queries, i64 q_row_bytes, i32 q_kind, {_KEYS}, f32 cap, any* out, "
        "i32 out_kind, f32*? lse, i32 most",
    )  # fmt: skip


merge_splits_kernel = cuda.cpp_kernel(
    __file__, "merge.cu", "merge_splits", "i64* header, any* out, i32 out_kind, f32*? lse"
)
merge_two_kernel = cuda.cpp_kernel(
    __file__, "merge.cu", "merge_two",
    "f32* v_a, f32* s_a, f32* v_b, f32* s_b, f32* v_out, f32* s_out, u8*? mask, i32 n_rows, i32 H, "
    "i32 D",
)  # fmt: skip
merge_many_kernel = cuda.cpp_kernel(
    __file__, "merge.cu", "merge_many",
    "f32* v, f32* s, f32* v_out, f32* s_out, i32 n_rows, i32 n_states, i32 H, i32 D",
)  # fmt: skip


def attend(
    plan: AttentionPlan,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    out: Any,
    lse: Any,
    kind: int,
    *,
    page_bytes: tuple[int, int] | None = None,
) -> None:
    """Attend with a plan, merges included; nothing is checked.

    `q` (nnz, H, D) and `out` are float32 or float16.  `page_bytes` says how far apart the pages of
    keys and of values are where the caches' strides do not.
    """
    if not plan.n_rows:
        return
    places = [strides(k_cache, plan.kv_layout), strides(v_cache, plan.kv_layout)]
    if page_bytes is not None:
        places = [(n, *p[1:]) for n, p in zip(page_bytes, places, strict=True)]
    _general(plan, q, k_cache, v_cache, places, out, lse, kind)


def latent_attention(
    plan: AttentionPlan, q: Any, ckv_cache: Any, kpe_cache: Any, out: Any, lse: Any, kind: int
) -> None:
    """Attend with one key/value head whose key is (ckv, kpe) and whose value is ckv."""
    if not plan.n_rows:
        return
    plan.header[at.LATENT] = 1
    places = [(*cache.strides[:2], 0) for cache in (ckv_cache, kpe_cache)]
    _general(plan, q, ckv_cache, kpe_cache, places, out, lse, kind)


def _general(
    plan: AttentionPlan, q: Any, k: Any, v: Any, places: Any, out: Any, lse: Any, kind: int
) -> None:
    """Launch the general kernel, and the one that adds partial results."""
    H, G, D_qk, D_vo = plan.heads
    tables = device_plan(plan, q)
    items = tables.items(GENERAL_VECTORS)
    header = tables.header(GENERAL_VECTORS)
    row = max(D_qk, D_vo) | 1
    most = min(GENERAL_VECTORS, items.most)
    while True:  # as many vectors as the device has shared memory for
        sums = D_vo * (2 if items.any_several else 1)
        shared = 4 * (most * (D_qk + sums) + _GENERAL_KEYS * row)
        if shared <= cuda.device_of(q).max_shared_bytes or most == 1:
            break
        most = -(-most // 2)
    general_kernel(kind)(
        (len(items.items), G, cuda.ceil_div(items.most, most)), 32 * WARPS,
        (
            header, q, q.strides[0], _kind_of(q), k, v, *places[0], *places[1],
            plan.logits_soft_cap, out, _kind_of(out), lse, most,
        ),
        shared,
    )  # fmt: skip
    merge_splits(plan, header, items.merges, out, lse)


def merge_splits(plan: AttentionPlan, header: Any, merges: Any, out: Any, lse: Any) -> None:
    """Add the partial results of divided tiles."""
    if len(merges):
        vectors = int(merges[:, 1].max()) * (plan.heads[0] // plan.heads[1])
        merge_splits_kernel(
            (len(merges), plan.heads[1], cuda.ceil_div(vectors, WARPS)), 32 * WARPS,
            (header, out, _kind_of(out), lse),
        )  # fmt: skip


def _kind_of(array: Any) -> int:
    return F32 if array.dtype == np.float32 else F16


def merge_state(
    v_a: Any, s_a: Any, v_b: Any, s_b: Any, v_out: Any, s_out: Any, mask: Any = None
) -> None:
    """See `nbflow_kernels.merge_state`; tokens where `mask` is False are not written."""
    T, H, D = v_a.shape
    if T * H:
        merge_two_kernel(
            cuda.ceil_div(T * H, WARPS), 32 * WARPS,
            (v_a, s_a, v_b, s_b, v_out, s_out, mask, T * H, H, D),
        )  # fmt: skip


def merge_states(v: Any, s: Any, v_out: Any, s_out: Any) -> None:
    """See `nbflow_kernels.merge_states`."""
    T, n_states, H, D = v.shape
    if T * H:
        merge_many_kernel(
            cuda.ceil_div(T * H, WARPS), 32 * WARPS, (v, s, v_out, s_out, T * H, n_states, H, D)
        )


def empty_lse(q: Any) -> Any:
    """Return an array for the LSE of query rows (nnz, H, D)."""
    return empty(q, q.shape[:2])

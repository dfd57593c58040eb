"""Attention on CUDA devices: launchers, and the choice of the kernel.

=======================  =======================================================================
`simt_fallback.cu`             every option, head size and format of the cache, in float32
`flash_mma.cu`        caches of 16 bits; with float16 queries also beside block formats
`flash_wgmma.cu`               the same for many query vectors, heads of whole 64 columns,
capability 9.0 `quantized_kv.cu`              caches in block formats; launched by `cuda_blocks`
`merge.cu`               sums of partial results that a caller has
=======================  =======================================================================

A plan's work is divided anew for thread blocks (`device_items`), its tables are copied once for
every step (`device_plan`), and kernels read all of it through the header, as those of the CPU do.
Which kernel is taken depends on sizes, types and options, never on the batch, and a row's bits do
not depend on it either.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cuda import flash_wgmma, quantized_kv
from nbflow_kernels.attention.cuda.plan import PARAMETERS, device_plan
from nbflow_kernels.attention.cuda.scheduler import FEW_VECTORS, MANY_VECTORS, Tiling, split_keys
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.variants import AttentionVariant
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.cpu_codec import BF16, F16, F32, FIRST_BLOCK_KIND
from nbflow_kernels.kv_cache.cuda import format_types, strides

WARPS = 4
GENERAL = Tiling(16)
"""Query vectors of a thread block of the general kernel."""
FEW = Tiling(FEW_VECTORS, at_most=FEW_VECTORS)
MANY = Tiling(MANY_VECTORS, more_than=FEW_VECTORS)
ALL_FEW = Tiling(FEW_VECTORS, at_most=1 << 61)
MOST_COLUMNS = 128
"""Of values; by `mma.sync`, many vectors would have more sums than registers."""
MOST_HEAD_COLUMNS, MOST_LATENT_COLUMNS = 256, 512
"""Of keys and values that the kernel for few takes, and of values that are columns of the keys."""
_GENERAL_KEYS, _KEYS, _PAD = 32, 64, 8
_STATIC_SHARED_BYTES = 2560
"""At most what a kernel on tensor cores declares itself: offsets of rows, greatest scores."""


@functools.cache
def general_kernel(kinds: tuple[int, int]) -> cuda.Kernel:
    """Return the general kernel for the formats of keys and values."""
    name = f"attend<{format_types(kinds)}>"
    return cuda.cpp_kernel(__file__, "simt_fallback.cu", name, f"{PARAMETERS}, i32 most")


@functools.cache
def tensor_core_kernel(
    kinds: tuple[int, int], D_qk: int, D_vo: int, exact: bool, many: bool, one: bool = False
) -> cuda.Kernel:
    """Return a kernel on tensor cores.

    `exact`: queries and weights keep what 16 bits lose; `one`: values are columns of the keys.
    """
    name = f"{format_types(kinds)}, {D_qk}, {D_vo}, {str(exact).lower()}"
    name = f"attend_many<{name}>" if many else f"attend_few<{name}, {str(one).lower()}>"
    return cuda.cpp_kernel(__file__, "flash_mma.cu", name, PARAMETERS)


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
    kinds: tuple[int, int],
    *,
    page_bytes: tuple[int, int] | None = None,
    tensor_cores: bool = False,
) -> None:
    """Attend with a plan, merges included; nothing is checked.

    `q` (nnz, H, D) and `out` are float32 or float16.  `page_bytes` says how far apart the pages of
    keys and of values are where the caches' strides do not; `tensor_cores`, that the general kernel
    must not take the call.
    """
    if not plan.n_query_rows:
        return
    places = _places(plan, k_cache, v_cache, page_bytes)
    arguments = (
        q, q.strides[0], _kind_of(q), k_cache, v_cache, *places[0], *places[1],
        plan.logits_soft_cap, out, _kind_of(out), lse,
    )  # fmt: skip
    if quantized_kv.takes(plan, k_cache, v_cache, places, kinds):
        quantized_kv.attend(plan, arguments, places, kinds)
        return
    # results are written 8 bytes at a time there
    aligned = cuda.address(out) % 8 == 0
    if aligned and takes_tensor_cores(plan, q, k_cache, v_cache, places, kinds):
        _on_tensor_cores(plan, arguments, kinds, _are_one(k_cache, v_cache, places, kinds))
    elif tensor_cores:
        raise UsageError(
            "use_tensor_cores=True: float32 caches, fused rotation, head sizes that are not a "
            "multiple of 16 or above 256, and unaligned arrays have no kernel on tensor cores; "
            "leave it False"
        )
    else:
        _general(plan, arguments, kinds)


def attend_variant(
    plan: AttentionPlan,
    variant: AttentionVariant,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    out: Any,
    lse: Any,
    kinds: tuple[int, int],
    *,
    page_bytes: tuple[int, int] | None = None,
) -> None:
    """Do as `attend` with a user's functions; see `cuda_variants`, which needs numba-cuda."""
    from nbflow_kernels.attention.cuda import variants

    places = _places(plan, k_cache, v_cache, page_bytes)
    variants.attend_variant(plan, variant, q, k_cache, v_cache, places, out, lse, kinds)


def _places(
    plan: AttentionPlan, k_cache: Any, v_cache: Any, page_bytes: tuple[int, int] | None
) -> list[tuple[int, int, int]]:
    """Return bytes from page to page, token to token and head to head, of keys and of values."""
    places = [strides(k_cache, plan.kv_layout), strides(v_cache, plan.kv_layout)]
    if page_bytes is not None:
        places = [(n, *p[1:]) for n, p in zip(page_bytes, places, strict=True)]
    return places


def latent_attention(
    plan: AttentionPlan, q: Any, ckv_cache: Any, kpe_cache: Any, out: Any, lse: Any, kind: int
) -> None:
    """Attend with one key/value head whose key is (ckv, kpe) and whose value is ckv."""
    if not plan.n_query_rows:
        return
    plan.header[at.LATENT] = 1
    arguments = (
        q, q.strides[0], _kind_of(q), ckv_cache, kpe_cache, *ckv_cache.strides[:2], 0,
        *kpe_cache.strides[:2], 0, plan.logits_soft_cap, out, _kind_of(out), lse,
    )  # fmt: skip
    _general(plan, arguments, (kind, kind))


def takes_tensor_cores(
    plan: AttentionPlan, q: Any, k_cache: Any, v_cache: Any, places: Any, kinds: tuple[int, int]
) -> bool:
    """Return whether the kernels on tensor cores can take a call that `cuda_blocks` does not.

    Float32 queries over bfloat16 beside a block format stay with the general kernel: what is
    decoded would be rounded to float16.
    """
    _, _, D_qk, D_vo = plan.heads
    if F32 in kinds or (max(kinds) >= FIRST_BLOCK_KIND and q.dtype == np.float32):
        return False
    one = _are_one(k_cache, v_cache, places, kinds)
    if D_qk % 16 or D_vo % 16 or split_keys(plan) % _KEYS:
        return False
    if D_vo > MOST_LATENT_COLUMNS if one else max(D_qk, D_vo) > MOST_HEAD_COLUMNS:
        return False
    if plan.table(at.ROPE) is not None:
        return False
    for kind, cache, steps in zip(kinds, (k_cache, v_cache), places, strict=True):
        together = cuda.address(cache)
        for step in steps:
            together |= step
        if kind < FIRST_BLOCK_KIND and together % 16:  # copied 16 bytes at a time
            return False
    exact = _is_exact(q, kinds)
    needs = _shared_bytes(D_qk, D_vo, exact, False, False, one)
    if D_vo <= MOST_COLUMNS:
        needs = max(needs, _shared_bytes(D_qk, D_vo, exact, True, True, one))
    return needs + _STATIC_SHARED_BYTES <= cuda.device_of(q).max_shared_bytes


def _are_one(k_cache: Any, v_cache: Any, places: Any, kinds: tuple[int, int]) -> bool:
    """Return whether values are the first columns of the keys, and floats."""
    same = places[0] == places[1] and kinds[0] == kinds[1] < FIRST_BLOCK_KIND
    return bool(same and cuda.address(k_cache) == cuda.address(v_cache))


def _is_exact(q: Any, kinds: tuple[int, int]) -> bool:
    return bool(q.dtype == np.float32 or BF16 in kinds)


def _shared_bytes(D_qk: int, D_vo: int, exact: bool, many: bool, with_far: bool, one: bool) -> int:
    """Return the dynamic shared memory of a kernel, as its source lays it out."""
    copies, chunk = 2 if exact else 1, 2 * _KEYS * (D_qk + D_vo + 2 * _PAD)
    if many:
        queries, far = 2 * copies * 16 * WARPS * (D_qk + _PAD), 4 * 32 * WARPS * D_vo // 2
        return chunk + queries + far * with_far
    if one:
        chunk = 2 * _KEYS * (D_qk + _PAD)
    queries, weights = 2 * copies * 16 * (D_qk + _PAD), 2 * copies * 16 * (_KEYS + _PAD)
    far = 4 * 32 * WARPS * D_vo // 8 if D_vo > MOST_HEAD_COLUMNS else 0
    return 2 * chunk + queries + weights + far


def _on_tensor_cores(
    plan: AttentionPlan, arguments: tuple[Any, ...], kinds: tuple[int, int], one: bool
) -> None:
    """Launch the kernels for requests with few and with many query vectors, where there are any."""
    q = arguments[0]
    _, G, D_qk, D_vo = plan.heads
    exact = _is_exact(q, kinds)
    tables = device_plan(plan, q)
    tilings = (FEW, MANY) if D_vo <= MOST_COLUMNS else (ALL_FEW,)
    if not one and flash_wgmma.takes(cuda.device_of(q), D_qk, D_vo):
        flash_wgmma.attend(plan, tables, arguments, kinds, exact)
        tilings = (FEW,)
    for tiling in tilings:
        items = tables.items(tiling)
        if not len(items.items):
            continue
        many = tiling is MANY
        header = tables.header(tiling)
        shared = _shared_bytes(D_qk, D_vo, exact, many, items.any_several, one)
        tensor_core_kernel(kinds, D_qk, D_vo, exact, many, one and not many)(
            (len(items.items), G, cuda.ceil_div(items.most, tiling.tile_vectors)), 32 * WARPS,
            (header, *arguments), shared,
        )  # fmt: skip


def _general(plan: AttentionPlan, arguments: tuple[Any, ...], kinds: tuple[int, int]) -> None:
    """Launch the general kernel, and the one that adds partial results."""
    q = arguments[0]
    _, G, D_qk, D_vo = plan.heads
    tables = device_plan(plan, q)
    items = tables.items(GENERAL)
    header = tables.header(GENERAL)
    row = max(D_qk, D_vo) | 1
    most = min(GENERAL.tile_vectors, items.most)
    while True:  # as many vectors as the device has shared memory for
        sums = D_vo * (2 if items.any_several else 1)
        shared = 4 * (most * (D_qk + sums) + _GENERAL_KEYS * row)
        if shared <= cuda.device_of(q).max_shared_bytes or most == 1:
            break
        most = -(-most // 2)
    general_kernel(kinds)(
        (len(items.items), G, cuda.ceil_div(items.most, most)), 32 * WARPS,
        (header, *arguments, most), shared,
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

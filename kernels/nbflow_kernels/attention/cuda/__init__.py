"""Attention on CUDA devices: kernel selection and launches.

==========================  ======================================================================
`flash_decode_mma.cu`       up to 16 query vectors per KV head; 16-bit caches, and block formats
                            with float16 queries
`flash_prefill_mma.cu`      more query vectors; value heads of up to 128 columns
`flash_prefill_wgmma.cu`    the same on Hopper; head sizes in multiples of 64
`quantized_kv.cu`           caches in block formats, decode and prefill (`quantized_kv.py`)
`simt_fallback.cu`          everything else, in float32; start reading here
`merge.cu`                  `merge_state` and `merge_states`
==========================  ======================================================================

`attend` selects the kernel by sizes, dtypes and options, never by the batch, so the bits of a row
do not depend on the batch.  `scheduler.py` divides a plan's work among thread blocks; `plan.py`
uploads its tables once per step.  The online softmax in plain loops is
`nbflow_kernels.attention.loops`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cuda import flash_prefill_wgmma, quantized_kv
from nbflow_kernels.attention.cuda.call_shape import CallShape
from nbflow_kernels.attention.cuda.plan import PARAMETERS, CudaPlan, device_plan
from nbflow_kernels.attention.cuda.scheduler import (
    DECODE_VECTORS,
    PREFILL_VECTORS,
    Tiling,
)
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.variants import AttentionVariant
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.cpu_codec import BF16, F16, F32, FIRST_BLOCK_KIND, FIRST_FLOAT8_KIND
from nbflow_kernels.kv_cache.cuda import format_types
from nbflow_kernels.kv_cache.page_table import strides

WARPS = 4
SIMT = Tiling(16)
"""Tiles of `simt_fallback.cu`: up to 16 query vectors per thread block."""
DECODE = Tiling(DECODE_VECTORS, at_most=DECODE_VECTORS)
PREFILL = Tiling(PREFILL_VECTORS, more_than=DECODE_VECTORS)
ALL_DECODE = Tiling(DECODE_VECTORS, at_most=1 << 61)
MAX_PREFILL_COLUMNS = 128
"""Largest value head size of `flash_prefill_mma.cu` (register limit)."""
MAX_HEAD_COLUMNS, MAX_LATENT_COLUMNS = 256, 512
"""Largest head sizes of `flash_decode_mma.cu`; the second where values are columns of the keys."""
_SIMT_KEYS, _KEYS, _PAD = 32, 64, 8
_STATIC_SHARED_BYTES = 2560
"""Upper bound of the static shared memory of the tensor-core kernels."""


@functools.cache
def simt_kernel(kinds: tuple[int, int]) -> cuda.Kernel:
    """Return the fallback kernel for the formats of keys and values."""
    name = f"attention<{format_types(kinds)}>"
    return cuda.cpp_kernel(__file__, "simt_fallback.cu", name, f"{PARAMETERS}, i32 most")


@functools.cache
def mma_kernel(
    kinds: tuple[int, int], D_qk: int, D_vo: int, exact: bool, prefill: bool, v_in_k: bool = False
) -> cuda.Kernel:
    """Return a tensor-core kernel for formats and head sizes.

    `exact`: queries and weights carry a second 16-bit number with the remainder; `v_in_k`: values
    are the first columns of the keys (latent attention).
    """
    name = f"{format_types(kinds)}, {D_qk}, {D_vo}, {str(exact).lower()}"
    name = f"flash_prefill<{name}>" if prefill else f"flash_decode<{name}, {str(v_in_k).lower()}>"
    source = "flash_prefill_mma.cu" if prefill else "flash_decode_mma.cu"
    return cuda.cpp_kernel(__file__, source, name, PARAMETERS)


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
    """Attend with a plan, split-KV merge included; arguments are not checked.

    `q` (nnz, H, D) and `out` are float32 or float16.  `page_bytes` overrides the page strides of
    keys and values; `tensor_cores` refuses the fallback kernel.
    """
    if not plan.n_query_rows:
        return
    device = cuda.device_of(q)
    kv_strides = _kv_strides(plan, k_cache, v_cache, page_bytes)
    shape = CallShape.of(plan, device, q, k_cache, v_cache, kv_strides, kinds)
    tables = device_plan(plan, device)
    arguments = (
        q, q.strides[0], F32 if shape.f32_queries else F16, k_cache, v_cache, *kv_strides[0],
        *kv_strides[1], plan.logits_soft_cap, out, _kind_of(out), lse,
    )  # fmt: skip
    family = _select(shape)
    if family == "quantized_kv":
        quantized_kv.attend(tables, shape, arguments)
    elif family == "mma" and cuda.address(out) % 8 == 0:  # they write 8 bytes at once
        _run_mma(tables, device, shape, arguments)
    elif tensor_cores:
        raise UsageError(
            "use_tensor_cores=True: no tensor-core kernel supports float32 caches, rotation in the "
            "kernel, head sizes that are not a multiple of 16 or above 256, and unaligned arrays; "
            "leave it False"
        )
    else:
        _run_simt(tables, device, plan.heads, arguments, kinds)


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
    """Attend with an `AttentionVariant`; needs numba-cuda, see `cuda/variants.py`."""
    from nbflow_kernels.attention.cuda import variants

    kv_strides = _kv_strides(plan, k_cache, v_cache, page_bytes)
    variants.attend_variant(plan, variant, q, k_cache, v_cache, kv_strides, out, lse, kinds)


def _kv_strides(
    plan: AttentionPlan, k_cache: Any, v_cache: Any, page_bytes: tuple[int, int] | None
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the page, token and head strides in bytes of keys and of values."""
    keys, values = strides(k_cache, plan.kv_layout), strides(v_cache, plan.kv_layout)
    if page_bytes is not None:
        return (page_bytes[0], *keys[1:]), (page_bytes[1], *values[1:])
    return keys, values


def latent_attention(
    plan: AttentionPlan, q: Any, ckv_cache: Any, kpe_cache: Any, out: Any, lse: Any, kind: int
) -> None:
    """Latent attention (MLA): one KV head with key (ckv, kpe) and value ckv."""
    if not plan.n_query_rows:
        return
    plan.header[at.LATENT] = 1
    arguments = (
        q, q.strides[0], _kind_of(q), ckv_cache, kpe_cache, *ckv_cache.strides[:2], 0,
        *kpe_cache.strides[:2], 0, plan.logits_soft_cap, out, _kind_of(out), lse,
    )  # fmt: skip
    device = cuda.device_of(q)
    _run_simt(device_plan(plan, device), device, plan.heads, arguments, (kind, kind))


@functools.lru_cache(4096)
def _select(shape: CallShape) -> str:
    """Return the kernels of a call."""
    if quantized_kv.supports(shape):
        return "quantized_kv"
    return "mma" if mma_supports(shape) else "simt"


def mma_supports(shape: CallShape) -> bool:
    """Return whether the mma and wgmma kernels support a call that `quantized_kv` does not.

    Float32 queries over a mix of bfloat16 and a block format use the fallback: decoding rounds to
    float16, which is exact for float8 only.
    """
    _, _, D_qk, D_vo = shape.heads
    has_blocks = any(FIRST_BLOCK_KIND <= kind < FIRST_FLOAT8_KIND for kind in shape.kinds)
    if shape.rotates or F32 in shape.kinds or (has_blocks and shape.f32_queries):
        return False
    v_in_k = _v_in_k(shape)
    if D_qk % 16 or D_vo % 16 or shape.split_keys % _KEYS:
        return False
    if D_vo > MAX_LATENT_COLUMNS if v_in_k else max(D_qk, D_vo) > MAX_HEAD_COLUMNS:
        return False
    for kind, offset, steps in zip(shape.kinds, shape.offsets, shape.kv_strides, strict=True):
        aligned = all(n % 16 == 0 for n in (offset, *steps))
        if kind < FIRST_BLOCK_KIND and not aligned:  # loads are 16 bytes wide
            return False
    exact = _is_exact(shape)
    needs = _shared_bytes(D_qk, D_vo, exact, False, False, v_in_k)
    if D_vo <= MAX_PREFILL_COLUMNS:
        needs = max(needs, _shared_bytes(D_qk, D_vo, exact, True, True, v_in_k))
    return needs + _STATIC_SHARED_BYTES <= shape.max_shared_bytes


def _v_in_k(shape: CallShape) -> bool:
    """Return whether values are the first columns of the keys, in a float format."""
    same = shape.kv_strides[0] == shape.kv_strides[1]
    return shape.one_cache and same and shape.kinds[0] == shape.kinds[1] < FIRST_BLOCK_KIND


def _is_exact(shape: CallShape) -> bool:
    return shape.f32_queries or BF16 in shape.kinds


def _shared_bytes(
    D_qk: int, D_vo: int, exact: bool, prefill: bool, multi_split: bool, v_in_k: bool
) -> int:
    """Return the dynamic shared memory of a kernel in bytes, following its source."""
    copies, chunk = 2 if exact else 1, 2 * _KEYS * (D_qk + D_vo + 2 * _PAD)
    if prefill:
        queries, earlier = 2 * copies * 16 * WARPS * (D_qk + _PAD), 4 * 32 * WARPS * D_vo // 2
        return chunk + queries + earlier * multi_split
    if v_in_k:
        chunk = 2 * _KEYS * (D_qk + _PAD)
    queries, weights = 2 * copies * 16 * (D_qk + _PAD), 2 * copies * 16 * (_KEYS + _PAD)
    earlier = 4 * 32 * WARPS * D_vo // 8 if D_vo > MAX_HEAD_COLUMNS else 0
    return 2 * chunk + queries + weights + earlier


def _run_mma(
    tables: CudaPlan, device: cuda.KernelDevice, shape: CallShape, arguments: tuple[Any, ...]
) -> None:
    """Launch the decode and the prefill kernel for the requests of each kind."""
    _, _, D_qk, D_vo = shape.heads
    tilings = (DECODE, PREFILL) if D_vo <= MAX_PREFILL_COLUMNS else (ALL_DECODE,)
    if tables.max_vectors() <= DECODE_VECTORS:
        tilings = tilings[:1]
    elif flash_prefill_wgmma.supports(device, D_qk, D_vo) and not _v_in_k(shape):
        flash_prefill_wgmma.attend(tables, device, shape, arguments, _is_exact(shape))
        tilings = (DECODE,)
    for tiling in tilings:
        items = tables.items(tiling)
        if items.n:
            kernel, grid, shared = _mma_launch(
                shape, tiling, items.n, items.most, items.any_multi_split
            )
            kernel(grid, 32 * WARPS, (tables.header(tiling), *arguments), shared)


@functools.lru_cache(4096)
def _mma_launch(
    shape: CallShape, tiling: Tiling, n_items: int, most: int, multi_split: bool
) -> tuple[cuda.Kernel, tuple[int, int, int], int]:
    """Return a tensor-core kernel, its grid and its dynamic shared memory in bytes."""
    _, G, D_qk, D_vo = shape.heads
    exact, v_in_k, prefill = _is_exact(shape), _v_in_k(shape), tiling is PREFILL
    kernel = mma_kernel(shape.kinds, D_qk, D_vo, exact, prefill, v_in_k and not prefill)
    grid = n_items, G, cuda.ceil_div(most, tiling.tile_vectors)
    shared = _shared_bytes(D_qk, D_vo, exact, prefill, multi_split, v_in_k)
    return kernel, grid, shared


def _run_simt(
    tables: CudaPlan,
    device: cuda.KernelDevice,
    heads: tuple[int, int, int, int],
    arguments: tuple[Any, ...],
    kinds: tuple[int, int],
) -> None:
    """Launch the fallback kernel."""
    _, G, D_qk, D_vo = heads
    items = tables.items(SIMT)
    if not items.n:
        return
    header = tables.header(SIMT)
    row = max(D_qk, D_vo) | 1
    most = min(SIMT.tile_vectors, items.most)
    while True:  # halve the tile until it fits into shared memory
        sums = D_vo * (2 if items.any_multi_split else 1)
        shared = 4 * (most * (D_qk + sums) + _SIMT_KEYS * row)
        if shared <= device.max_shared_bytes or most == 1:
            break
        most = -(-most // 2)
    simt_kernel(kinds)(
        (items.n, G, cuda.ceil_div(items.most, most)), 32 * WARPS,
        (header, *arguments, most), shared,
    )  # fmt: skip


def _kind_of(array: Any) -> int:
    return F32 if array.dtype.type is np.float32 else F16


def merge_state(
    v_a: Any, s_a: Any, v_b: Any, s_b: Any, v_out: Any, s_out: Any, mask: Any = None
) -> None:
    """See `nbflow_kernels.merge_state`; rows where `mask` is False are skipped."""
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

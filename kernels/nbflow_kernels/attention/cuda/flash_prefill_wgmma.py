"""Prefill attention by wgmma: supported head sizes, tiles, and the launch.

Used on devices of compute capability 9.0 where `wgmma` has the bits of `mma.sync`
(`nbflow_kernels.matmul.cuda_wgmma`), so all tensor-core kernels give a row the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.attention.cuda.call_shape import CallShape
from nbflow_kernels.attention.cuda.plan import PARAMETERS, CudaPlan
from nbflow_kernels.attention.cuda.scheduler import DECODE_VECTORS, Tiling
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.kv_cache.cuda import format_types
from nbflow_kernels.matmul import cuda_wgmma
from nbflow_kernels.matmul.cuda import wgmma_enabled

VECTORS = 64
"""Query vectors per warpgroup."""
MAX_SMEM_COLUMNS = 128
"""Largest value head size with accumulators of earlier splits in shared memory."""
_KEYS, _MAX_COLUMNS = 64, 256
_STATIC_SHARED_BYTES = 4 * 2 * _KEYS * 8 + 256
"""Row addresses of four tiles, and reduction scratch."""
_TILINGS = {n: Tiling(VECTORS * n, more_than=DECODE_VECTORS) for n in (1, 2)}
"""By warpgroups."""


@functools.cache
def kernel(
    kinds: tuple[int, int], D_qk: int, D_vo: int, exact: bool, warpgroups: int, plain: bool
) -> cuda.Kernel:
    """Return the kernel for formats and head sizes.

    `exact`: queries and weights carry a second 16-bit number with the remainder; `plain`: compiled
    without biases, caps and masks.
    """
    flags = f"{str(exact).lower()}, {warpgroups}, {str(plain).lower()}"
    name = f"flash_prefill<{format_types(kinds)}, {D_qk}, {D_vo}, {flags}>"
    return cuda.cpp_kernel(
        __file__, "flash_prefill_wgmma.cu", name, f"{PARAMETERS}, f32*? earlier", arch_specific=True
    )


def supports(device: cuda.KernelDevice, D_qk: int, D_vo: int) -> bool:
    """Return whether the kernel supports a device and head sizes."""
    whole = D_qk % 64 == D_vo % 64 == 0 and max(D_qk, D_vo) <= _MAX_COLUMNS
    return whole and wgmma_enabled(device)


def shared_bytes(D_qk: int, D_vo: int, exact: bool, warpgroups: int, multi_split: bool) -> int:
    """Return the dynamic shared memory in bytes, following the source.

    `multi_split`: some unsplit items cover more than one split.
    """
    vectors = VECTORS * warpgroups
    ring = 2 * 2 * _KEYS * (D_qk + D_vo)
    queries = 2 * (2 if exact else 1) * vectors * D_qk
    earlier = 4 * vectors * D_vo * (multi_split and D_vo <= MAX_SMEM_COLUMNS)
    return ring + queries + earlier + cuda_wgmma.ALIGNED


@functools.cache
def _max_warpgroups(max_shared_bytes: int, D_qk: int, D_vo: int, exact: bool) -> int:
    """Return the warpgroups per thread block that fit into shared memory, 2 or 1."""
    needs = shared_bytes(D_qk, D_vo, exact, 2, True) + _STATIC_SHARED_BYTES
    return 2 if needs <= max_shared_bytes else 1


def attend(
    tables: CudaPlan,
    device: cuda.KernelDevice,
    shape: CallShape,
    arguments: tuple[Any, ...],
    exact: bool,
) -> None:
    """Launch the kernel for requests with more query vectors than `flash_decode` processes."""
    _, G, D_qk, D_vo = shape.heads
    warpgroups = _max_warpgroups(shape.max_shared_bytes, D_qk, D_vo, exact)
    tiling = _TILINGS[warpgroups]
    items = tables.items(tiling)
    if not items.n:
        return
    if items.most <= VECTORS:
        warpgroups = 1
    earlier = None
    if items.any_multi_split and D_vo > MAX_SMEM_COLUMNS:
        out = arguments[-3]
        earlier = out  # has the shape, and is written last
        if out.dtype != "float32":
            earlier = workspace(device, "attention sums", out.size, "f4")
    kernel(shape.kinds, D_qk, D_vo, exact, warpgroups, shape.plain)(
        (items.n, G, cuda.ceil_div(items.most, VECTORS * warpgroups)), 128 * warpgroups,
        (tables.header(tiling), *arguments, earlier),
        shared_bytes(D_qk, D_vo, exact, warpgroups, items.any_multi_split),
    )  # fmt: skip

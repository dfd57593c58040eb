"""Attention of many query vectors by `wgmma` instructions: which heads, tiles, and the launch.

For devices of compute capability 9.0 where `wgmma` adds as `mma.sync` does
(`nbflow_kernels.matmul.cuda_wgmma`), so that a row has the bits that the other kernels on tensor
cores give it.
"""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.attention.cuda.plan import PARAMETERS, CudaPlan, is_plain
from nbflow_kernels.attention.cuda.scheduler import FEW_VECTORS, Tiling
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.kv_cache.cuda import format_types
from nbflow_kernels.matmul import cuda_wgmma
from nbflow_kernels.matmul.cuda import wgmma_enabled

VECTORS = 64
"""Of a warpgroup."""
MOST_NEAR_COLUMNS = 128
"""Of values, with sums of earlier splits in shared memory; 192 and 256 have them in memory."""
_KEYS, _MOST_COLUMNS = 64, 256
_STATIC_SHARED_BYTES = 4 * 2 * _KEYS * 8 + 256
"""Rows of four chunks, and some numbers."""


@functools.cache
def kernel(
    kinds: tuple[int, int], D_qk: int, D_vo: int, exact: bool, warpgroups: int, plain: bool
) -> cuda.Kernel:
    """Return the kernel for formats and sizes.

    `exact`: queries and weights keep what 16 bits lose; `plain`: no biases, caps and masks.
    """
    flags = f"{str(exact).lower()}, {warpgroups}, {str(plain).lower()}"
    name = f"attend_many<{format_types(kinds)}, {D_qk}, {D_vo}, {flags}>"
    return cuda.cpp_kernel(
        __file__, "flash_wgmma.cu", name, f"{PARAMETERS}, f32*? earlier", arch_specific=True
    )


def takes(device: cuda.KernelDevice, D_qk: int, D_vo: int) -> bool:
    """Return whether heads of these sizes are to be attended to here."""
    whole = D_qk % 64 == D_vo % 64 == 0 and max(D_qk, D_vo) <= _MOST_COLUMNS
    return whole and wgmma_enabled(device)


def shared_bytes(D_qk: int, D_vo: int, exact: bool, warpgroups: int, several: bool) -> int:
    """Return the dynamic shared memory, as the source lays it out.

    `several`: there are items with the keys of more than one split.
    """
    vectors = VECTORS * warpgroups
    ring = 2 * 2 * _KEYS * (D_qk + D_vo)
    queries = 2 * (2 if exact else 1) * vectors * D_qk
    earlier = 4 * vectors * D_vo * (several and D_vo <= MOST_NEAR_COLUMNS)
    return ring + queries + earlier + cuda_wgmma.ALIGNED


def most_warpgroups(device: cuda.KernelDevice, D_qk: int, D_vo: int, exact: bool) -> int:
    """Return how many warpgroups the shared memory has room for, 2 or 1."""
    needs = shared_bytes(D_qk, D_vo, exact, 2, True) + _STATIC_SHARED_BYTES
    return 2 if needs <= device.max_shared_bytes else 1


def attend(
    plan: AttentionPlan,
    tables: CudaPlan,
    arguments: tuple[Any, ...],
    kinds: tuple[int, int],
    exact: bool,
) -> None:
    """Attend for the requests that have more query vectors than `attend_few` takes."""
    q, out = arguments[0], arguments[-3]
    _, G, D_qk, D_vo = plan.heads
    warpgroups = most_warpgroups(cuda.device_of(q), D_qk, D_vo, exact)
    tiling = Tiling(VECTORS * warpgroups, more_than=FEW_VECTORS)
    items = tables.items(tiling)
    if not len(items.items):
        return
    if items.most <= VECTORS:
        warpgroups = 1
    earlier = None
    if items.any_several and D_vo > MOST_NEAR_COLUMNS:
        earlier = out  # where a thread's sums come in the end
        if out.dtype != "float32":
            earlier = workspace(cuda.device_of(q), "attention sums", out.size, "f4")
    kernel(kinds, D_qk, D_vo, exact, warpgroups, is_plain(plan))(
        (len(items.items), G, cuda.ceil_div(items.most, VECTORS * warpgroups)), 128 * warpgroups,
        (tables.header(tiling), *arguments, earlier),
        shared_bytes(D_qk, D_vo, exact, warpgroups, items.any_several),
    )  # fmt: skip

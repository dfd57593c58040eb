"""Launches of `quantized_kv.cu`: attention over caches in block formats on tensor cores.

The bytes of a cache go to shared memory as they are, in pieces as wide as their places allow; which
width it is, and how many query vectors a thread block has, changes no bit of a result.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cuda.plan import PARAMETERS, device_plan, is_plain
from nbflow_kernels.attention.cuda.scheduler import FEW_VECTORS, Tiling
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.formats.codec_spec import PAIR_RADIX
from nbflow_kernels.kv_cache.cpu_codec import (
    BLOCK,
    BLOCK_BYTES,
    F16,
    FIRST_BLOCK_KIND,
    LAYOUTS,
    RADIX,
)
from nbflow_kernels.kv_cache.cuda import format_types

WARPS, PART, STAGES = 4, 32, 2
"""Of a thread block; columns that have a scale in common; steps of a warp on their way."""
MOST_PARTS = 8
"""Of keys and of values: 256 columns."""
RUNS, RUN = 0, 16
"""Neighbouring rows of a page that are copied as one piece; see `quantized_kv_loader.cuh`."""
_WEIGHT_BYTES, _STATIC_SHARED_BYTES = 256, 5120


def takes(
    plan: AttentionPlan, k_cache: Any, v_cache: Any, places: Any, kinds: tuple[int, int]
) -> bool:
    """Return whether the kernel can take a call.

    One of the formats must be of blocks, and the other one, or float16 in whole parts of 32.
    Fused rotation, which needs numbers and not codes, and heads above 256 columns are not taken.
    """
    if max(kinds) < FIRST_BLOCK_KIND or plan.table(at.ROPE) is not None:
        return False
    for kind, D in zip(kinds, plan.heads[2:], strict=True):
        if kind < FIRST_BLOCK_KIND and (kind != F16 or D % PART):
            return False
        if _parts(kind, D) > MOST_PARTS:
            return False
        if LAYOUTS[kind, RADIX] not in (0, PAIR_RADIX):  # pairs of other formats are not split
            return False
    if not all(0 <= step < 1 << 32 for steps in places for step in steps[:2]):
        return False
    if not _copies(plan, (k_cache, v_cache), places, kinds)[1]:
        return False
    return _shared_bytes(plan, kinds, 1) <= cuda.device_of(k_cache).max_shared_bytes


@functools.cache
def kernel(kinds: tuple[int, int], parts: tuple[int, int], quads: int, copy: int) -> cuda.Kernel:
    """Return the kernel for `quads` times four query vectors.

    `parts` are the columns of keys and values in 32s; `copy` is `RUNS` or what rows are aligned to.
    """
    name = f"attend_blocks<{format_types(kinds)}, {parts[0]}, {parts[1]}, {quads}, {copy}>"
    return cuda.cpp_kernel(__file__, "quantized_kv.cu", name, PARAMETERS)


def attend(
    plan: AttentionPlan, arguments: tuple[Any, ...], places: Any, kinds: tuple[int, int]
) -> None:
    """Launch the kernel, for requests with one row and for those with more."""
    q, k_cache, v_cache = arguments[0], *arguments[3:5]
    H, G, D_qk, D_vo = plan.heads
    parts = _parts(kinds[0], D_qk), _parts(kinds[1], D_vo)
    copy = _copies(plan, (k_cache, v_cache), places, kinds)[0]
    one_row = min(4 * cuda.ceil_div(H // G, 4), FEW_VECTORS)
    tables = device_plan(plan, q)
    for tiling in (
        Tiling(FEW_VECTORS, at_most=one_row),
        Tiling(FEW_VECTORS, more_than=one_row),
    ):
        items = tables.items(tiling)
        if not len(items.items):
            continue
        quads = 1 if items.most <= 4 else 2 if items.most <= 8 or parts[1] > 4 else 4
        while _shared_bytes(plan, kinds, quads) > cuda.device_of(q).max_shared_bytes:
            quads //= 2
        kernel(kinds, parts, quads, copy)(
            (len(items.items), G, cuda.ceil_div(items.most, 4 * quads)), 32 * WARPS,
            (tables.header(tiling), *arguments), _dynamic_bytes(plan, kinds, quads),
        )  # fmt: skip


def _parts(kind: int, D: int) -> int:
    """Return the parts of 32 numbers of a row, whole blocks."""
    if kind < FIRST_BLOCK_KIND:
        return cuda.ceil_div(D, PART)
    block = int(LAYOUTS[kind, BLOCK])
    return cuda.ceil_div(D, block) * (block // PART)


def _row_bytes(kind: int, D: int) -> int:
    if kind < FIRST_BLOCK_KIND:
        return 2 * D
    return cuda.ceil_div(D, int(LAYOUTS[kind, BLOCK])) * int(LAYOUTS[kind, BLOCK_BYTES])


def _copies(
    plan: AttentionPlan, caches: tuple[Any, Any], places: Any, kinds: tuple[int, int]
) -> tuple[int, bool]:
    """Return how rows are copied, `RUNS` or their alignment up to 16, and whether they can be."""
    starts, tokens, neighbours = 0, 0, plan.page_size % RUN == 0
    for kind, cache, (page, token, head), D in zip(
        kinds, caches, places, plan.heads[2:], strict=True
    ):
        row = _row_bytes(kind, D)
        # pages of ragged keys begin at any token, and the last ones end before they are full
        whole = page == 0 or page >= plan.page_size * row
        neighbours = neighbours and whole and token == row
        starts |= cuda.address(cache) | page | head
        tokens |= token
    if neighbours and starts % 16 == 0:
        return RUNS, True
    alignment = math.gcd(starts | tokens, 16)
    return alignment, alignment > 1


def _shared_bytes(plan: AttentionPlan, kinds: tuple[int, int], quads: int) -> int:
    return _dynamic_bytes(plan, kinds, quads) + _STATIC_SHARED_BYTES


def _dynamic_bytes(plan: AttentionPlan, kinds: tuple[int, int], quads: int) -> int:
    """Return the dynamic shared memory of the kernel, as its source lays it out."""
    _, _, D_qk, D_vo = plan.heads
    k_parts, v_parts = _parts(kinds[0], D_qk), _parts(kinds[1], D_vo)
    tiles, vectors = 1 if k_parts + v_parts > MOST_PARTS else 2, 4 * quads
    rows = 16 * tiles * (_row_bytes(kinds[0], D_qk) + _row_bytes(kinds[1], D_vo))
    weights = tiles * v_parts * quads * _WEIGHT_BYTES
    sums = 4 * vectors * (2 * WARPS + 2 + 4 + 2 * (PART * v_parts + 1))
    room = 0 if is_plain(plan) else 4 * 2 * tiles * quads * 32 * WARPS
    return quads * k_parts * 512 + WARPS * (weights + STAGES * rows) + sums + room

"""Attention over quantized KV caches on tensor cores: launches of `quantized_kv.cu`.

Cache bytes are copied to shared memory undecoded, with the widest copies that their alignment
allows.  Copy width and number of query vectors per thread block do not change the bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.attention.cuda.call_shape import CallShape
from nbflow_kernels.attention.cuda.plan import PARAMETERS, CudaPlan
from nbflow_kernels.attention.cuda.scheduler import DECODE_VECTORS, Tiling
from nbflow_kernels.formats.codec_spec import PAIR_RADIX
from nbflow_kernels.kv_cache.cpu_codec import (
    BLOCK,
    BLOCK_BYTES,
    CODEBOOK,
    F16,
    FIRST_BLOCK_KIND,
    FIRST_FLOAT8_KIND,
    LAYOUTS,
    RADIX,
)
from nbflow_kernels.kv_cache.cuda import format_types

WARPS, PART, STAGES = 4, 32, 2  # warps per thread block, columns per part, steps in flight
MAX_PARTS = 8
"""Largest head size in parts: 256 columns."""
RUNS, RUN = 0, 16
"""Copy mode for blocks of 16 neighbouring rows; see `quantized_kv_loader.cuh`."""
_WEIGHT_BYTES, _STATIC_SHARED_BYTES = 256, 5120


def supports(shape: CallShape) -> bool:
    """Return whether the kernel supports a call.

    At least one of keys and values must have a block format; the other may be float16 with a head
    size in multiples of 32.  Codebooks, rotation in the kernel and heads above 256 columns are not
    supported.
    """
    kinds = shape.kinds
    if max(kinds) < FIRST_BLOCK_KIND or max(kinds) >= FIRST_FLOAT8_KIND or shape.rotates:
        return False
    for kind, D in zip(kinds, shape.heads[2:], strict=True):
        if kind < FIRST_BLOCK_KIND and (kind != F16 or D % PART):
            return False
        if LAYOUTS[kind, CODEBOOK] or _parts(kind, D) > MAX_PARTS:
            return False
        if LAYOUTS[kind, RADIX] not in (0, PAIR_RADIX):  # other radixes are not split
            return False
    if not all(0 <= step < 1 << 32 for steps in shape.kv_strides for step in steps[:2]):
        return False
    if not _copies(shape)[1]:
        return False
    return _shared_bytes(shape, 1) <= shape.max_shared_bytes


@functools.cache
def kernel(kinds: tuple[int, int], parts: tuple[int, int], quads: int, copy: int) -> cuda.Kernel:
    """Return the kernel for 4 * `quads` query vectors.

    `parts` are the head sizes of keys and values in units of 32; `copy` is `RUNS` or the alignment
    of rows in bytes.
    """
    name = f"flash_quantized_kv<{format_types(kinds)}, {parts[0]}, {parts[1]}, {quads}, {copy}>"
    return cuda.cpp_kernel(__file__, "quantized_kv.cu", name, PARAMETERS)


def attend(tables: CudaPlan, shape: CallShape, arguments: tuple[Any, ...]) -> None:
    """Launch the kernel for single-row requests and for longer ones."""
    for tiling in _tilings(shape.heads):
        items = tables.items(tiling)
        if items.n:
            launched, grid, shared = _launch(shape, items.n, items.most)
            launched(grid, 32 * WARPS, (tables.header(tiling), *arguments), shared)


@functools.cache
def _tilings(heads: tuple[int, int, int, int]) -> tuple[Tiling, Tiling]:
    """Return the tiles of single-row requests and of longer ones."""
    one_row = min(4 * cuda.ceil_div(heads[0] // heads[1], 4), DECODE_VECTORS)
    return Tiling(DECODE_VECTORS, at_most=one_row), Tiling(DECODE_VECTORS, more_than=one_row)


@functools.lru_cache(4096)
def _launch(
    shape: CallShape, n_items: int, most: int
) -> tuple[cuda.Kernel, tuple[int, int, int], int]:
    """Return the kernel, its grid and its dynamic shared memory in bytes."""
    _, G, D_qk, D_vo = shape.heads
    parts = _parts(shape.kinds[0], D_qk), _parts(shape.kinds[1], D_vo)
    quads = 1 if most <= 4 else 2 if most <= 8 or parts[1] > 4 else 4
    while _shared_bytes(shape, quads) > shape.max_shared_bytes:
        quads //= 2
    grid = n_items, G, cuda.ceil_div(most, 4 * quads)
    found = kernel(shape.kinds, parts, quads, _copies(shape)[0])
    return found, grid, _dynamic_bytes(shape, quads)


def _parts(kind: int, D: int) -> int:
    """Return the number of parts of a row in whole blocks."""
    if kind < FIRST_BLOCK_KIND:
        return cuda.ceil_div(D, PART)
    block = int(LAYOUTS[kind, BLOCK])
    return cuda.ceil_div(D, block) * (block // PART)


def _row_bytes(kind: int, D: int) -> int:
    if kind < FIRST_BLOCK_KIND:
        return 2 * D
    return cuda.ceil_div(D, int(LAYOUTS[kind, BLOCK])) * int(LAYOUTS[kind, BLOCK_BYTES])


def _copies(shape: CallShape) -> tuple[int, bool]:
    """Return the copy mode (`RUNS` or the alignment up to 16), and whether copies are possible."""
    starts, tokens, neighbours = 0, 0, shape.page_size % RUN == 0
    for kind, offset, (page, token, head), D in zip(
        shape.kinds, shape.offsets, shape.kv_strides, shape.heads[2:], strict=True
    ):
        row = _row_bytes(kind, D)
        # ragged keys: pages overlap, and the last ones are not full
        whole = page == 0 or page >= shape.page_size * row
        neighbours = neighbours and whole and token == row
        starts |= offset | page | head
        tokens |= token
    if neighbours and starts % 16 == 0:
        return RUNS, True
    alignment = math.gcd(starts | tokens, 16)
    return alignment, alignment > 1


def _shared_bytes(shape: CallShape, quads: int) -> int:
    return _dynamic_bytes(shape, quads) + _STATIC_SHARED_BYTES


def _dynamic_bytes(shape: CallShape, quads: int) -> int:
    """Return the dynamic shared memory of the kernel in bytes, following its source."""
    kinds, (_, _, D_qk, D_vo) = shape.kinds, shape.heads
    k_parts, v_parts = _parts(kinds[0], D_qk), _parts(kinds[1], D_vo)
    tiles, vectors = 1 if k_parts + v_parts > MAX_PARTS else 2, 4 * quads
    rows = 16 * tiles * (_row_bytes(kinds[0], D_qk) + _row_bytes(kinds[1], D_vo))
    weights = tiles * v_parts * quads * _WEIGHT_BYTES
    sums = 4 * vectors * (2 * WARPS + 2 + 4 + 2 * (PART * v_parts + 1))
    room = 0 if shape.plain else 4 * 2 * tiles * quads * 32 * WARPS
    return quads * k_parts * 512 + WARPS * (weights + STAGES * rows) + sums + room

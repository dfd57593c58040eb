"""Products of packed weights and several rows of float32 or bfloat16 activations.

A panel of a row group is decoded at a time and multiplied in register tiles
(`nbflow_kernels.matmul.tiles`, which states the order of additions): with float32 activations as
float32, in the order of `floats.one_row`; with bfloat16 ones rounded to bfloat16, in pairs of
columns, and one row goes the same way.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import registers, simd
from nbflow_kernels._jit import helper, njit
from nbflow_kernels.matmul import tiles
from nbflow_kernels.quants.packed import PackedForm
from nbflow_kernels.quants.unpack import codes, parameters, unit_of, weight


@functools.cache
def many_rows(form: PackedForm) -> Any:
    """Return the kernel for rows of float32 activations and row groups [start, stop)."""
    decode, block, block_bytes = _decoder(form, False), form.block, form.block_bytes
    panel = max(1, tiles.PANEL // block) * block

    @njit
    def kernel(
        x: Any, packed: Any, n_blocks: Any, bias: Any, accumulate: Any, out: Any, start: Any,
        stop: Any,
    ) -> None:  # fmt: skip
        like = np.empty(0, np.float32)
        tiles.multiply_decoded(
            decode, False, packed, simd.address(packed), n_blocks * block_bytes,
            n_blocks * block, panel, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return kernel


@functools.cache
def any_rows_bf16(form: PackedForm) -> Any:
    """Return the kernel for rows of activations rounded to bfloat16."""
    decode, block, block_bytes = _decoder(form, True), form.block, form.block_bytes
    panel = max(1, tiles.PANEL // block) * block

    @njit
    def kernel(
        x: Any, packed: Any, n_blocks: Any, bias: Any, accumulate: Any, out: Any, start: Any,
        stop: Any,
    ) -> None:  # fmt: skip
        like = np.empty(0, np.int32)
        tiles.multiply_decoded(
            decode, True, packed, simd.address(packed), n_blocks * block_bytes,
            n_blocks * block // 2, panel, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return kernel


def _decoder(form: PackedForm, pairs: bool) -> Any:
    """Return what `tiles.multiply_decoded` calls to decode whole blocks of a row group."""
    block_units = form.block // 2 if pairs else form.block
    units, vectors, per_scale = form.block // form.unit, form.unit // 4, form.sub_block // 4
    block_bytes = form.block_bytes
    piece = min(vectors, per_scale)  # vectors that have one scale
    pieces = vectors // piece
    write = _write_pairs if pairs else _write_f32
    written = 128 if pairs else 256

    @helper
    def decode(packed: Any, at: Any, k: Any, n: Any, to: Any) -> None:
        at += k // block_units * block_bytes
        for _ in range(n // block_units):
            for unit in range(units):
                for p in range(pieces):
                    s = (unit * vectors + p * piece) // per_scale
                    scale, base = parameters(form, at, s)
                    for v in range(piece):
                        u = codes(form, unit_of(form, at, unit), p * piece + v)
                        write(form, u, scale, base, to)
                        to += written
            at += block_bytes

    return decode


@helper
def _write_f32(form: Any, u: Any, scale: Any, base: Any, to: Any) -> None:
    """Write four columns of 16 rows."""
    for j in range(4):
        simd.store_f32(to + 64 * j, weight(form, u, j, scale, base))


@helper
def _write_pairs(form: Any, u: Any, scale: Any, base: Any, to: Any) -> None:
    """Write four columns of 16 rows as two pairs."""
    for j in range(2):
        even = weight(form, u, 2 * j, scale, base)
        odd = weight(form, u, 2 * j + 1, scale, base)
        simd.store_i32(to + 64 * j, registers.to_pairs(even, odd))

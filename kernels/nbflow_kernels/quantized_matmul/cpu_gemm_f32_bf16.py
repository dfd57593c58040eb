"""CPU GEMM of block formats (q4_0, q4_k, ...) with float32 or bfloat16 activations.

Weights are dequantized panel by panel and multiplied in register tiles
(`nbflow_kernels.matmul.cpu_packed_tiles`, which states the order of additions).  With float32
activations the order is that of `cpu_gemv_f32.gemv`; as plain loops,
`nbflow_kernels.matmul.loops.interleaved`.  With bfloat16 activations weights are rounded to
bfloat16, too, and multiplied in pairs of columns; one row takes the same kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import extending

from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.formats.decode_cpu import codes, parameters, weight
from nbflow_kernels.formats.layout_cpu import CpuLayout
from nbflow_kernels.matmul import cpu_packed_tiles


@functools.cache
def gemm_f32(form: CpuLayout) -> Any:
    """Return the kernel for row groups [start, stop) and rows of float32 activations."""
    block, block_bytes = form.block, form.block_bytes

    @jit.kernel
    def kernel(x, packed, n_blocks, bias, accumulate, out, start, stop):
        like = np.empty(0, np.float32)
        cpu_packed_tiles.gemm_decoded(
            decode_f32, False, form, simd.address(packed), n_blocks * block_bytes,
            n_blocks * block, block, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return kernel


@functools.cache
def gemm_bf16(form: CpuLayout) -> Any:
    """Return the kernel for row groups [start, stop) and rows of bfloat16 activations."""
    block, block_bytes = form.block, form.block_bytes

    @jit.kernel
    def kernel(x, packed, n_blocks, bias, accumulate, out, start, stop):
        like = np.empty(0, np.int32)
        cpu_packed_tiles.gemm_decoded(
            decode_pairs, True, form, simd.address(packed), n_blocks * block_bytes,
            n_blocks * block // 2, block // 2, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return kernel


def decode_f32(form: Any, at: Any, k: Any, n: Any, to: Any) -> None:
    """Dequantize columns k to k + n (whole blocks) of the row group at `at` to address `to`."""
    _decoder(form, form.block, _write_f32, 256)(form, at, k, n, to)


def decode_pairs(form: Any, at: Any, k: Any, n: Any, to: Any) -> None:
    """Dequantize as `decode_f32`, to pairs of columns rounded to bfloat16."""
    _decoder(form, form.block // 2, _write_pairs, 128)(form, at, k, n, to)


# Overloaded on the type of the form: a kernel that closes over a compiled function never hits the
# disk cache.
_OPTIONS: Any = {
    "forceinline": True,
    "error_model": "numpy",
    "fastmath": jit.FAST_MATH,
    "no_cfunc_wrapper": True,
}  # as `jit.device_function(inline="always")`


@extending.overload(decode_f32, jit_options=_OPTIONS)
def _decode_f32(form, at, k, n, to):
    return _decoder(form.form, form.form.block, _write_f32, 256)


@extending.overload(decode_pairs, jit_options=_OPTIONS)
def _decode_pairs(form, at, k, n, to):
    return _decoder(form.form, form.form.block // 2, _write_pairs, 128)


def _decoder(known: CpuLayout, block: int, write: Any, written: int) -> Callable[..., None]:
    """Return the decoder of a form; a block has `block` steps, `written` bytes each 4 columns."""
    units, vectors, per_scale = known.block // known.unit, known.unit // 4, known.sub_block // 4
    block_bytes = known.block_bytes
    piece = min(vectors, per_scale)  # vectors that have one scale
    pieces = vectors // piece

    def decode(form, at, k, n, to):
        at += k // block * block_bytes
        for _ in range(n // block):
            for unit in range(units):
                for p in range(pieces):
                    scale, base = parameters(form, at, (unit * vectors + p * piece) // per_scale)
                    for v in range(piece):
                        u = codes(form, at, unit, p * piece + v)
                        write(form, u, scale, base, to)
                        to += written
            at += block_bytes

    return decode


@jit.device_function(inline="llvm")
def _write_f32(form, u, scale, base, to):
    """Write four columns of 16 rows."""
    for j in range(4):
        simd.store_f32(to + 64 * j, weight(form, u, j, scale, base))


@jit.device_function(inline="llvm")
def _write_pairs(form, u, scale, base, to):
    """Write four columns of 16 rows as two pairs."""
    for j in range(2):
        even = weight(form, u, 2 * j, scale, base)
        odd = weight(form, u, 2 * j + 1, scale, base)
        simd.store_i32(to + 64 * j, register_tiles.to_pairs(even, odd))

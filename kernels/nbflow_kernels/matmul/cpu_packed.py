"""CPU GEMV and GEMM with float weights packed 16 rows interleaved (`formats.floats.pack`).

Weights are an array (groups, columns, 16) of float32, int16 (the bits of float16) or uint16 (the
bits of bfloat16), columns padded with zeros to a multiple of 8, rows to a multiple of 16.
The order of additions is that of `nbflow_kernels.matmul.cpu_packed_tiles`; as plain loops:
`loops.interleaved`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.matmul import cpu_packed_tiles


def matmul(
    x: NDArray[np.float32], w: NDArray[Any], bias: NDArray[np.float32], accumulate: bool,
    out: NDArray[np.float32], *, bf16: bool = False,
) -> None:  # fmt: skip
    """Write ``x @ w.T`` to `out`, plus `bias` unless that is empty, or add it to `out`.

    `bf16` rounds both operands to bfloat16.
    """
    kernel, work = _gemm, float(x.shape[0]) * w.size
    if bf16:
        kernel, work = _gemm_bf16, work / 2
    elif x.shape[0] == 1:
        kernel = _gemv
    parallel_for(kernel, w.shape[0], work, x, w, bias, accumulate, out)


@jit.kernel
def _gemv(x, w, bias, accumulate, out, start, stop):
    """Multiply row groups [start, stop) by one token, reading weights as one stream."""
    sums, n_steps = simd_memory.allocate(cpu_packed_tiles.TOKEN_BYTES), x.shape[1]
    for group in range(start, stop):
        cpu_packed_tiles.zero_sums(sums, 1)
        w_at = simd.address(w) + group * w.strides[0]
        ahead = w_at + cpu_packed_tiles.PREFETCH
        cpu_packed_tiles.add_to_tile(
            w, 1, w_at, simd.address(x), 0, n_steps, sums, ahead, 64 * w.itemsize
        )
        cpu_packed_tiles.write_outputs(sums, bias, accumulate, out, 0, 1, group)
    simd_memory.release(sums)


@jit.kernel
def _gemm(x, w, bias, accumulate, out, start, stop):
    """Multiply row groups [start, stop) by two tokens or more, without decoding."""
    n_tokens, n_steps = x.shape
    sums = simd_memory.allocate(
        cpu_packed_tiles.TOKEN_BYTES * min(n_tokens, cpu_packed_tiles.BLOCK_TOKENS)
    )
    for token in range(0, n_tokens, cpu_packed_tiles.BLOCK_TOKENS):
        tokens = min(cpu_packed_tiles.BLOCK_TOKENS, n_tokens - token)
        x_at = simd.address(x) + token * x.strides[0]
        for group in range(start, stop):
            cpu_packed_tiles.zero_sums(sums, tokens)
            w_at = simd.address(w) + group * w.strides[0]
            ahead = w_at + w.strides[0]
            cpu_packed_tiles.add_steps(
                w, w_at, x_at, x.strides[0], tokens, n_steps, sums, ahead, w.strides[0]
            )
            cpu_packed_tiles.write_outputs(sums, bias, accumulate, out, token, tokens, group)
    simd_memory.release(sums)


@jit.device_function(inline="always")
def _to_bf16_pairs(w, at, k, n, to):
    """Write pairs of columns k to k + n of the group at address `at` as bfloat16 to `to`."""
    size = 16 * w.itemsize
    at += 2 * k * size
    for i in range(n):
        even = register_tiles.load_widened(w, at + 2 * size * i)
        odd = register_tiles.load_widened(w, at + 2 * size * i + size)
        simd.store_i32(to + 64 * i, register_tiles.to_pairs(even, odd))


@jit.kernel
def _gemm_bf16(x, w, bias, accumulate, out, start, stop):
    """Multiply row groups [start, stop), activations and weights rounded to bfloat16."""
    like = np.empty(0, np.int32)
    cpu_packed_tiles.gemm_decoded(
        _to_bf16_pairs, True, w, simd.address(w), w.strides[0], w.shape[1] // 2,
        4, like, x, bias, accumulate, out, start, stop,
    )  # fmt: skip

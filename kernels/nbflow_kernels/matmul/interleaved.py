"""Matrix product with float weights that lie 16 rows side by side (`quants.floats.pack`).

Weights are an array (groups, columns, 16) of float32, int16 (the bits of float16) or uint16 (the
bits of bfloat16), columns padded with zeros to a multiple of 8, rows to a multiple of 16.
The order of additions is that of `nbflow_kernels.matmul.tiles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels import registers, simd
from nbflow_kernels._jit import inline, njit
from nbflow_kernels.matmul import tiles
from nbflow_kernels.threads import split_rows

# below, all four chains of 4 tokens fit the registers and each weight is read and widened once
MIN_BLOCK_TOKENS = 8 if registers.has_wide_registers() else 2
_NO_BIAS = np.zeros(0, np.float32)


def matmul(
    x: NDArray[np.float32],
    w: NDArray[Any],
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    activations: str,
    out: NDArray[np.float32],
) -> None:
    """Write ``x @ w.T`` to `out` (T, N); `activations` is "f32" or "bf16"."""
    bias = _NO_BIAS if bias is None else bias
    n_groups, n_tokens = w.shape[0], x.shape[0]
    blocks = -(-n_groups // tiles.GROUPS)
    work = float(n_tokens * w.size)
    if activations == "bf16":
        split_rows(_many_bf16, blocks, work / 2, x, w, bias, accumulate, out)
    elif n_tokens == 1:
        split_rows(_one, n_groups, work, x, w, bias, accumulate, out)
    elif n_tokens < MIN_BLOCK_TOKENS:
        split_rows(_few, n_groups, work, x, w, bias, accumulate, out)
    else:
        split_rows(_many, blocks, work, x, w, bias, accumulate, out)


@njit
def _one(x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any) -> None:
    """One token; groups [start, stop)."""
    total = np.empty(16, np.float32)
    at = simd.address(total)
    for group in range(start, stop):
        w_at = simd.address(w) + group * w.strides[0]
        sums = tiles.one_group(w, w_at, simd.address(x), 0, x.shape[1], 1)
        registers.store(at, sums)
        tiles.write_group(simd.load_f32(at), bias, accumulate, out, 0, group)


@njit
def _few(x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any) -> None:
    """Two tokens and more; groups [start, stop)."""
    total = np.empty(4 * 16, np.float32)
    at = simd.address(total)
    n_tokens, n_units = x.shape
    stride = x.strides[0]
    for group in range(start, stop):
        w_at = simd.address(w) + group * w.strides[0]
        t = 0
        while t < n_tokens:
            count = 4 if n_tokens - t >= 4 else min(2, n_tokens - t)
            x_at = simd.address(x) + t * stride
            if count == 4:
                registers.store(at, tiles.one_group(w, w_at, x_at, stride, n_units, 4))
            elif count == 2:
                registers.store(at, tiles.one_group(w, w_at, x_at, stride, n_units, 2))
            else:
                registers.store(at, tiles.one_group(w, w_at, x_at, stride, n_units, 1))
            for i in range(count):
                sums = simd.load_f32(at + 64 * i)
                tiles.write_group(sums, bias, accumulate, out, t + i, group)
            t += count


@inline
def _widened(w: Any, group: Any, k: Any, n: Any, to: Any) -> None:
    """Write columns k to k + n of a group as float32."""
    size = 16 * w.itemsize
    at = simd.address(w) + group * w.strides[0] + k * size
    for _ in range(n // 4):
        for chain in range(4):
            simd.store_f32(to + tiles.CHAIN_BYTES * chain, registers.load_widened(w, at))
            at += size
        to += 64


@njit
def _many(x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any) -> None:
    """Many tokens; `tiles.GROUPS` groups for each number in [start, stop)."""
    like = np.empty(0, np.float32)
    tiles.multiply_blocks(
        _widened, tiles.pack_f32, like, w, simd.address(w), w.strides[0], w.shape[1],
        x, bias, accumulate, out, start, stop,
    )  # fmt: skip


@inline
def _rounded(w: Any, group: Any, k: Any, n: Any, to: Any) -> None:
    """Write pairs of columns k to k + n of a group as bfloat16."""
    size = 16 * w.itemsize
    at = simd.address(w) + group * w.strides[0] + 2 * k * size
    for _ in range(n // 4):
        for chain in range(4):
            even = registers.load_widened(w, at)
            odd = registers.load_widened(w, at + size)
            simd.store_i32(to + tiles.CHAIN_BYTES * chain, registers.to_pairs(even, odd))
            at += 2 * size
        to += 64


@njit
def _many_bf16(x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any) -> None:
    """Activations and weights rounded to bfloat16; as `_many`."""
    like = np.empty(0, np.int32)
    tiles.multiply_blocks(
        _rounded, tiles.pack_pairs, like, w, simd.address(w), w.strides[0], w.shape[1] // 2,
        x, bias, accumulate, out, start, stop,
    )  # fmt: skip

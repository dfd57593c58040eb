"""Hadamard transforms on the CPU: passes of constant geometry, 16 sums at a time.

A pass takes neighbours (2 i, 2 i + 1) to their sum at i and their difference at n / 2 + i, so the
bits of an index rotate by one; after log2(n) passes each is at its place (Pease 1968).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.cpu.simd_shuffle import evens, odds

_LANES = 16


def hadamard_transform(x, block, out):
    """See `nbflow_kernels.hadamard_transform`."""
    hold(x, out)
    T, width = out.shape
    scale = np.float32(block**-0.5)
    parallel_for(
        _hadamard_transform, T, T * width * block.bit_length(),
        address_of(x), x.strides[0], address_of(out), out.strides[0], width, block, scale,
    )  # fmt: skip


@jit.kernel
def _hadamard_transform(x, x_bytes, out, out_bytes, width, block, scale, start, stop):
    """Compute rows [start, stop)."""
    scratch = np.empty(2 * block, np.float32)
    first, second = simd.address(scratch), simd.address(scratch) + 4 * block
    for t in range(start, stop):
        for column in range(0, width, block):
            source, target = x + t * x_bytes + 4 * column, first
            left = block
            while left > 2:
                _pass(source, target, block, np.float32(1))
                source, target = target, second if target == first else first
                left //= 2
            end = out + t * out_bytes + 4 * column
            if block == 1:
                simd_memory.write_f32(end, simd_memory.read_f32(source))
            else:  # reads scratch, or one pair before it is written
                _pass(source, end, block, scale)


@jit.device_function
def _pass(source, target, n, scale):
    """Write scaled sums and differences of the neighbours of `n` numbers."""
    half = n // 2
    if half % _LANES:
        for i in range(half):
            a = simd_memory.read_f32(source + 8 * i)
            b = simd_memory.read_f32(source + 8 * i + 4)
            simd_memory.write_f32(target + 4 * i, (a + b) * scale)
            simd_memory.write_f32(target + 4 * (half + i), (a - b) * scale)
        return
    factor = simd.splat(scale)
    for i in range(0, half, _LANES):
        low, high = simd.load_f32(source + 8 * i), simd.load_f32(source + 8 * i + 4 * _LANES)
        a, b = evens(low, high), odds(low, high)
        simd.store_f32(target + 4 * i, simd.mul(simd.add(a, b), factor))
        simd.store_f32(target + 4 * (half + i), simd.mul(simd.sub(a, b), factor))

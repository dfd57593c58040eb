"""Read and write floats in the bytes of a block, for user-defined weight formats.

    from nbflow_kernels.formats.block_bytes import get_f16, put_f16

The functions run in compiled code and in plain Python.  Addresses need no alignment; an access
outside the block raises IndexError.

>>> import numpy as np
>>> block = np.zeros(4, np.uint8)
>>> put_f16(block, 2, 1.5)
>>> float(get_f16(block, 2)), block.tolist()
(1.5, [0, 0, 0, 62])
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import read_f16, read_f32, write_f16, write_f32

__all__ = ["get_f16", "get_f32", "put_f16", "put_f32"]


@jit.device_function(inline="always")
def _check(block, at, n):
    if at < 0 or at + n > len(block):
        raise IndexError("a number lies outside the block's bytes")


@jit.kernel
def get_f16(block, at):
    """Read the float16 at byte `at` of a block as float32."""
    _check(block, at, 2)
    return read_f16(simd.address(block) + at)


@jit.kernel
def put_f16(block, at, value):
    """Write a number as float16, rounded to nearest, at byte `at` of a block."""
    _check(block, at, 2)
    write_f16(simd.address(block) + at, np.float32(value))


@jit.kernel
def get_f32(block, at):
    """Read the float32 at byte `at` of a block."""
    _check(block, at, 4)
    return read_f32(simd.address(block) + at)


@jit.kernel
def put_f32(block, at, value):
    """Write a number as float32 at byte `at` of a block."""
    _check(block, at, 4)
    write_f32(simd.address(block) + at, np.float32(value))

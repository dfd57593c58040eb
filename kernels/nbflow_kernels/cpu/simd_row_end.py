"""Loads and stores of 16 columns of a row, or of the few that the row has left."""

from __future__ import annotations

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import load_first, store_first


@jit.device_function(inline="llvm")
def load_up_to(at, n):
    """Load 16 float32, or the first `n` if `n` is below 16; the others are 0."""
    return simd.load_f32(at) if n >= 16 else load_first(at, n, 0.0)


@jit.device_function(inline="llvm")
def store_up_to(at, n, v):
    """Store 16 float32, or the first `n` if `n` is below 16."""
    if n >= 16:
        simd.store_f32(at, v)
    else:
        store_first(at, n, v)

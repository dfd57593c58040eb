"""Copies between a stored state and strips: 16 columns as float32, rows after each other."""

from __future__ import annotations

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import (
    load_first,
    load_first_bf16,
    load_first_f16,
    read_u16,
    store_f16,
    store_first,
)
from nbflow_kernels.cpu.simd_narrow import store_bf16, write_u16
from nbflow_kernels.delta_rule.state import F16, F32


@jit.device_function
def _load(at, kind, n):
    """Load the first `n` of 16 stored numbers; zeros follow."""
    if kind == F32:
        return simd.load_f32(at) if n >= 16 else load_first(at, n, 0.0)
    if n >= 16:  # masked loads of 16 bits are slow without AVX-512
        return simd.load_f16(at) if kind == F16 else simd.load_bf16(at)
    return load_first_f16(at, n) if kind == F16 else load_first_bf16(at, n)


@jit.device_function
def _store(at, kind, n, v, narrow):
    """Round and store the first `n` of 16 numbers; `narrow` are 32 bytes of scratch memory."""
    if kind == F32:
        store_first(at, n, v)
        return
    to = at if n >= 16 else narrow
    if kind == F16:
        store_f16(to, v)
    else:
        store_bf16(to, v)
    if n < 16:
        for i in range(n):
            write_u16(at + 2 * i, read_u16(narrow + 2 * i))


@jit.device_function
def copy_to_strips(stored, kind, row_bytes, n_rows, n_columns, n_strips, strips):
    """Copy columns of a state to strips; missing rows and columns are zeros."""
    padded = -(-n_rows // 16) * 16
    bytes_of_16 = 64 if kind == F32 else 32
    for i in range(padded):
        for j in range(n_strips):
            lanes = n_columns - 16 * j
            v = simd.splat(0.0)
            if i < n_rows and lanes > 0:
                v = _load(stored + i * row_bytes + j * bytes_of_16, kind, lanes)
            simd.store_f32(strips + 64 * (j * padded + i), v)


@jit.device_function
def copy_from_strips(strips, kind, row_bytes, n_rows, n_columns, stored, narrow):
    """Copy strips back to the columns of a state, rounded to its dtype."""
    padded = -(-n_rows // 16) * 16
    bytes_of_16 = 64 if kind == F32 else 32
    for i in range(n_rows):
        for j in range(-(-n_columns // 16)):
            v = simd.load_f32(strips + 64 * (j * padded + i))
            at = stored + i * row_bytes + j * bytes_of_16
            _store(at, kind, n_columns - 16 * j, v, narrow)

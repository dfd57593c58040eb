"""Copies between a stored state and strips: 16 columns as float32, rows after each other."""

from __future__ import annotations

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.state_format import F32
from nbflow_kernels.state_format.cpu import load, row_bytes, store


@jit.device_function
def copy_to_strips(stored, kind, Dk, Dv, column, n_columns, n_strips, strips, narrow):
    """Copy `n_columns` columns from `column` on to strips; missing rows and columns are zeros."""
    padded, end, size = -(-Dk // 16) * 16, column + n_columns, row_bytes(kind, Dv)
    for j in range(n_strips):
        strip, n = strips + 64 * j * padded, n_columns - 16 * j
        if kind == F32 and n >= 16:
            at = stored + 4 * (column + 16 * j)
            for i in range(Dk):
                simd.store_f32(strip + 64 * i, simd.load_f32(at + i * size))
        else:
            for i in range(Dk):
                v = simd.splat(0.0)
                if n > 0:
                    v = load(stored + i * size, kind, column + 16 * j, min(end, Dv), narrow)
                simd.store_f32(strip + 64 * i, v)
        for i in range(Dk, padded):
            simd.store_f32(strip + 64 * i, simd.splat(0.0))


@jit.device_function
def copy_from_strips(strips, kind, Dk, Dv, column, n_columns, stored, narrow):
    """Round strips to the columns of a state; `column` is a multiple of 32."""
    padded, end, size = -(-Dk // 16) * 16, column + n_columns, row_bytes(kind, Dv)
    for j in range(0, -(-n_columns // 16), 2):
        strip, n = strips + 64 * j * padded, n_columns - 16 * j
        if kind == F32 and n >= 32:
            at = stored + 4 * (column + 16 * j)
            for i in range(Dk):
                simd.store_f32(at + i * size, simd.load_f32(strip + 64 * i))
                simd.store_f32(at + i * size + 64, simd.load_f32(strip + 64 * (padded + i)))
        else:
            for i in range(Dk):
                v, w = simd.load_f32(strip + 64 * i), simd.splat(0.0)
                if n > 16:
                    w = simd.load_f32(strip + 64 * (padded + i))
                store(stored + i * size, kind, column + 16 * j, end, v, w, narrow)

"""Copies between a stored state and strips: 16 columns as float32, rows after each other."""

from __future__ import annotations

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.state_format.cpu import load, row_bytes, store


@jit.device_function
def copy_to_strips(stored, kind, Dk, Dv, column, n_columns, n_strips, strips, narrow):
    """Copy `n_columns` columns from `column` on to strips; missing rows and columns are zeros."""
    padded, end = -(-Dk // 16) * 16, column + n_columns
    for i in range(padded):
        row = stored + i * row_bytes(kind, Dv)
        for j in range(n_strips):
            v = simd.splat(0.0)
            if i < Dk and 16 * j < n_columns:
                v = load(row, kind, column + 16 * j, min(end, Dv), narrow)
            simd.store_f32(strips + 64 * (j * padded + i), v)


@jit.device_function
def copy_from_strips(strips, kind, Dk, Dv, column, n_columns, stored, narrow):
    """Round strips to the columns of a state; `column` is a multiple of 32."""
    padded, end = -(-Dk // 16) * 16, column + n_columns
    for i in range(Dk):
        row = stored + i * row_bytes(kind, Dv)
        for j in range(0, -(-n_columns // 16), 2):
            at = strips + 64 * (j * padded + i)
            w = simd.splat(0.0)
            if 16 * (j + 1) < n_columns:
                w = simd.load_f32(at + 64 * padded)
            store(row, kind, column + 16 * j, end, simd.load_f32(at), w, narrow)

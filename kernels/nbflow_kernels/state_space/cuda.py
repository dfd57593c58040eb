"""State-space layers on CUDA devices: the state in registers, token by token; see `scan.cu`."""

from __future__ import annotations

import functools
import math
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.state_format import KINDS, POINTERS

_THREADS = 128


@functools.cache
def _instance(lanes: int, values: int, per_state: bool, kind: int) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "scan.cu", f"scan<{lanes}, {values}, {str(per_state).lower()}, {kind}>",
        f"f32* x, f32* dt, f32* a, f32* b, f32* c, {POINTERS[kind]} state, i32* indptr, "
        "i32* indices, f32*? d, f32*? dt_bias, f32* out, i64 x_row, i64 dt_row, i64 b_row, "
        "i64 c_row, i64 out_row, i32 n_rows, i32 P, i32 per_group, i32 N, i32 n_blocks, "
        "i32 use_softplus, f32 low, "
        "f32 high",
    )  # fmt: skip


def mamba2_scan(
    x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, dt_softplus, dt_limits, out
):
    """See `nbflow_kernels.mamba2_scan`."""
    _, H, P = x.shape
    arrays = (x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, out)
    _launch(False, arrays, (H * P, P, H // b.shape[1], b.shape[2]), dt_softplus, dt_limits)


def mamba1_scan(x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, dt_softplus, out):
    """See `nbflow_kernels.mamba1_scan`."""
    C = x.shape[1]
    arrays = (x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, out)
    _launch(True, arrays, (C, 1, C, b.shape[1]), dt_softplus, (-math.inf, math.inf))


def _launch(
    per_state: bool, arrays: tuple[Any, ...], shape: tuple[int, ...], softplus: bool,
    limits: tuple[float, float],
) -> None:  # fmt: skip
    """Launch for all rows of all sequences; `shape` has the rows, P, heads of a group, and N."""
    x, dt, _, b, c, state, indptr, *_, out = arrays
    n_rows, N, n_sequences = shape[0], shape[3], len(indptr) - 1
    if not N or not n_sequences:
        return
    lanes = 16 if N <= 16 else 32
    values = 1 << (cuda.ceil_div(N, lanes) - 1).bit_length()  # few instances: a power of two
    n_blocks = cuda.ceil_div(n_rows, _THREADS // lanes)
    strides = (array.strides[0] // 4 for array in (x, dt, b, c, out))
    args = (*arrays, *strides, *shape, n_blocks, softplus, *limits)
    _instance(lanes, values, per_state, KINDS[state.dtype.name])(
        n_sequences * n_blocks, _THREADS, args
    )

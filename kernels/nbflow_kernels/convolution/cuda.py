"""Causal convolution on CUDA devices: a thread per channel of a sequence, see `convolution.cu`."""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.state_format import KINDS, POINTERS

_THREADS = 128


@functools.cache
def _kernel(K: int, silu: bool, kind: int) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "convolution.cu", f"causal_conv1d<{K}, {str(silu).lower()}, {kind}>",
        f"f32* x, f32* weight, f32*? bias, {POINTERS[kind]} state, i32* indptr, "
        "i32* state_indices, f32* out, i32 C, i32 N, i64 x_row, i64 out_row",
    )  # fmt: skip


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any,
    state: Any,
    indptr: Any,
    state_indices: Any,
    silu: bool,
    out: Any,
) -> None:
    """See `nbflow_kernels.causal_conv1d`."""
    T, C = x.shape
    if not T * C:
        return
    n_blocks = cuda.ceil_div(C, _THREADS)
    args = (
        x, weight, bias, state, indptr, state_indices, out, C, len(state),
        x.strides[0] // x.itemsize, out.strides[0] // out.itemsize,
    )  # fmt: skip
    _kernel(weight.shape[1], silu, KINDS[state.dtype.name])(
        (n_blocks, len(state_indices)), _THREADS, args
    )

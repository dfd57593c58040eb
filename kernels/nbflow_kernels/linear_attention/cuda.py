"""Lightning attention on CUDA devices: the state in registers, token by token."""

from __future__ import annotations

import functools

from nbflow_kernels import cuda
from nbflow_kernels.state_format import KINDS, POINTERS

_WARPS = 8


@functools.cache
def _instance(keys: int, kind: int) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "lightning.cu", f"lightning<{keys}, {kind}>",
        f"f32* q, f32* k, f32* v, f32* slopes, {POINTERS[kind]} state, i32* indptr, "
        "i32* indices, f32* out, "
        "i64 q_row, i64 k_row, i64 v_row, i64 out_row, i32 H, i32 D, i32 n_blocks, f32 scale",
    )  # fmt: skip


def lightning_attention(q, k, v, slopes, state, indptr, state_indices, scale, out):
    """See `nbflow_kernels.lightning_attention`."""
    _, H, D = q.shape
    n_sequences, n_blocks = len(indptr) - 1, cuda.ceil_div(D, 32)
    if not n_sequences:
        return
    keys = 1 << (cuda.ceil_div(D, _WARPS) - 1).bit_length()  # few instances: a power of two
    strides = (array.strides[0] // 4 for array in (q, k, v, out))
    args = (
        q, k, v, slopes, state, indptr, state_indices, out, *strides, H, D, n_blocks, scale
    )  # fmt: skip
    _instance(keys, KINDS[state.dtype.name])(n_sequences * H * n_blocks, 32 * _WARPS, args)

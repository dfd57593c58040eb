"""The end of every product whose lanes are weight rows: bias and old output."""

from __future__ import annotations

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import load_first, store_first


@jit.device_function(inline="llvm")
def epilogue(total, bias, accumulate, out, token, group):
    """Write the sums of a row group and a token, with the bias and the old output added."""
    first = 16 * group
    at = simd.address(out) + token * out.strides[0] + 4 * first
    count = out.shape[1] - first
    if count >= 16:
        if len(bias):
            total = simd.add(total, simd.load_f32(simd.address(bias) + 4 * first))
        if accumulate:
            total = simd.add(total, simd.load_f32(at))
        simd.store_f32(at, total)
    else:
        if len(bias):
            total = simd.add(total, load_first(simd.address(bias) + 4 * first, count, 0.0))
        if accumulate:
            total = simd.add(total, load_first(at, count, 0.0))
        store_first(at, count, total)

"""Hadamard transforms on CUDA devices, see `hadamard.cu`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import cuda


@functools.cache
def _kernel() -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "hadamard.cu", "hadamard_transform",
        "f32* x, f32* out, i32 width, i32 n, f32 scale, i64 x_row, i64 out_row",
    )  # fmt: skip


def hadamard_transform(x: Any, block: int, out: Any) -> None:
    """See `nbflow_kernels.hadamard_transform`."""
    T, width = out.shape
    if not T * width:
        return
    rows = [array.strides[0] // array.itemsize for array in (x, out)]
    threads = max(32, block // 2)
    _kernel()(T * (width // block), threads, (x, out, width, block, np.float32(block**-0.5), *rows))

"""RMSNorm of rows sharded over ranks on CUDA; the CPU form is `norm.cpu_tensor_parallel`."""

from __future__ import annotations

from typing import Any

from nbflow_kernels import cuda

sum_squares_kernel = cuda.cpp_kernel(
    __file__, "cuda_tensor_parallel.cu", "sum_squares",
    "f32* x, f32* out, i32 E, i64 x_row, i64 out_row, i32 counts",
)  # fmt: skip
rms_kernel = cuda.cpp_kernel(
    __file__, "cuda_tensor_parallel.cu", "rms_with_sums",
    "f32* x, f32* sums, f32* weight, f32* out, i32 E, i64 x_row, i64 sums_row, i64 out_row, "
    "f32 width, f32 eps, f32 offset",
)  # fmt: skip


def sum_squares(x: Any, counts: bool, out: Any) -> None:
    """Write each row's sum of squares (0 unless it counts) to (T,)."""
    if len(x):
        sum_squares_kernel(len(x), 256, (x, out, x.shape[1], _stride(x), _stride(out), int(counts)))


def rmsnorm_with_sums(
    x: Any, sums: Any, weight: Any, width: int, eps: float, offset: float, out: Any
) -> None:
    """Normalize shards (T, n) of rows of `width` columns, given the sums of squares (T,)."""
    if x.size:
        args = (
            x, sums, weight, out, x.shape[1], _stride(x), _stride(sums), _stride(out),
            float(width), eps, offset,
        )  # fmt: skip
        rms_kernel(len(x), 256, args)


def _stride(x: Any) -> int:
    """Return the row stride in elements."""
    return int(x.strides[0] // x.itemsize)

"""Ops on rows by their statistics on CUDA devices: a thread block per row."""

from __future__ import annotations

from typing import Any

from nbflow_kernels import cuda

_match_rms = cuda.cpp_kernel(
    __file__, "row_statistics.cu", "match_rms",
    "f32* x, f32* like, f32* out, i32 E, i64 x_row, i64 like_row, i64 out_row, f32 least",
)  # fmt: skip
_row_moments = cuda.cpp_kernel(
    __file__, "row_statistics.cu", "row_moments",
    "f32* x, f32* out, i32 n, i64 x_row, i64 out_row",
)  # fmt: skip
_gaussian_topk = cuda.cpp_kernel(
    __file__, "row_statistics.cu", "gaussian_topk",
    "f32* x, f32* moments, f32* out, i32 n, i64 x_row, i64 moments_row, i64 out_row, f32 width, "
    "f32 deviations",
)  # fmt: skip


def match_rms(x: Any, like: Any, least: float, out: Any) -> None:
    """See `nbflow_kernels.match_rms`."""
    if x.size:
        rows = _row(x), _row(like), _row(out)
        _match_rms(len(x), 256, (x, like, out, x.shape[1], *rows, least))


def row_moments(x: Any, out: Any) -> None:
    """See `nbflow_kernels.row_moments`."""
    if len(x):
        _row_moments(len(x), 256, (x, out, x.shape[1], _row(x), _row(out)))


def gaussian_topk(x: Any, moments: Any, width: int, deviations: float, out: Any) -> None:
    """Cut rows of `width` columns in all, of which `x` has some, given their sums (T, 2)."""
    if x.size:
        rows = _row(x), _row(moments), _row(out)
        arguments = x, moments, out, x.shape[1], *rows, float(width), deviations
        _gaussian_topk(len(x), 256, arguments)


def _row(x: Any) -> int:
    """Return the row stride in elements."""
    return int(x.strides[0] // x.itemsize)

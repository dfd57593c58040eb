"""Row gather from float matrices on CUDA; see `cuda_gather.cu`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import cuda

KINDS = {"float32": 0, "float16": 1, "uint16": 2}
"""NumPy type names to the element kinds of `float16.cuh`."""
POINTERS = ("f32*", "f16*", "bf16*")


@functools.cache
def _gather(kind: int, wide: bool, half: bool) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "cuda_gather.cu", f"gather<{kind}, {int(wide)}, {int(half)}>",
        f"i32*? ids, {POINTERS[kind]} table, any* out, i32 V, i32 E, f32 scale",
    )  # fmt: skip


_scale = cuda.cpp_kernel(__file__, "cuda_gather.cu", "scale_in_place", "f32* x, i64 n, f32 scale")


def gather(ids: Any, table: Any, scale: float, out: Any) -> None:
    """Gather rows `ids` (None: all) of a float matrix, times `scale`, to float32 or float16."""
    V, E = table.shape
    wide = E % 4 == 0 and cuda.address(table) % 16 == 0 and cuda.address(out) % 16 == 0
    threads = min(256, 32 * cuda.ceil_div(E, 128))
    kernel = _gather(KINDS[table.dtype.name], wide, out.dtype == np.float16)
    kernel(len(out), threads, (ids, table, out, V, E, scale))


_gather_columns = {
    item: cuda.cpp_kernel(
        __file__, "cuda_gather.cu", f"gather_columns<{word}>",
        f"{pointer}* x, i32* order, {pointer}* out, i64 x_stride, i64 out_stride, i32 T, i32 S",
    )
    for item, word, pointer in ((4, "float", "f32"), (2, "unsigned short", "f16"))
}  # fmt: skip
_gather_scaled = cuda.cpp_kernel(
    __file__, "cuda_gather.cu", "gather_scaled_columns",
    "f32* x, i32* order, f32* scales, f32* out, i64 x_stride, i64 out_stride, i32 T, i32 S",
)  # fmt: skip


def gather_columns(x: Any, order: Any, out: Any, scales: Any = None) -> None:
    """Write ``(x * scales)[:, order]`` to `out`, zeros where the order is -1.

    The arrays are float32; without `scales` they may be float16.
    """
    (T, S), item = out.shape, out.dtype.itemsize
    if not out.size:
        return
    grid, sizes = (cuda.ceil_div(S, 256), min(T, 1024)), (x.strides[0], out.strides[0])
    strides = [n_bytes // item for n_bytes in sizes]
    if scales is None:
        _gather_columns[item](grid, 256, (x, order, out, *strides, T, S))
    else:
        _gather_scaled(grid, 256, (x, order, scales, out, *strides, T, S))


def scale_in_place(x: Any, scale: float) -> None:
    """Multiply a float32 array by `scale` in place."""
    if x.size:
        _scale(min(cuda.ceil_div(x.size, 256), 65535), 256, (x, x.size, scale))


_shard_rows = cuda.cpp_kernel(
    __file__, "cuda_gather.cu", "shard_rows",
    "i32* ids, i32* rows, i32 n, i32 first, i32 n_rows, i32 other",
)  # fmt: skip
_clear_foreign_rows = cuda.cpp_kernel(
    __file__, "cuda_gather.cu", "clear_foreign_rows", "i32* rows, f32* out, i32 T, i32 E"
)


def shard_rows(ids: Any, first: int, n_rows: int, rows: Any, other: int = -1) -> None:
    """Write the rows of a shard [first, first + n_rows) that hold `ids`; `other` for the rest."""
    _shard_rows(cuda.ceil_div(len(rows), 256), 256, (ids, rows, len(rows), first, n_rows, other))


def clear_foreign_rows(rows: Any, out: Any) -> None:
    """Zero the rows of `out` (T, E) whose index in `rows` is negative."""
    T, E = out.shape
    _clear_foreign_rows((cuda.ceil_div(E, 256), min(T, 1024)), 256, (rows, out, T, E))

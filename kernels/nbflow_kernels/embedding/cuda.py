"""Embedding rows on CUDA devices: a thread block for each row, see `embedding.cu`.

An index that is not in the table gives a row of NaN: checking indices would wait for the device.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import cuda

KINDS = {"float32": 0, "float16": 1, "uint16": 2}
"""Element types of tables, by the names of their arrays', as in `float16.cuh`."""
POINTERS = ("f32*", "f16*", "bf16*")


@functools.cache
def _gather(kind: int, wide: bool, half: bool) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "embedding.cu", f"gather<{kind}, {int(wide)}, {int(half)}>",
        f"i32*? ids, {POINTERS[kind]} table, any* out, i32 V, i32 E, f32 scale",
    )  # fmt: skip


def embedding(ids: Any, table: Any, scale: float, out: Any) -> None:
    """See `nbflow_kernels.embedding`."""
    if not out.size:
        return
    if hasattr(table, "format"):
        from nbflow_kernels.formats.cuda_dequantize import decode

        decode(table, ids, scale, out)
    else:
        gather(ids, table, scale, out)


def gather(ids: Any, table: Any, scale: float, out: Any) -> None:
    """Write rows `ids` (None: all) of a matrix of floats, times `scale`, to float32 or float16."""
    V, E = table.shape
    wide = E % 4 == 0 and cuda.address(table) % 16 == 0 and cuda.address(out) % 16 == 0
    threads = min(256, 32 * cuda.ceil_div(E, 128))
    kernel = _gather(KINDS[table.dtype.name], wide, out.dtype == np.float16)
    kernel(len(out), threads, (ids, table, out, V, E, scale))

"""User formats on CUDA: their functions, compiled by Numba, which needs numba-cuda and libNVVM."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.formats.user import UserFormat


@functools.cache
def decoder(format: UserFormat, half: bool) -> cuda.Kernel:
    """Make the dequantization kernel of a user format, one block per thread.

    An index out of range gives a row of NaN; `half` is for float16 output.
    """
    from nbflow_kernels.cuda import numba_conversions as numbers
    from nbflow_kernels.cuda import numba_cuda

    nc: Any = numba_cuda.module()  # on first use: it takes half a second
    size, n_bytes = format.block_size, format.block_bytes
    decode_block = on_device(format, "dequantize_block")
    store = numbers.narrow if half else numbers.same
    declared = (
        f"u8* data, i32*? ids, {'f16' if half else 'f32'}* out, i32 n_rows, i32 T, i32 columns, "
        "i64 row_bytes, f32 factor, i32 gathers"
    )

    @cuda.numba_kernel(declared, key=user_key(format), fuse=False, name=f"decode_{format.name}")
    def decode(data, ids, out, n_rows, T, columns, row_bytes, factor, gathers):
        b = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if b * size >= columns:
            return
        block, room = nc.local.array(n_bytes, np.uint8), nc.local.array(size, np.float32)
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            row = np.int64(t)
            if gathers:
                row = np.int64(ids[t])
            known = row >= 0 and row < n_rows
            if known:
                for i in range(n_bytes):
                    block[i] = data[row * row_bytes + b * n_bytes + i]
                decode_block(block, room)
            for i in range(min(size, columns - b * size)):
                w = room[i] * factor if known else np.float32(np.nan)
                out[np.int64(t) * columns + b * size + i] = store(w)

    return decode


def user_key(format: UserFormat) -> str | None:
    """Return the disk-cache key of a user format; None disables the disk cache."""
    return f"{format.name} {format.digest}" if format.code.on_disk else None


def on_device(format: UserFormat, name: str) -> Any:
    """Compile a user's function for CUDA, with the device versions of `block_bytes`."""
    from nbflow_kernels.cuda import numba_conversions as numbers
    from nbflow_kernels.formats import block_bytes

    function: Any = format.code.functions[name]
    there = {id(getattr(block_bytes, n)): getattr(numbers, n) for n in block_bytes.__all__}
    names = {k: there.get(id(v), v) for k, v in function.__globals__.items()}
    again = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    return numbers.device(again)

"""Bit-packed masks on CUDA devices, see `masks.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import cuda

_THREADS = 128
_pack_bits = cuda.cpp_kernel(__file__, "masks.cu", "pack_bits", "u8* x, u8* y, i64 n, i32 little")
_pack_segments = cuda.cpp_kernel(
    __file__, "masks.cu", "pack_segments", "u8* x, i32* indptr, i32* starts, u8* y, i32 little"
)
_rows_of_blocks = cuda.cpp_kernel(
    __file__, "masks.cu", "rows_of_blocks", "u8* mask, i32* indptr, u8* flat, i32 R, i32 C"
)


def packbits(x: Any, bitorder: str) -> Any:
    """See `nbflow_kernels.packbits`."""
    n_bytes = cuda.ceil_div(x.size, 8)
    y = cuda.device_of(x).empty((n_bytes,), np.uint8)
    if n_bytes:
        n_blocks = cuda.ceil_div(n_bytes, _THREADS)
        _pack_bits(n_blocks, _THREADS, (x, y, x.size, bitorder == "little"))
    return y


def segment_packbits(x: Any, indptr: np.ndarray, bitorder: str) -> Any:
    """See `nbflow_kernels.segment_packbits`; `indptr` is in host memory."""
    starts = np.zeros(len(indptr), np.int32)
    np.cumsum((indptr[1:] - indptr[:-1] + 7) // 8, out=starts[1:])
    device = cuda.device_of(x)
    y, places = device.empty((int(starts[-1]),), np.uint8), device.asarray(starts)
    if y.size:
        args = (x, device.asarray(indptr), places, y, bitorder == "little")
        _pack_segments(len(indptr) - 1, _THREADS, args)
    return y, places


def convert_bsr_mask_layout(mask: Any, indptr: np.ndarray) -> Any:
    """See `nbflow_kernels.convert_bsr_mask_layout`; `indptr` is in host memory."""
    device = cuda.device_of(mask)
    flat = device.empty((mask.size,), np.bool_)
    if mask.size:
        args = (mask, device.asarray(indptr), flat, mask.shape[1], mask.shape[2])
        _rows_of_blocks(len(indptr) - 1, _THREADS, args)
    return flat

"""Bit-packed masks on the CPU."""

from __future__ import annotations

from typing import Literal, cast

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import not_capturable, parallel_for


def packbits(x: np.ndarray, bitorder: str) -> np.ndarray:
    """See `nbflow_kernels.packbits`: NumPy's loop is memory-bound."""
    not_capturable()
    return np.packbits(x, bitorder=cast(Literal["big", "little"], bitorder))


def segment_packbits(
    x: np.ndarray, indptr: np.ndarray, bitorder: str
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.segment_packbits`."""
    starts = np.zeros(len(indptr), np.int32)
    np.cumsum((indptr[1:] - indptr[:-1] + 7) // 8, out=starts[1:])
    y = np.empty(int(starts[-1]), np.uint8)
    parallel_for(
        _pack_segments, len(indptr) - 1, 4.0 * len(x), x.view(np.uint8), indptr, starts,
        bitorder == "little", y,
    )  # fmt: skip
    return y, starts


def convert_bsr_mask_layout(mask: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """See `nbflow_kernels.convert_bsr_mask_layout`."""
    flat = np.empty(mask.size, np.bool_)
    parallel_for(
        _convert, len(indptr) - 1, 1.0 * mask.size, mask.view(np.uint8), indptr,
        flat.view(np.uint8),
    )  # fmt: skip
    return flat


@jit.kernel
def _pack_segments(x, indptr, starts, little, y, start, stop):
    for b in range(start, stop):
        end = indptr[b + 1]
        for byte in range(starts[b], starts[b + 1]):
            first = indptr[b] + 8 * (byte - starts[b])
            value = 0
            for i in range(min(8, end - first)):
                if x[first + i] != 0:
                    value |= 1 << (i if little else 7 - i)
            y[byte] = value


@jit.kernel
def _convert(mask, indptr, flat, start, stop):
    R, C = mask.shape[1], mask.shape[2]
    for i in range(start, stop):
        n = indptr[i + 1] - indptr[i]
        for b in range(n):
            for r in range(R):
                to = (indptr[i] * R + r * n + b) * C
                for c in range(C):
                    flat[to + c] = mask[indptr[i] + b, r, c]

"""Quantizers of grouped integer formats: round to nearest, and a search over the range.

"reference" takes the range of a block, as GPTQ's Quantizer does: scale = (max - min) / top with
min <= 0 <= max and top = 2**bits - 1, zero = round(-min / scale); without zero points, min = -max.
The scale is rounded to storage before codes are chosen.  "search" tries smaller ranges and keeps
that of the least squared error, the whole range included, so it is never worse.

Source: Frantar et al. 2022, GPTQ (arXiv 2210.17323), quant.py of its code (Quantizer, option mse).
"""

from __future__ import annotations

import math

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.grouped import GroupFormat, Offsets
from nbflow_kernels.formats.registry import Bytes, Floats

N_RANGES = 48
"""Ranges that the search tries: 1, 0.99, ... of the block's."""
_COST = 4.0  # multiply-adds per weight and range, for the choice of thread count


def quantize_chunk(
    format: GroupFormat, x: Floats, counts: Floats, quantizer: str, importance: Floats | None
) -> Bytes:
    """Return the bytes of rows; `counts` (columns,) is 1, and 0 for padding."""
    weight = counts[None] if importance is None else importance
    size, n_blocks = format.block_size, x.shape[1] // format.block_size
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((len(x), n_blocks), np.float32)
    zeros = np.empty((len(x), n_blocks), np.uint8)
    n_ranges = N_RANGES if quantizer == "search" else 1
    has_offsets = format.has_zeros or format.has_base
    parallel_for(
        _fit, len(x), _COST * n_ranges * x.size, x, weight, size, format.n_codes - 1,
        has_offsets, format.scale_type == "f16", n_ranges, codes, scales, zeros,
    )  # fmt: skip
    offsets: Offsets = zeros.reshape(-1) if format.has_zeros else None
    if format.has_base:
        offsets = -(scales * zeros).reshape(-1)
    blocks = format.blocks(codes.reshape(-1, size), scales.reshape(-1), offsets)
    return blocks.reshape(len(x), -1)


@jit.device_function(inline="always")
def _half(x):
    """Round a number >= 0 to float16, at most the largest."""
    _, exponent = math.frexp(x)
    step = math.ldexp(1.0, max(exponent - 11, -24))  # subnormal below 2**-14
    return np.float32(min(np.rint(x / step) * step, 65504.0))


@jit.kernel(strict=True)
def _fit(x, weight, size, top, has_zeros, halves, n_ranges, codes, scales, zeros, start, stop):
    """Quantize rows [start, stop); `halves` rounds scales to float16."""
    middle = (top + 1) // 2
    for row in range(start, stop):
        w = weight[row] if len(weight) > 1 else weight[0]
        for block in range(scales.shape[1]):
            first = block * size
            low, high = np.float32(0), np.float32(0)
            for i in range(first, first + size):
                low, high = min(low, x[row, i]), max(high, x[row, i])
            if not has_zeros:
                high = max(high, -low)
                low = -high
            least, scales[row, block], zeros[row, block] = np.inf, 0, middle
            for attempt in range(n_ranges):
                part = np.float32(1.0 - 0.01 * attempt)
                scale = part * (high - low) / np.float32(top)
                if halves:
                    scale = _half(scale)
                inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
                zero = middle
                if has_zeros:
                    zero = int(min(max(np.rint(-low * part * inverse), 0), top))
                error = 0.0
                for i in range(first, first + size):
                    code = min(max(np.rint(x[row, i] * inverse) + zero, 0), top)
                    off = x[row, i] - scale * np.float32(code - zero)
                    error += w[i] * off * off
                if error < least:
                    least, scales[row, block], zeros[row, block] = error, scale, zero
            scale, zero = scales[row, block], np.int64(zeros[row, block])
            inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
            for i in range(first, first + size):
                codes[row, i] = min(max(np.rint(x[row, i] * inverse) + zero, 0), top)

"""Quantizers of NF4 and FP4: the largest magnitude as scale, and a search over smaller scales.

"reference" is bitsandbytes's: scale = max|x|, and the code whose value is nearest to x / scale.
"search" tries smaller scales and keeps that of the least squared error, max|x| included, so it is
never worse.

Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), section 3; bitsandbytes 0.50, functional.py
(quantize_4bit).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.nf4_fp4 import FloatCodebookFormat
from nbflow_kernels.formats.registry import Bytes, Floats

N_SCALES = 32
"""Scales that the search tries: 1, 0.985, ... of the largest magnitude."""
_STEP = np.float32(0.015)
_COST = 16.0  # operations per weight and scale, for the choice of thread count


def quantize_chunk(
    format: FloatCodebookFormat,
    x: Floats,
    counts: Floats,
    quantizer: str,
    importance: Floats | None,
) -> Bytes:
    """Return the bytes of rows; `counts` (columns,) is 1, and 0 for padding."""
    weight = counts[None] if importance is None else importance
    size, n_blocks = format.block_size, x.shape[1] // format.block_size
    levels, code_of = np.unique(np.array(format.form.values, np.float32), return_index=True)
    middles = (levels[1:] + levels[:-1]) / np.float32(2)
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((len(x), n_blocks), np.float32)
    n_scales = N_SCALES if quantizer == "search" else 1
    parallel_for(
        _fit, len(x), _COST * n_scales * x.size, x, weight, size, levels, middles, n_scales, codes,
        scales,
    )  # fmt: skip
    stored = code_of.astype(np.uint8)[codes]
    return format.blocks(stored.reshape(-1, size), scales.reshape(-1)).reshape(len(x), -1)


@jit.device_function(inline="always")
def _nearest(value, middles):
    """Return the index of the level nearest to a number, the lower one of two."""
    found = 0
    for i in range(len(middles)):
        found += value > middles[i]
    return found


@jit.kernel(strict=True)
def _fit(x, weight, size, levels, middles, n_scales, codes, scales, start, stop):
    """Quantize rows [start, stop) to indices of ascending levels."""
    for row in range(start, stop):
        w = weight[row] if len(weight) > 1 else weight[0]
        for block in range(scales.shape[1]):
            first = block * size
            largest = np.float32(0)
            for i in range(first, first + size):
                largest = max(largest, abs(x[row, i]))
            least, scales[row, block] = np.inf, largest
            for attempt in range(n_scales if n_scales > 1 else 0):
                scale = largest * (np.float32(1) - _STEP * np.float32(attempt))
                divisor = scale if scale > 0 else np.float32(1)
                error = 0.0
                for i in range(first, first + size):
                    off = x[row, i] - scale * levels[_nearest(x[row, i] / divisor, middles)]
                    error += w[i] * off * off
                if error < least:
                    least, scales[row, block] = error, scale
            divisor = scales[row, block] if scales[row, block] > 0 else np.float32(1)
            for i in range(first, first + size):
                codes[row, i] = _nearest(x[row, i] / divisor, middles)

"""The published encoder of Inferflow's formats, a kernel over rows.

All arithmetic is float32 with a rounding after every operation, in the order of the published
code: bytes are compared with its output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import inline, strict_njit
from nbflow_kernels.quants.parameters import F16_SCALE, U8_PAIR

CUTOFF = np.float32(1e-5)  # a smaller scale counts as zero
COST = 10.0  # operations a weight costs, for the choice of thread count


@inline
def _floored(step: Any, n_codes: Any) -> Any:
    """Return the code of a step: 0 for NaN, else its floor within the codes."""
    if not step >= np.float32(0):
        return 0
    if step >= np.float32(n_codes):
        return n_codes - 1
    return int(np.floor(step))


@strict_njit
def plain(
    x: Any, block: Any, n_codes: Any, divisor: Any, kind: Any, midrise: Any, zero: Any, codes: Any,
    parameters: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Write codes and stored base and scale of rows [start, stop); `kind` as in `parameters`."""
    one, two = np.float32(1), np.float32(2)
    offset = np.float32(1e-4) if midrise else np.float32(0.5)
    for row in range(start, stop):
        for b in range(x.shape[1] // block):
            first = b * block
            low = high = x[row, first]
            for i in range(first + 1, first + block):
                low, high = min(low, x[row, i]), max(high, x[row, i])
            if kind == F16_SCALE:
                scale = max(abs(low), abs(high)) / divisor
                inverse = np.float32(0) if scale < CUTOFF else one / scale
                for i in range(first, first + block):
                    step = x[row, i] * inverse
                    size = int(np.floor(abs(step) + np.float32(0.5)))
                    code = (size if step >= 0 else -size) + zero
                    codes[row, i] = min(max(code, 0), n_codes - 1)
                base = np.float32(0)
            else:
                if kind == U8_PAIR:  # the base is snapped down to its grid first
                    low = np.trunc(np.float32(100) * low + np.float32(100.01))
                    low = low / np.float32(100) - one
                scale = (high - low) / divisor
                inverse = np.float32(0) if scale < CUTOFF else one / scale
                for i in range(first, first + block):
                    step = (x[row, i] - low) * inverse + offset
                    codes[row, i] = _floored(step, n_codes)
                base = low + scale / two if midrise else low
            if kind == U8_PAIR:
                u = np.trunc(np.float32(100) * base + np.float32(100.5))
                v = np.trunc(np.float32(1000) * scale + np.float32(0.5))
                parameters[row, b, 0] = int(min(max(u, np.float32(0)), np.float32(255)))
                parameters[row, b, 1] = int(min(max(v, np.float32(0)), np.float32(255)))
            else:
                parameters[row, b, 0] = simd.float_to_half(base)
                parameters[row, b, 1] = simd.float_to_half(scale)

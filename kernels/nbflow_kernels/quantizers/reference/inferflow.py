"""Inferflow's quantizer, bit for bit; CUDA kernels share the scalar functions.

Arithmetic is float32, rounded after each operation, in the order of the published code.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.formats.affine_format import F16_SCALE, U8_PAIR
from nbflow_kernels.quantizers.block_range import smallest_and_largest

CUTOFF = np.float32(1e-5)  # smaller scales count as zero
COST = 10.0  # operations per weight, for the choice of thread count


@jit.device_function(inline="always")
def _floored(step, n_codes):
    """Return the code of a step: 0 for NaN, else its floor within the codes."""
    if not step >= np.float32(0):
        return 0
    if step >= np.float32(n_codes):
        return n_codes - 1
    return np.int32(step)


@jit.device_function(inline="always")
def extent(x, at, block):
    """Return minimum and maximum of the `block` weights from index `at` on."""
    low = high = x[at]
    for i in range(1, block):
        low, high = min(low, x[at + i]), max(high, x[at + i])
    return low, high


@jit.device_function(inline="always")
def inverse_of(scale):
    """Return 1 / scale, 0 for a scale that counts as zero."""
    return np.float32(0) if scale < CUTOFF else np.float32(1) / scale


@jit.device_function(inline="always")
def on_grid(low):
    """Return a base snapped down to the grid a byte can hold."""
    steps = np.float32(100) * low + np.float32(100.01)
    if abs(steps) < np.float32(2**24):  # else it is whole
        steps = np.float32(int(steps))
    return steps / np.float32(100) - np.float32(1)


@jit.device_function(inline="always")
def base_byte(base):
    """Return the byte of a base."""
    u = np.float32(100) * base + np.float32(100.5)
    return int(min(max(u, np.float32(0)), np.float32(255)))


@jit.device_function(inline="always")
def scale_byte(scale):
    """Return the byte of a scale."""
    v = np.float32(1000) * scale + np.float32(0.5)
    return int(min(max(v, np.float32(0)), np.float32(255)))


@jit.device_function(inline="always")
def signed_code(x, inverse, n_codes, zero):
    """Return the code of a weight, halves rounded away from zero."""
    step = x * inverse
    size = np.int32(abs(step) + np.float32(0.5))
    code = (size if step >= 0 else -size) + zero
    return min(max(code, 0), n_codes - 1)


@jit.device_function(inline="always")
def range_code(x, low, inverse, offset, n_codes):
    """Return the code of a weight in a range that begins at `low`."""
    return _floored((x - low) * inverse + offset, n_codes)


@jit.device_function(inline="always")
def quantize_block(x, block, low, high, n_codes, divisor, kind, midrise, zero, codes):
    """Write the codes of a block from `low` to `high`; return its float32 base and scale.

    `kind` is how parameters are stored, as in `nbflow_kernels.formats.affine_format`.
    """
    offset = np.float32(1e-4) if midrise else np.float32(0.5)
    if kind == F16_SCALE:
        scale = max(abs(low), abs(high)) / divisor
        inverse = inverse_of(scale)
        for i in range(block):
            codes[i] = signed_code(x[i], inverse, n_codes, zero)
        base = np.float32(0)
    else:
        if kind == U8_PAIR:  # the base is snapped down to its grid first
            low = on_grid(low)
        scale = (high - low) / divisor
        inverse = inverse_of(scale)
        for i in range(block):
            codes[i] = range_code(x[i], low, inverse, offset, n_codes)
        base = low + scale / np.float32(2) if midrise else low
    return base, scale


@jit.kernel(strict=True)
def quantize(x, block, n_codes, divisor, kind, midrise, zero, codes, parameters, start, stop):
    """Write codes and stored base and scale of rows [start, stop)."""
    for row in range(start, stop):
        for b in range(x.shape[1] // block):
            weights = x[row, b * block : (b + 1) * block]
            low, high = smallest_and_largest(weights)
            base, scale = quantize_block(
                weights, block, low, high, n_codes, divisor, kind, midrise, zero,
                codes[row, b * block : (b + 1) * block],
            )  # fmt: skip
            if kind == U8_PAIR:
                parameters[row, b, 0] = base_byte(base)
                parameters[row, b, 1] = scale_byte(scale)
            else:
                parameters[row, b, 0] = simd.float_to_half(base)
                parameters[row, b, 1] = simd.float_to_half(scale)

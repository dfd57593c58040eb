"""Published quantizers of formats with a codebook, bit for bit.

``iq4_nl``, ``iq4_xs``: for each 32 weights, 16 scales are tried that put the weight of largest
magnitude near the lowest level.  Each scale gives codes, and these the least squares scale; the
error weight of x is x**2, or with importance q: q * sqrt(x**2 + 2 * mean of x**2 over the block).
The scale with the largest gain wins; iq4_xs divides the 8 scales of a block by 1/32 of the largest
one and rounds.  Then codes are chosen again, in iq4_nl for the scale before rounding to float16.

``mxfp4``, ``nvfp4``: the scale is 2**(exponent of the largest magnitude - 2), or the largest
magnitude / 6 rounded to E4M3 (halves up, subnormals not above the largest one, 248 and more to
448); the codes are the nearest ones.

``tq1_0``, ``tq2_0``, ``q2_0``: the scale is the largest magnitude, codes are rounded, halves away
from zero.  ``q1_0``: the scale is the mean magnitude, a weight of -0 or more has code 1.

Where GGML's result depends on the processor, it is defined here: quotients that overflow are
clamped to the range of codes, and the E8M0 exponent to 0.

Source: GGML, ggml-quants.c (quantize_row_iq4_nl_impl, quantize_row_mxfp4_ref,
quantize_row_nvfp4_ref, quantize_row_tq1_0_ref, quantize_row_tq2_0_ref, quantize_row_q2_0_ref,
quantize_row_q1_0_ref).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_compare import absolute, bits_of, choose, less
from nbflow_kernels.formats.block_format import E4M3
from nbflow_kernels.formats.registry import Bytes, Floats, Halves

TRIES = 7  # iq4: scales tried on either side
NOTHING = np.float32(1e-15)  # iq4: a smaller largest magnitude counts as zero
_LARGEST = np.float32(np.finfo(np.float32).max).view(np.int32)
IQ4_COST, FP4_COST, ROUND_COST = 600.0, 12.0, 8.0  # operations per weight


def no_importance() -> Floats:
    """Return the empty array that stands for no importance weights in kernels."""
    return np.empty((0, 0), np.float32)


# ---- iq4 ----------------------------------------------------------------------------------------


def iq4(
    x: Floats, importance: Floats | None, values: Floats, block: int
) -> tuple[Bytes, NDArray[np.int16], Halves]:
    """Return codes (rows, K), scales (rows, K / 32) and d (rows, K / block) of rows of weights.

    `scales` has no meaning for a block of 32, which stores none.
    """
    n_rows, width = x.shape
    codes = np.empty(x.shape, np.uint8)
    scales = np.zeros((n_rows, width // 32), np.int16)
    d = np.empty((n_rows, width // block), np.uint16)
    weight = no_importance() if importance is None else importance
    parallel_for(_iq4, n_rows, IQ4_COST * x.size, x, weight, values, block, codes, scales, d)
    return codes, scales, d


@jit.device_function(strict=True)
def _nearest_levels(values, x, inverse, codes):
    """Choose the codes of weights divided by a scale, of ascending levels; halves go up."""
    for j in range(len(codes)):
        codes[j] = 0
    for level in range(len(values) - 1):  # counts the levels passed: vectorized this way round
        low, high = values[level], values[level + 1]
        for j in range(len(codes)):
            v = x[j] * inverse
            codes[j] += np.int32(v - low >= high - v)


@jit.device_function(strict=True)
def iq4_scale(x, weight, values, codes):
    """Return the scale of a sub-block."""
    extreme = np.float32(0)
    for j in range(len(x)):
        if abs(x[j]) > abs(extreme):
            extreme = x[j]
    if abs(extreme) < NOTHING:
        return np.float32(0)
    scale, best = np.float32(0), np.float32(0)
    for i in range(-TRIES - 1, TRIES + 1):
        first = i < -TRIES
        inverse = (np.float32(i) + values[0]) / extreme
        if first:
            inverse = np.float32(1) / (-extreme / values[0])
        _nearest_levels(values, x, inverse, codes)
        qx, qq = np.float32(0), np.float32(0)
        for j in range(len(x)):
            q, w = values[codes[j]], weight[j]
            qx += w * q * x[j]
            qq += w * q * q
        if qq > 0 and (first or qx * qx > best * qq):
            scale = qx / qq
            best = scale * qx
    return scale


@jit.kernel(strict=True)
def _iq4(x, importance, values, block, codes, scales, d, start, stop):
    """Quantize rows [start, stop)."""
    weight = np.empty(32, np.float32)
    found = np.empty(block // 32, np.float32)
    chosen = np.empty(32, np.int32)
    for row in range(start, stop):
        for b in range(d.shape[1]):
            first = b * block
            mean = np.float32(0)
            for i in range(first, first + block):
                mean += x[row, i] * x[row, i]
            mean *= np.float32(2) / np.float32(block)
            for s in range(block // 32):
                for j in range(32):
                    i = first + 32 * s + j
                    square = x[row, i] * x[row, i]
                    weight[j] = square
                    if len(importance):
                        q = importance[min(row, len(importance) - 1), i]
                        weight[j] = q * np.sqrt(mean + square)
                at = first + 32 * s
                found[s] = iq4_scale(x[row, at : at + 32], weight, values, chosen)
            d[row, b] = iq4_codes(x[row], first, values, found, codes[row], scales[row], chosen)


@jit.device_function(strict=True)
def iq4_codes(x, first, values, found, codes, scales, chosen):
    """Write codes and integer scales of a block; return its stored d."""
    largest = np.float32(0)
    for s in range(len(found)):
        if abs(found[s]) > abs(largest):
            largest = found[s]
    d = -largest / np.float32(32) if len(found) > 1 else found[0]
    inverse = np.float32(1) / d if d != 0 else np.float32(0)
    for s in range(len(found)):
        step_inverse = inverse
        if len(found) > 1:
            scale = min(max(np.rint(inverse * found[s]), np.float32(-32)), np.float32(31))
            step = d * scale
            step_inverse = np.float32(1) / step if step != 0 else np.float32(0)
            scales[first // 32 + s] = np.int16(scale)
        at = first + 32 * s
        _nearest_levels(values, x[at : at + 32], step_inverse, chosen)
        for j in range(32):
            codes[at + j] = chosen[j]
    return simd.float_to_half(d)


# ---- fp4 ----------------------------------------------------------------------------------------


def e8m0(x: Floats) -> Bytes:
    """Return the published E8M0 scale of blocks (n, size) as bytes (n,)."""
    largest = np.abs(x).max(axis=1)
    with np.errstate(divide="ignore"):
        # published as log2 of float32: correctly rounded, just below a power of two it is whole
        exponent = np.floor(np.log2(largest.astype(np.float64)).astype(np.float32))
    return np.where(largest > 0, np.clip(exponent + 125, 0, 255), 0).astype(np.uint8)


def e4m3(x: Floats) -> Bytes:
    """Return the published E4M3 scale of blocks (n, size) as bytes (n,)."""
    numbers = 2 * E4M3
    scale = np.abs(x).max(axis=1) / np.float32(6)
    normal = numbers[8:121]  # 2**-6 .. 256
    code = 8 + np.searchsorted((normal[:-1] + normal[1:]) / 2, scale, side="right")
    with np.errstate(over="ignore"):
        subnormal = np.minimum(np.floor(scale * np.float32(512) + np.float32(0.5)), 7)
    code = np.where(code >= 120, 126, code)
    return np.where(scale < numbers[8], subnormal, code).astype(np.uint8)


@functools.cache
def thresholds(scale_bytes: Callable[[Floats], Bytes]) -> NDArray[np.int32]:
    """Return, for each byte, the bits of the least float32 magnitude whose scale byte reaches it.

    `scale_bytes` gives the bytes of blocks (n, 1) and must not decrease with the magnitude.  The
    threshold of a byte that no magnitude reaches lies above all numbers.
    """
    low, high = np.zeros(256, np.int64), np.full(256, np.int64(_LARGEST) + 1)
    wanted = np.arange(256)
    while (low < high).any():  # the first number whose byte is not below the wanted one
        middle = np.minimum((low + high) // 2, _LARGEST)
        found = scale_bytes(middle.astype(np.int32).view(np.float32)[:, None])
        reached = (found >= wanted) & (low < high)
        high = np.where(reached, middle, high)
        low = np.where(~reached & (low < high), middle + 1, low)
    return high.astype(np.int32)


def fp4(
    x: Floats, values: Floats, stored: Floats, scale_bytes: Callable[[Floats], Bytes], size: int
) -> tuple[Bytes, Bytes]:
    """Return codes (rows, K), the nearest, and scale bytes (rows, K / size) of rows of weights.

    `values` are those of the codes, `stored` those of the bytes; `scale_bytes` is as in
    `thresholds`.
    """
    codes, scales = np.empty(x.shape, np.uint8), np.empty((len(x), x.shape[1] // size), np.uint8)
    parallel_for(
        _fp4, len(x), FP4_COST * x.size, x, values, stored, thresholds(scale_bytes), codes, scales
    )
    return codes, scales


@jit.kernel(strict=True)
def _fp4(x, values, stored, bits_of_bytes, codes, scales, start, stop):
    """Choose the scales and the nearest codes of rows [start, stop); see `fp4_code`."""
    size = x.shape[1] // scales.shape[1]
    chosen = np.empty(16, np.int32)
    for row in range(start, stop):
        for b in range(scales.shape[1]):
            at = simd.address(x) + 4 * (row * x.shape[1] + b * size)
            largest = simd.splat(0.0)
            for i in range(0, 4 * size, 64):
                v = absolute(simd.load_f32(at + i))
                largest = choose(less(largest, v), v, largest)
            scales[row, b] = _byte_of(bits_of(simd.max(largest)), bits_of_bytes)
            step = stored[scales[row, b]]
            for i in range(0, size, 16):
                v = simd.load_f32(at + 4 * i)
                simd.store_i32(simd.address(chosen), _fp4_codes(v, values, step))
                out = codes[row, b * size + i : b * size + i + 16]
                for j in range(16):
                    out[j] = np.uint8(chosen[j])


@jit.device_function(strict=True)
def _byte_of(bits, bits_of_bytes):
    """Return the largest byte that a magnitude with these bits reaches."""
    byte = 0
    for k in range(7, -1, -1):
        byte += (bits_of_bytes[byte + (1 << k)] <= bits) << k
    return byte


@jit.device_function(strict=True)
def _fp4_codes(x, values, step):
    """Return `fp4_code` of 16 weights: of the values of their sign, as codes 8 .. 15 are -0 .. 7.

    With a scale >= 0 no value of the other sign is nearer than 0.
    """
    zero, magnitude = simd.splat(0.0), absolute(x)
    best, error = simd.splat_i32(0), magnitude
    for code in range(1, 8):
        this = absolute(simd.sub(simd.splat(values[code] * step), magnitude))
        more = less(this, error)
        best, error = choose(more, simd.splat_i32(code), best), choose(more, this, error)
    some = simd.and_(less(x, zero), less(zero, simd.to_f32(best)))
    return choose(some, simd.add(best, simd.splat_i32(8)), best)


@jit.device_function(strict=True)
def fp4_code(x, values, step):
    """Return the nearest code of a weight, the lowest of equals."""
    best, error = 0, abs(x)
    for code in range(1, 16):
        this = abs(values[code] * step - x)
        if this < error:
            best, error = code, this
    return best


# ---- a few levels -------------------------------------------------------------------------------


def few_levels(x: Floats, block: int, binary: bool) -> tuple[Bytes, Halves]:
    """Return codes (rows, K) and scales (rows, K / block): signs if `binary`, else -1, 0 and 1."""
    codes = np.empty(x.shape, np.uint8)
    d = np.empty((len(x), x.shape[1] // block), np.uint16)
    parallel_for(_few_levels, len(x), ROUND_COST * x.size, x, binary, codes, d)
    return codes, d


@jit.kernel(strict=True)
def _few_levels(x, binary, codes, d, start, stop):
    """Quantize rows [start, stop)."""
    block = x.shape[1] // d.shape[1]
    for row in range(start, stop):
        for b in range(d.shape[1]):
            first, last = b * block, (b + 1) * block
            if binary:
                d[row, b] = binary_block(x[row, first:last], codes[row, first:last])
            else:
                d[row, b] = ternary_block(x[row, first:last], codes[row, first:last])


@jit.device_function(strict=True)
def ternary_block(x, codes):
    """Write codes 0..2 for -1..1 of a block; return the float16 bits of its largest magnitude."""
    largest = np.float32(0)
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
    inverse = np.float32(1) / largest if largest > 0 else np.float32(0)
    for i in range(len(x)):
        t = x[i] * inverse  # at most 1 + 2**-23
        codes[i] = 1 + (t >= np.float32(0.5)) - (t <= np.float32(-0.5))
    return simd.float_to_half(largest)


@jit.device_function(strict=True)
def binary_block(x, codes):
    """Write code 1 for x >= 0, else 0; return the float16 bits of the mean magnitude."""
    total = np.float32(0)
    for i in range(len(x)):
        total += abs(x[i])
        codes[i] = x[i] >= 0
    return simd.float_to_half(total / np.float32(len(x)))

"""GGML's quantizers of its legacy formats, bit for bit, with and without importance.

Without, only a scale of exactly 0 gives codes 0.  Where the float32 quotient of 1 and the scale
overflows (scale below 3e-39) GGML's codes depend on the processor; here they are cut off at the
smallest and largest code, and 0 / 0 gives code 0.

The importance of a weight is multiplied by sqrt(mean square of the row + weight * weight).  The
published quantizer of Q8_0 with importance is the one without.

Source: GGML, ggml-quants.c (quantize_row_*_ref, quantize_row_q4_0_impl, _q4_1_, _q5_0_, _q5_1_).
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.llvm import LANES
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import read_i64, write_i64
from nbflow_kernels.cpu.simd_narrow import write_u8, write_u16
from nbflow_kernels.formats.affine_format import (
    GGML_ABSMAX,
    GGML_EXTREME,
    GGML_RANGE,
    AffineFormat,
)
from nbflow_kernels.formats.bit_fields import GATHER_BITS, LOWEST_BITS
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers import simd_panel
from nbflow_kernels.quantizers.block_range import smallest_and_largest
from nbflow_kernels.quantizers.reference import ggml_scale_fit

QuantizedBlocks = tuple[Bytes, NDArray[np.uint16]]
"""Codes (n, block_size) and stored parameters (n, 2: base, scale) of blocks."""

SIZE = 32  # weights of a block
FIT_COST, ROUND_COST, PACK_COST = 250.0, 4.0, 1.0  # multiply-adds a weight costs, to count threads
_NIBBLES = 0x0F0F0F0F0F0F0F0F
_FOUR = np.int64(4)  # results wrap as int64, in Python too


@jit.kernel(strict=True)
def _mean_squares(x, out, start, stop):
    """Write the mean square of rows, added up from the first to the last."""
    for row in range(start, stop):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        out[row] = total / np.float32(x.shape[1])


@jit.kernel(strict=True)
def _fit_blocks(x, importance, squares, top, signed, codes, params, start, stop):
    """Quantize groups [start, stop) of 16 blocks of `x` (blocks, 32).

    `squares` is the mean square of each row.  `top` is the code of weight 0 if `signed`, else the
    largest.  `params` float32 (blocks, 2) gets base and scale.
    """
    blocks = len(x) // len(squares)
    scratch = np.empty((3 * SIZE + 3, 16), np.float32)
    at = simd.address(scratch)
    w_at, code_at, sigma_at = at + SIZE * 64, at + 2 * SIZE * 64, at + 3 * SIZE * 64
    scale_at, minimum_at = sigma_at + 64, sigma_at + 128
    for group in range(start, stop):
        first = group * LANES
        used = min(LANES, len(x) - first)
        simd_panel.load_panel(x, first, scratch[:SIZE])
        simd_panel.load_importance(importance, blocks, first, scratch[SIZE : 2 * SIZE])
        for lane in range(LANES):
            scratch[3 * SIZE, lane] = squares[min(first + lane, len(x) - 1) // blocks]
        ggml_scale_fit.scale_importance(at, w_at, SIZE, simd.load_f32(sigma_at))
        if signed:
            ggml_scale_fit.fit_signed(at, w_at, SIZE, top, code_at, scale_at)
        else:
            ggml_scale_fit.fit_range(
                at, w_at, SIZE, top, -0.9, 0.05, 36, False, code_at, scale_at, minimum_at
            )
        simd_panel.store_panel(scratch[2 * SIZE : 3 * SIZE], first, codes)
        for lane in range(used):
            params[first + lane, 1] = scratch[3 * SIZE + 1, lane]
            params[first + lane, 0] = 0 if signed else -scratch[3 * SIZE + 2, lane]


def quantize_weighted(format: AffineFormat, x: Floats, importance: Floats) -> QuantizedBlocks:
    """Quantize rows: Q4_0, Q5_0 by the best of 19 ranges; Q4_1, Q5_1 of 38, base <= 0."""
    signed = format.rule == GGML_EXTREME
    top = format.zero if signed else format.n_codes - 1
    squares = np.empty(len(x), np.float32)
    parallel_for(_mean_squares, len(x), 8.0 * x.size, x, squares)
    blocks = x.reshape(-1, SIZE)
    codes: Bytes = np.empty(blocks.shape, np.uint8)
    params = np.empty((len(blocks), 2), np.float32)
    parallel_for(
        _fit_blocks, -(-len(blocks) // LANES), FIT_COST * x.size, blocks, importance, squares, top,
        signed, codes, params,
    )  # fmt: skip
    with np.errstate(over="ignore"):
        return codes, params.astype(np.float16).view(np.uint16)


# ---- without importance -------------------------------------------------------------------------


def quantize(format: AffineFormat, x: Floats) -> QuantizedBlocks:
    """Quantize blocks (n, 32).

    Q4_0, Q5_0: the weight of largest magnitude is -zero * scale.  Q4_1, Q5_1: the codes span
    minimum to maximum.  Q8_0: the largest magnitude is 127 * scale.
    """
    codes = np.empty(x.shape, np.uint8)
    parameters = np.empty((len(x), 2), np.uint16)
    parallel_for(
        _quantize, len(x), ROUND_COST * x.size, x, format.rule, np.float32(format.divisor),
        format.zero, format.n_codes - 1, codes, parameters,
    )  # fmt: skip
    return codes, parameters


def pack(format: AffineFormat, codes: Bytes, parameters: NDArray[np.uint16]) -> Bytes:
    """Return the bytes (n, block_bytes) of codes (n, 32) and parameters (n, 2: base, scale).

    The bytes are those of `AffineFormat.blocks`, written in one pass over memory.
    """
    blocks = np.empty((len(codes), format.block_bytes), np.uint8)
    parallel_for(
        _pack, len(codes), PACK_COST * codes.size, codes, parameters, _places(format), blocks
    )
    return blocks


@functools.cache
def _places(format: AffineFormat) -> tuple[int, ...]:
    """Return where scale, base, highest bits of 5 and codes begin (-1: absent); bits; flips.

    Codes are bytes, eight of which are stored xor `flips`, or nibbles, of which codes i and i + 16
    share a byte.
    """
    high, low, bits = -1, -1, 0
    field = format.fields["code"]
    for plane in field.planes:
        if (plane.bits, plane.shift) == (1, 4):
            high = plane.at
        elif (plane.bits, plane.shift, plane.stride) in ((4, 0, SIZE // 2), (8, 0, 1)):
            low, bits = plane.at, plane.bits
    assert low >= 0, "a layout of GGML's legacy formats"
    assert bits == 8 or field.flip == 0, "signed nibbles"
    flips = np.array([field.flip * LOWEST_BITS], np.uint64).view(np.int64)[0]
    base = format.fields["base"].planes[0].at if "base" in format.fields else -1
    return format.fields["scale"].planes[0].at, base, high, low, bits, int(flips)


@jit.kernel
def _pack(codes, parameters, places, blocks, start, stop):
    """Write blocks [start, stop); `places` is from `_places`."""
    scale_at, base_at, high_at, low_at, bits, flips = places
    for b in range(start, stop):
        source, to = simd.address(codes) + SIZE * b, simd.address(blocks) + b * blocks.shape[1]
        write_u16(to + scale_at, parameters[b, 1])
        if base_at >= 0:
            write_u16(to + base_at, parameters[b, 0])
        if bits == 8:
            for i in range(0, SIZE, 8):
                write_i64(to + low_at + i, read_i64(source + i) ^ flips)
            continue
        for i in range(0, SIZE // 2, 8):
            first, second = read_i64(source + i), read_i64(source + i + SIZE // 2)
            write_i64(to + low_at + i, (first & _NIBBLES) | (second & _NIBBLES) << _FOUR)
        if high_at >= 0:
            for i in range(SIZE // 8):  # the product moves the lowest bit of byte k to bit 56 + k
                lowest = read_i64(source + 8 * i) >> _FOUR & LOWEST_BITS
                write_u8(to + high_at + i, lowest * GATHER_BITS >> 56)


@jit.kernel(strict=True)
def _quantize(x, rule, divisor, zero, top, codes, parameters, start, stop):
    """Quantize blocks [start, stop)."""
    for b in range(start, stop):
        weights = x[b]
        low, high = smallest_and_largest(weights)
        base = np.float32(0)
        if rule == GGML_RANGE:
            base, scale = low, (high - low) / divisor
        elif rule == GGML_ABSMAX:
            scale = max(abs(low), abs(high)) / divisor
        else:
            scale = _extreme(weights, low, high) / -divisor
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        parameters[b, 0] = simd.float_to_half(base)
        parameters[b, 1] = simd.float_to_half(scale)
        if rule == GGML_ABSMAX:
            _rounded_codes(weights, inverse, np.float32(zero), np.float32(top), codes[b])
        else:
            half = np.float32(zero) + np.float32(0.5)
            _floored_codes(weights, base, inverse, half, np.float32(top), codes[b])


@jit.device_function(strict=True)
def _extreme(x, low, high):
    """Return the first weight of largest magnitude of a block from `low` to `high`."""
    if high != -low:
        return high if high > -low else low
    i = 0
    while abs(x[i]) != high:
        i += 1
    return x[i]


@jit.device_function(strict=True)
def _floored_codes(x, base, inverse, half, top, codes):
    """Write the codes of steps from `base`, rounded by adding `half`; NaN is code 0."""
    for i in range(len(x)):
        step = (x[i] - base) * inverse + half
        step = step if step > 0 else np.float32(0)
        codes[i] = np.uint8(np.int32(step if step < top else top))


@jit.device_function(strict=True)
def _rounded_codes(x, inverse, zero, top, codes):
    """Write the codes of steps around `zero`, halves rounded away from it; NaN is code `zero`.

    Adding 0.5 and cutting off would round 0.49999997 up.
    """
    for i in range(len(x)):
        step = x[i] * inverse
        step = step if step == step else np.float32(0)  # false for NaN
        step = step if step > -1000 else np.float32(-1000)
        step = step if step < 1000 else np.float32(1000)
        whole = np.float32(np.int32(step))
        rest = step - whole
        whole += np.float32(rest >= np.float32(0.5)) - np.float32(rest <= np.float32(-0.5))
        code = whole + zero
        code = code if code > 0 else np.float32(0)
        codes[i] = np.uint8(np.int32(code if code < top else top))

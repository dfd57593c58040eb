"""GGML's K-quant quantizers, bit for bit, 16 super-blocks at a time (one per SIMD lane).

`ggml_scale_fit` fits each sub-block; the scales and minima are then quantized for the super-block,
and codes are chosen again for the quantized ones.

A sub-block whose quantized scale is 0 keeps the codes of its own fit: they decode to zero, but the
published bytes contain them.

Source: GGML, ggml-quants.c (quantize_row_q2_K_ref to quantize_row_q6_K_ref, and the functions of
the same names with ``_impl`` where there are importance weights).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_compare, simd_memory
from nbflow_kernels.cpu.simd_compare import (
    absolute,
    choose,
    clamp,
    differs,
    less,
    nearest,
    sqrt,
)
from nbflow_kernels.quantizers import simd_panel
from nbflow_kernels.quantizers.reference import ggml_scale_fit
from nbflow_kernels.quantizers.simd_panel import VECTOR

SUPER = 256  # weights of a super-block

# the scratch memory of a call, in bytes: panels of the super-block, of its sub-blocks, and vectors
X, W, CODES = 0, SUPER * VECTOR, 2 * SUPER * VECTOR
SCALES, MINS, SUMS, SCALE_CODES, MIN_CODES = (
    3 * SUPER * VECTOR + k * 16 * VECTOR for k in range(5)
)
D, DMIN, BITS, BITS_MIN = (3 * SUPER * VECTOR + (5 * 16 + k) * VECTOR for k in range(4))
VECTORS = 3 * SUPER + 5 * 16 + 4


@jit.device_function(strict=True)
def _mean_square(x, times):
    """Return the mean square of each super-block of the panel at `x`, `times` 1 or 2."""
    total = simd.splat(0.0)
    for at in range(x, x + SUPER * VECTOR, VECTOR):
        v = simd.load_f32(at)
        total = simd.add(total, simd.mul(v, v))
    return simd.div(simd.mul(simd.splat(times), total), simd.splat(SUPER))


@jit.device_function(strict=True)
def _weigh_magnitudes(x, w, n, with_mean):
    """Write |x|, plus the root mean square of the sub-block, to `w`."""
    mean = simd.splat(0.0)
    if with_mean:
        for i in range(0, n * VECTOR, VECTOR):
            v = simd.load_f32(x + i)
            mean = simd.add(mean, simd.mul(v, v))
        mean = sqrt(simd.div(mean, simd.splat(n)))
    for i in range(0, n * VECTOR, VECTOR):
        simd.store_f32(w + i, simd.add(mean, absolute(simd.load_f32(x + i))))


@jit.device_function(strict=True)
def _scale_down(values, count, top, codes):
    """Write round(value * top / largest) to `codes`; return largest / top."""
    zero = simd.splat(0.0)
    largest = zero
    for i in range(0, count * VECTOR, VECTOR):
        v = simd.load_f32(values + i)
        largest = choose(less(largest, v), v, largest)
    some = less(zero, largest)
    inverse = choose(some, simd.div(simd.splat(top), largest), zero)
    for i in range(0, count * VECTOR, VECTOR):
        code = nearest(simd.mul(inverse, simd.load_f32(values + i)))
        code = simd_compare.smaller(simd.and_(code, simd.splat_i32(255)), simd.splat_i32(top))
        simd.store_f32(codes + i, simd.to_f32(code))
    return simd.div(largest, simd.splat(top))


@jit.device_function(inline="always")
def _read(x, importance, blocks, first, scratch):
    """Fill the panels with 16 super-blocks."""
    simd_panel.load_panel(x, first, scratch[:SUPER])
    if len(importance):
        simd_panel.load_importance(importance, blocks, first, scratch[SUPER : 2 * SUPER])


@jit.device_function(strict=True)
def _choose_codes(at, n, low, high, with_mins):
    """Round d and dmin to float16 and choose the nearest codes, where the scale is not 0."""
    simd_memory.store_f16(at + BITS, simd.load_f32(at + D))
    simd_memory.store_f16(at + BITS_MIN, simd.load_f32(at + DMIN))
    d, dmin = simd.load_f16(at + BITS), simd.load_f16(at + BITS_MIN)
    for j in range(SUPER // n):
        step = simd.mul(d, simd.load_f32(at + SCALE_CODES + j * VECTOR))
        shift = simd.splat(0.0)
        if with_mins:
            shift = simd.mul(dmin, simd.load_f32(at + MIN_CODES + j * VECTOR))
        some = differs(step, simd.splat(0.0))
        for i in range(at + j * n * VECTOR, at + (j + 1) * n * VECTOR, VECTOR):
            steps = nearest(simd.div(simd.add(simd.load_f32(X + i), shift), step))
            code = simd.to_f32(simd.sub(clamp(steps, low, high), simd.splat_i32(low)))
            simd.store_f32(CODES + i, choose(some, code, simd.load_f32(CODES + i)))


@jit.device_function(inline="always")
def _write(scratch, first, count, codes, scales, params):
    """Write the results of 16 super-blocks, without the minima."""
    simd_panel.store_panel(scratch[2 * SUPER : 3 * SUPER], first, codes)
    row = SCALE_CODES // VECTOR
    simd_panel.store_panel(scratch[row : row + count], first, scales)
    d, dmin = scratch[BITS // VECTOR].view(np.uint16), scratch[BITS_MIN // VECTOR].view(np.uint16)
    for lane in range(min(16, len(codes) - first)):
        params[first + lane, 0], params[first + lane, 1] = d[lane], dmin[lane]


# ---- q2_k, q4_k, q5_k ---------------------------------------------------------------------------


@jit.device_function(strict=True)
def _fit_range(at, j, recipe):
    """Fit sub-block `j`."""
    n, top, _, first, step, tries, absolutely = recipe
    x, w = at + X + j * n * VECTOR, at + W + j * n * VECTOR
    ggml_scale_fit.fit_range(
        x, w, n, top, first, step, tries, absolutely, at + CODES + j * n * VECTOR,
        at + SCALES + j * VECTOR, at + MINS + j * VECTOR,
    )  # fmt: skip


@jit.device_function(strict=True)
def fit_ranges(at, recipe):
    """Fit all sub-blocks, and quantize their scales and minima."""
    n, scale_top = recipe[0], recipe[2]
    count = SUPER // n
    for j in range(count):
        at_j = at + j * n * VECTOR
        _weigh_magnitudes(at_j + X, at_j + W, n, n == 32)
        _fit_range(at, j, recipe)
    simd.store_f32(at + D, _scale_down(at + SCALES, count, scale_top, at + SCALE_CODES))
    simd.store_f32(at + DMIN, _scale_down(at + MINS, count, scale_top, at + MIN_CODES))


@jit.device_function(strict=True)
def _fit_weighted_ranges(at, recipe):
    """Fit as `fit_ranges` does, with importance weights."""
    n, scale_top = recipe[0], recipe[2]
    count, sums = SUPER // n, at + SUMS
    sigma = _mean_square(at + X, n // 16)
    for j in range(count):
        at_j = at + j * n * VECTOR
        total = ggml_scale_fit.scale_importance(at_j + X, at_j + W, n, sigma)
        simd.store_f32(sums + j * VECTOR, total)
        _fit_range(at, j, recipe)
    ggml_scale_fit.fit_positive(at + SCALES, sums, count, scale_top, at + SCALE_CODES, at + D)
    ggml_scale_fit.fit_positive(at + MINS, sums, count, scale_top, at + MIN_CODES, at + DMIN)


@jit.kernel(strict=True)
def quantize_ranges(x, importance, blocks, recipe, codes, scales, mins, params, start, stop):
    """Quantize groups [start, stop) of 16 super-blocks of `x` (super-blocks, 256).

    `recipe` is (n, top, scale_top, first, step, tries, absolutely): weights of a sub-block, their
    largest code, the largest scale and minimum, and arguments of `fit_range`.  `importance` (0, 1
    or rows; columns) has rows of `blocks` super-blocks.  Results: `codes` uint8 (super-blocks,
    256), `scales` int16 and `mins` uint8 (super-blocks, 256 / n), `params` uint16 (super-blocks,
    2): the bits of d and dmin.
    """
    scratch = np.zeros((VECTORS, 16), np.float32)
    at, n, top = simd.address(scratch), recipe[0], recipe[1]
    count, row = SUPER // n, MIN_CODES // VECTOR
    for group in range(start, stop):
        _read(x, importance, blocks, 16 * group, scratch)
        if len(importance) > 0:
            _fit_weighted_ranges(at, recipe)
        else:
            fit_ranges(at, recipe)
        _choose_codes(at, n, 0, top, True)
        _write(scratch, 16 * group, count, codes, scales, params)
        simd_panel.store_panel(scratch[row : row + count], 16 * group, mins)


# ---- q3_k, q6_k ---------------------------------------------------------------------------------

SIGNED = 16  # weights of a sub-block, and sub-blocks of a super-block


@jit.device_function(strict=True)
def _weigh_squares(at):
    """Weigh the error of each weight by its square."""
    for i in range(0, SUPER * VECTOR, VECTOR):
        v = simd.load_f32(at + X + i)
        simd.store_f32(at + W + i, simd.mul(v, v))


@jit.device_function(strict=True)
def fit_q3_k(at):
    """Fit all sub-blocks with codes -4 .. 3, and quantize their scales."""
    _weigh_squares(at)
    for j in range(SIGNED):
        i = j * SIGNED * VECTOR
        ggml_scale_fit.fit_signed_descent(
            at + X + i, at + W + i, SIGNED, 4, at + CODES + i, at + SCALES + j * VECTOR
        )
    # without a scale the field is zero, which stands for -32
    _scale_down_signed(at, 32, 1e-45, -32)


@jit.device_function(strict=True)
def _fit_weighted_q3_k(at):
    """Fit as `fit_q3_k` does, with importance weights."""
    sigma = _mean_square(at + X, 2)
    for j in range(SIGNED):
        i = j * SIGNED * VECTOR
        x, w = at + X + i, at + W + i
        simd.store_f32(at + SUMS + j * VECTOR, ggml_scale_fit.scale_importance(x, w, SIGNED, sigma))
        ggml_scale_fit.fit_signed(x, w, SIGNED, 4, at + CODES + i, at + SCALES + j * VECTOR)
    ggml_scale_fit.fit_signed(at + SCALES, at + SUMS, SIGNED, 32, at + SCALE_CODES, at + D)
    for i in range(at + SCALE_CODES, at + SCALE_CODES + SIGNED * VECTOR, VECTOR):
        simd.store_f32(i, simd.sub(simd.load_f32(i), simd.splat(32)))


@jit.device_function(strict=True)
def fit_q6_k(at):
    """Fit all sub-blocks with codes -32 .. 31, and quantize their scales."""
    _weigh_squares(at)
    _fit_weighted_q6_k(at)


@jit.device_function(strict=True)
def _fit_weighted_q6_k(at):
    """Fit as `fit_q6_k` does, with the given error weights."""
    for j in range(SIGNED):
        i = j * SIGNED * VECTOR
        ggml_scale_fit.fit_signed(
            at + X + i, at + W + i, SIGNED, 32, at + CODES + i, at + SCALES + j * VECTOR
        )
    nothing = _scale_down_signed(at, 128, ggml_scale_fit.TINY, 0)
    for i in range(at + CODES, at + CODES + SUPER * VECTOR, VECTOR):  # all bytes are zero there
        simd.store_f32(i, choose(nothing, simd.splat(0.0), simd.load_f32(i)))


@jit.device_function(strict=True)
def _scale_down_signed(at, top, tiny, none):
    """Quantize the scales so that the extreme one is -top.

    Returns the mask of the super-blocks without a scale of at least `tiny`: their d is 0 and their
    scales are `none`.
    """
    zero = simd.splat(0.0)
    extreme, magnitude = ggml_scale_fit.largest(at + SCALES, SIGNED)
    nothing = less(magnitude, simd.splat(tiny))
    inverse = simd.div(simd.splat(-top), extreme)
    for i in range(at, at + SIGNED * VECTOR, VECTOR):
        code = clamp(nearest(simd.mul(inverse, simd.load_f32(SCALES + i))), -top, top - 1)
        code = choose(nothing, simd.splat_i32(none), code)
        simd.store_f32(SCALE_CODES + i, simd.to_f32(code))
    simd.store_f32(at + D, choose(nothing, zero, simd.div(simd.splat(1.0), inverse)))
    return nothing


@jit.kernel(strict=True)
def quantize_signed(x, importance, blocks, top, codes, scales, params, start, stop):
    """Quantize groups [start, stop) of 16 super-blocks, codes -top .. top - 1 (stored plus top).

    `top` is 4 for q3_k and 32 for q6_k; the rest is as for `quantize_ranges`.
    """
    scratch = np.zeros((VECTORS, 16), np.float32)
    at = simd.address(scratch)
    for group in range(start, stop):
        _read(x, importance, blocks, 16 * group, scratch)
        weighted = len(importance) > 0
        if top == 4:
            if weighted:
                _fit_weighted_q3_k(at)
            else:
                fit_q3_k(at)
        elif weighted:
            _fit_weighted_q6_k(at)
        else:
            fit_q6_k(at)
        _choose_codes(at, SIGNED, -top, top - 1, False)
        _write(scratch, 16 * group, SIGNED, codes, scales, params)

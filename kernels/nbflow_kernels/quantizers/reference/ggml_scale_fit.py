"""GGML's scale fits for 16 blocks at a time, in the published order of operations.

Each fit takes panels (`quantizers.simd_panel`) by address: `n` weights `x` of 16 blocks and the
weights of their squared errors, `w`.  It writes the codes as float32 to the panel `codes` and the
scale to `scale_at`.  Arithmetic is float32, rounded after each operation: the bits are those of
GGML built without fused multiply-adds, and no lane depends on its neighbours.

Source: GGML, ggml-quants.c (make_qx_quants, make_q3_quants, make_qkx2_quants, make_qkx3_quants,
make_qp_quants).  The order of sums is the published one, as the bits depend on it.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_compare import (
    absolute,
    any_lane,
    choose,
    clamp,
    differs,
    less,
    nearest,
    sqrt,
)
from nbflow_kernels.quantizers.simd_panel import VECTOR

TINY = 1e-15  # blocks with a smaller largest magnitude count as zeros
PASSES = 5  # passes of coordinate descent


@jit.device_function(strict=True)
def _code(product, low, high):
    """Return the nearest code as float32."""
    return simd.to_f32(clamp(nearest(product), low, high))


@jit.device_function(strict=True)
def largest(x, n):
    """Return the first value of largest magnitude, and the magnitude."""
    extreme = magnitude = simd.splat(0.0)
    for at in range(x, x + n * VECTOR, VECTOR):
        v = simd.load_f32(at)
        more = less(magnitude, absolute(v))
        magnitude = choose(more, absolute(v), magnitude)
        extreme = choose(more, v, extreme)
    return extreme, magnitude


@jit.device_function(strict=True)
def scale_importance(x, w, n, sigma):
    """Multiply importance by sqrt(sigma + x x) in place; return the sum."""
    total = simd.splat(0.0)
    for i in range(0, n * VECTOR, VECTOR):
        v = simd.load_f32(x + i)
        weight = simd.mul(simd.load_f32(w + i), sqrt(simd.add(sigma, simd.mul(v, v))))
        simd.store_f32(w + i, weight)
        total = simd.add(total, weight)
    return total


# ---- codes around zero --------------------------------------------------------------------------


@jit.device_function(strict=True)
def _projection(x, w, n, top, inverse):
    """Return the sums of w x l and w l l for the codes l that `inverse` gives."""
    sum_xl = sum_ll = simd.splat(0.0)
    for i in range(0, n * VECTOR, VECTOR):
        v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
        code = _code(simd.mul(inverse, v), -top, top - 1)
        sum_xl = simd.add(sum_xl, simd.mul(simd.mul(weight, v), code))
        sum_ll = simd.add(sum_ll, simd.mul(simd.mul(weight, code), code))
    return sum_xl, sum_ll


@jit.device_function(strict=True)
def fit_signed(x, w, n, top, codes, scale_at):
    """Fit x = scale * (code - top), code 0 .. 2 top - 1: the best of 19 ranges.

    Writes the scale to `scale_at`.  The codes of a block of zeros are 0, and so is its scale.
    """
    zero = simd.splat(0.0)
    extreme, magnitude = largest(x, n)
    inverse = simd.div(simd.splat(-top), extreme)
    sum_xl, sum_ll = _projection(x, w, n, top, inverse)
    scale = choose(differs(sum_ll, zero), simd.div(sum_xl, sum_ll), zero)
    best = simd.mul(scale, sum_xl)
    for k in range(-9, 10):
        if k == 0:
            continue
        step = -(np.float32(top) + np.float32(0.1) * np.float32(k))
        other = simd.div(simd.splat(step), extreme)
        sum_xl, sum_ll = _projection(x, w, n, top, other)
        more = less(simd.mul(best, sum_ll), simd.mul(sum_xl, sum_xl))
        more = simd.and_(more, less(zero, sum_ll))
        inverse = choose(more, other, inverse)
        scale = choose(more, simd.div(sum_xl, sum_ll), scale)
        best = choose(more, simd.mul(scale, sum_xl), best)
    nothing = less(magnitude, simd.splat(TINY))
    simd.store_f32(scale_at, choose(nothing, zero, scale))
    for i in range(0, n * VECTOR, VECTOR):
        code = _code(simd.mul(inverse, simd.load_f32(x + i)), -top, top - 1)
        code = simd.add(code, simd.splat(top))
        simd.store_f32(codes + i, choose(nothing, zero, code))


@jit.device_function(strict=True)
def fit_signed_descent(x, w, n, top, codes, scale_at):
    """Fit as `fit_signed` does, by coordinate descent over the codes of the full range."""
    zero = simd.splat(0.0)
    extreme, magnitude = largest(x, n)
    inverse = simd.div(simd.splat(-top), extreme)
    scale = _descend(x, w, n, -top, top - 1, inverse, codes)
    nothing = less(magnitude, simd.splat(TINY))
    simd.store_f32(scale_at, choose(nothing, zero, scale))
    for i in range(0, n * VECTOR, VECTOR):
        code = simd.add(simd.load_f32(codes + i), simd.splat(top))
        simd.store_f32(codes + i, choose(nothing, zero, code))


@jit.device_function(strict=True)
def _descend(x, w, n, low, high, inverse, codes):
    """Change one code at a time while the fit gains, from the codes that `inverse` gives.

    Writes the codes and returns the least squares scale.  GGML's acceptance rule depends on `low`.
    """
    zero = simd.splat(0.0)
    sum_xl = sum_ll = zero
    for i in range(0, n * VECTOR, VECTOR):
        v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
        code = _code(simd.mul(inverse, v), low, high)
        simd.store_f32(codes + i, code)
        sum_xl = simd.add(sum_xl, simd.mul(simd.mul(weight, v), code))
        sum_ll = simd.add(sum_ll, simd.mul(simd.mul(weight, code), code))
    for _ in range(PASSES):
        changed = simd.splat_i32(0)
        for i in range(0, n * VECTOR, VECTOR):
            v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
            old, product = simd.load_f32(codes + i), simd.mul(weight, v)
            rest_xl = simd.sub(sum_xl, simd.mul(product, old))
            rest_ll = simd.sub(sum_ll, simd.mul(simd.mul(weight, old), old))
            code = _code(simd.div(simd.mul(v, rest_ll), rest_xl), low, high)
            new_xl = simd.add(rest_xl, simd.mul(product, code))
            new_ll = simd.add(rest_ll, simd.mul(simd.mul(weight, code), code))
            more = less(
                simd.mul(simd.mul(sum_xl, sum_xl), new_ll),
                simd.mul(simd.mul(new_xl, new_xl), sum_ll),
            )
            positive = less(zero, new_ll if low < 0 else rest_ll)
            more = simd.and_(simd.and_(more, less(zero, rest_xl)), positive)
            more = simd.and_(more, differs(code, old))
            sum_xl, sum_ll = choose(more, new_xl, sum_xl), choose(more, new_ll, sum_ll)
            simd.store_f32(codes + i, choose(more, code, old))
            changed = simd.or_(changed, more)
        if not any_lane(changed):
            break
    return choose(less(zero, sum_ll), simd.div(sum_xl, sum_ll), zero)


# ---- codes above a minimum ----------------------------------------------------------------------


@jit.device_function(strict=True)
def _deviation(x, w, n, top, low, inverse, scale, base, absolutely):
    """Return the weighted error of scale * code + base; (low, inverse) give the codes."""
    total = simd.splat(0.0)
    for i in range(0, n * VECTOR, VECTOR):
        v = simd.load_f32(x + i)
        code = _code(simd.mul(inverse, simd.sub(v, low)), 0, top)
        error = simd.sub(simd.add(simd.mul(scale, code), base), v)
        error = absolute(error) if absolutely else simd.mul(error, error)
        total = simd.add(total, simd.mul(simd.load_f32(w + i), error))
    return total


@jit.device_function(strict=True)
def _line(x, w, n, top, low, inverse, sum_w, sum_x):
    """Return the least squares (slope, base <= 0) for the codes, and the mask where it exists."""
    zero = simd.splat(0.0)
    sum_l = sum_ll = sum_xl = zero
    for i in range(0, n * VECTOR, VECTOR):
        v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
        code = _code(simd.mul(inverse, simd.sub(v, low)), 0, top)
        part = simd.mul(weight, code)
        sum_l = simd.add(sum_l, part)
        sum_ll = simd.add(sum_ll, simd.mul(part, code))
        sum_xl = simd.add(sum_xl, simd.mul(part, v))
    spread = simd.sub(simd.mul(sum_w, sum_ll), simd.mul(sum_l, sum_l))
    slope = simd.div(simd.sub(simd.mul(sum_w, sum_xl), simd.mul(sum_x, sum_l)), spread)
    base = simd.div(simd.sub(simd.mul(sum_ll, sum_x), simd.mul(sum_l, sum_xl)), spread)
    above = less(zero, base)
    slope = choose(above, simd.div(sum_xl, sum_ll), slope)
    return slope, choose(above, zero, base), less(zero, spread)


@jit.device_function(strict=True)
def fit_range(x, w, n, top, first, step, tries, absolutely, codes, scale_at, minimum_at):
    """Fit x = scale * code - minimum, code 0 .. top, minimum >= 0.

    `tries` + 1 ranges of ``first + k * step + top`` steps are tried; `absolutely` compares sums of
    |error| in place of squares.
    """
    zero = simd.splat(0.0)
    low = high = simd.load_f32(x)
    sum_w = simd.load_f32(w)
    sum_x = simd.mul(sum_w, low)
    for i in range(VECTOR, n * VECTOR, VECTOR):
        v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
        low, high = choose(less(v, low), v, low), choose(less(high, v), v, high)
        sum_w, sum_x = simd.add(sum_w, weight), simd.add(sum_x, simd.mul(weight, v))
    low = choose(less(zero, low), zero, low)
    flat, flat_base = simd.sub(simd.splat_i32(-1), differs(high, low)), low
    inverse = simd.div(simd.splat(top), simd.sub(high, low))
    scale, base = simd.div(simd.splat(1.0), inverse), low
    error = _deviation(x, w, n, top, low, inverse, scale, base, absolutely)
    for k in range(tries + 1):
        steps = np.float32(first) + np.float32(step) * np.float32(k) + np.float32(top)
        other = simd.div(simd.splat(steps), simd.sub(high, base))
        slope, shift, exists = _line(x, w, n, top, base, other, sum_w, sum_x)
        now = _deviation(x, w, n, top, base, other, slope, shift, absolutely)
        more = simd.and_(exists, less(now, error))
        error, scale = choose(more, now, error), choose(more, slope, scale)
        low, inverse = choose(more, base, low), choose(more, other, inverse)
        base = choose(more, shift, base)
    simd.store_f32(scale_at, choose(flat, zero, scale))
    simd.store_f32(minimum_at, simd.mul(simd.splat(-1.0), choose(flat, flat_base, base)))
    inverse = choose(flat, zero, inverse)
    for i in range(0, n * VECTOR, VECTOR):
        v = simd.load_f32(x + i)
        simd.store_f32(codes + i, _code(simd.mul(inverse, simd.sub(v, low)), 0, top))


# ---- scales of scales ---------------------------------------------------------------------------


@jit.device_function(strict=True)
def fit_positive(x, w, n, top, codes, scale_at):
    """Fit x = scale * code, code 0 .. top, to x >= 0: 9 ranges, then coordinate descent."""
    zero = simd.splat(0.0)
    high = zero
    for i in range(0, n * VECTOR, VECTOR):
        v = simd.load_f32(x + i)
        high = choose(less(v, high), high, v)
    inverse = simd.div(simd.splat(top), high)
    error = _positive_error(x, w, n, top, inverse)
    for k in range(-4, 5):
        if k == 0:
            continue
        steps = np.float32(0.1) * np.float32(k) + np.float32(top)
        other = simd.div(simd.splat(steps), high)
        now = _positive_error(x, w, n, top, other)
        more = less(now, error)
        error, inverse = choose(more, now, error), choose(more, other, inverse)
    scale = _descend(x, w, n, 0, top, inverse, codes)
    nothing = less(high, simd.splat(TINY))
    simd.store_f32(scale_at, choose(nothing, zero, scale))
    for i in range(0, n * VECTOR, VECTOR):
        simd.store_f32(codes + i, choose(nothing, zero, simd.load_f32(codes + i)))


@jit.device_function(strict=True)
def _positive_error(x, w, n, top, inverse):
    """Return the weighted squared error of the codes that `inverse` gives."""
    scale = simd.div(simd.splat(1.0), inverse)
    total = simd.splat(0.0)
    for i in range(0, n * VECTOR, VECTOR):
        v = simd.load_f32(x + i)
        code = _code(simd.mul(inverse, v), 0, top)
        error = simd.sub(v, simd.mul(scale, code))
        total = simd.add(total, simd.mul(simd.mul(simd.load_f32(w + i), error), error))
    return total

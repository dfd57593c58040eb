"""Search for the K-quants (quantizer "search"), 16 super-blocks at a time (one per SIMD lane).

1.  For each sub-block, the best real scale and minimum: clipped ranges give codes, least squares
    gives the line through them.
2.  For several `d` and `dmin`, integer scales and minima next to these targets: the exact error of
    all neighbours decides.
3.  Least squares gives the `d` and `dmin` for all codes, scales and minima of the super-block; they
    are rounded to float16, and step 2 is repeated from there.

The error is that of the decoded weights, with the nearest codes for the stored parameters.  The
published super-block is one of the candidates, so no error is larger than the published one.
A super-block whose weights lie far above zero is quantized as its mirror image, with negative `d`
and `dmin`: minima are >= 0, so the codes of the original would have to start at zero.

Arithmetic is float32, rounded after each operation (`jit.kernel(strict=True)`; fused operations are
explicit): the bytes are the same on every processor.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_compare, simd_memory
from nbflow_kernels.cpu.simd_compare import absolute, choose, differs, less
from nbflow_kernels.quantizers import simd_panel
from nbflow_kernels.quantizers.simd_panel import VECTOR, clip

SUPER = 256  # weights of a super-block
HUGE = 3e38
F16_MAX = 65504.0
REFINEMENTS = 2  # of the line of a sub-block
ROUNDS = 3  # of steps 2 and 3 for each start
STRIDE = 0.45  # between starts, in units of the largest scale

# the scratch memory of a call, in bytes: panels of the super-block, of its sub-blocks, and vectors
X, W, CODES = 0, SUPER * VECTOR, 2 * SUPER * VECTOR
STEPS, SHIFTS, SCALES, MINS, BEST_SCALES, BEST_MINS = (
    3 * SUPER * VECTOR + k * 16 * VECTOR for k in range(6)
)
FACTOR, BACK, D, DMIN, BEST_D, BEST_DMIN, REFERENCE_ERROR, BEST_ERROR, BITS, BITS_MIN = (
    3 * SUPER * VECTOR + (6 * 16 + k) * VECTOR for k in range(10)
)
VECTORS = 3 * SUPER + 6 * 16 + 10


@jit.device_function(strict=True)
def _cut(v, low, high):
    """Clamp lanes to the scalars `low` and `high`."""
    return clip(v, simd.splat(low), simd.splat(high))


@jit.device_function(strict=True)
def _reciprocal(v):
    """Return 1 / v, 0 for 0."""
    zero = simd.splat(0.0)
    return choose(differs(v, zero), simd.div(simd.splat(1.0), v), zero)


@jit.device_function(strict=True)
def _error(x, w, n, low, high, step, shift):
    """Return the weighted squared error of step * code - shift with the nearest codes."""
    inverse = _reciprocal(step)
    one = two = simd.splat(0.0)
    for i in range(0, n * VECTOR, 2 * VECTOR):
        v = simd.add(simd.load_f32(x + i), shift)
        e = simd.fma(
            step, _cut(simd.rint(simd.mul(v, inverse)), low, high), simd.mul(v, simd.splat(-1.0))
        )
        one = simd.fma(simd.mul(e, e), simd.load_f32(w + i), one)
        v = simd.add(simd.load_f32(x + i + VECTOR), shift)
        e = simd.fma(
            step, _cut(simd.rint(simd.mul(v, inverse)), low, high), simd.mul(v, simd.splat(-1.0))
        )
        two = simd.fma(simd.mul(e, e), simd.load_f32(w + i + VECTOR), two)
    return simd.add(one, two)


@jit.device_function(strict=True)
def _largest(values, count):
    """Return the value of largest magnitude."""
    extreme = simd.splat(0.0)
    for at in range(values, values + count * VECTOR, VECTOR):
        v = simd.load_f32(at)
        extreme = choose(less(absolute(extreme), absolute(v)), v, extreme)
    return extreme


# ---- targets of the sub-blocks ------------------------------------------------------------------


@jit.device_function(strict=True)
def _mean(x, w, n):
    """Return the sum of weights, the weighted mean, the smallest and the largest value."""
    sum_w = sum_x = simd.splat(0.0)
    low = high = simd.load_f32(x)
    for i in range(0, n * VECTOR, VECTOR):
        v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
        sum_w, sum_x = simd.add(sum_w, weight), simd.fma(weight, v, sum_x)
        low, high = simd.minimum(low, v), simd.maximum(high, v)
    return sum_w, simd.mul(sum_x, _reciprocal(sum_w)), low, high


@jit.device_function(strict=True)
def _line(x, w, n, top, mean, sum_w, base, step):
    """Return (gain, base, step) of the best line for the codes that (base, step) give.

    The gain is the reduction of squared error relative to the constant `mean`; base <= 0.
    """
    zero = simd.splat(0.0)
    inverse = _reciprocal(step)
    sum_q = sum_qq = sum_xq = zero
    for i in range(0, n * VECTOR, VECTOR):
        v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
        code = _cut(simd.rint(simd.mul(simd.sub(v, base), inverse)), 0, top)
        part = simd.mul(weight, code)
        sum_q, sum_qq = simd.add(sum_q, part), simd.fma(part, code, sum_qq)
        sum_xq = simd.fma(simd.sub(v, mean), part, sum_xq)
    average = simd.mul(sum_q, _reciprocal(sum_w))
    spread = simd.sub(sum_qq, simd.mul(average, sum_q))
    slope = simd.mul(sum_xq, _reciprocal(simd.maximum(spread, zero)))
    base = simd.sub(mean, simd.mul(slope, average))
    gain = simd.mul(slope, sum_xq)
    # a base above 0 cannot be stored: the line goes through 0
    above = less(zero, base)
    sum_xq = simd.fma(mean, sum_q, sum_xq)
    through = simd.mul(sum_xq, _reciprocal(sum_qq))
    gain_through = simd.sub(simd.mul(through, sum_xq), simd.mul(simd.mul(sum_w, mean), mean))
    return (
        choose(above, gain_through, gain),
        choose(above, zero, base),
        choose(above, through, slope),
    )


@jit.device_function(strict=True)
def _target_range(x, w, n, top, grid, clip, step_at, shift_at):
    """Write the step and shift >= 0 of the best x = step * code - shift found."""
    zero = simd.splat(0.0)
    sum_w, mean, low, high = _mean(x, w, n)
    low = simd.minimum(low, zero)
    step = simd.mul(simd.maximum(simd.sub(high, low), zero), simd.splat(1.0 / top))
    best_gain, best_base, best_step = simd.splat(-HUGE), low, step
    for i in range(grid):
        for j in range(grid):
            a, c = np.float32(clip) * np.float32(i), np.float32(clip) * np.float32(j)
            start = simd.fma(simd.splat(a), step, low)
            width = simd.mul(step, simd.splat(np.float32(1) - (a + c) / np.float32(top)))
            gain, base, slope = _line(x, w, n, top, mean, sum_w, start, width)
            more = less(best_gain, gain)
            best_gain, best_base = choose(more, gain, best_gain), choose(more, base, best_base)
            best_step = choose(more, slope, best_step)
    for _ in range(REFINEMENTS):
        gain, base, slope = _line(x, w, n, top, mean, sum_w, best_base, best_step)
        more = less(best_gain, gain)
        best_gain, best_base = choose(more, gain, best_gain), choose(more, base, best_base)
        best_step = choose(more, slope, best_step)
    simd.store_f32(step_at, best_step)
    simd.store_f32(shift_at, simd.sub(zero, best_base))


@jit.device_function(strict=True)
def _ray(x, w, n, low, high, step):
    """Return (gain, step) of the best x = step * code for the codes that `step` gives."""
    inverse = _reciprocal(step)
    sum_qq = sum_xq = simd.splat(0.0)
    for i in range(0, n * VECTOR, VECTOR):
        v, weight = simd.load_f32(x + i), simd.load_f32(w + i)
        code = _cut(simd.rint(simd.mul(v, inverse)), low, high)
        part = simd.mul(weight, code)
        sum_qq, sum_xq = simd.fma(part, code, sum_qq), simd.fma(part, v, sum_xq)
    slope = simd.mul(sum_xq, _reciprocal(sum_qq))
    return simd.mul(slope, sum_xq), slope


@jit.device_function(strict=True)
def _target_signed(x, w, n, low, high, grid, clip, step_at):
    """Write the step, of either sign, of the best x = step * code found."""
    extreme = _largest(x, n)
    best_gain, best_step = simd.splat(-HUGE), simd.splat(0.0)
    for i in range(2 * grid):
        k = i >> 1
        # the extreme weight gets code `low` or `high`, or lies up to `grid` clips beyond
        steps = np.float32(high) + np.float32(0.5) - np.float32(clip) * np.float32(k)
        if i & 1:
            steps = np.float32(low) - np.float32(0.5) + np.float32(clip) * np.float32(k)
        gain, slope = _ray(x, w, n, low, high, simd.mul(extreme, simd.splat(1 / steps)))
        more = less(best_gain, gain)
        best_gain, best_step = choose(more, gain, best_gain), choose(more, slope, best_step)
    for _ in range(REFINEMENTS):
        gain, slope = _ray(x, w, n, low, high, best_step)
        more = less(best_gain, gain)
        best_gain, best_step = choose(more, gain, best_gain), choose(more, slope, best_step)
    simd.store_f32(step_at, best_step)


# ---- integers of the super-block ----------------------------------------------------------------
#
# `form` is (n, low, high, scale_low, scale_high, min_high): weights of a sub-block, their codes,
# and the ranges of scales and minima; min_high = 0 without minima.  `at` is the address
# of the scratch memory.


@jit.device_function(strict=True)
def _polish(at, form, j):
    """Move the integers of sub-block `j` to their best neighbours; return its error."""
    n, low, high, scale_low, scale_high, min_high = form
    x, w = at + X + j * n * VECTOR, at + W + j * n * VECTOR
    scale_at, min_at = at + SCALES + j * VECTOR, at + MINS + j * VECTOR
    d, dmin = simd.load_f32(at + D), simd.load_f32(at + DMIN)
    scale, minimum = simd.load_f32(scale_at), simd.load_f32(min_at)
    best, best_scale, best_min = simd.splat(HUGE), scale, minimum
    reach = 1 if min_high > 0 else 0
    for ds in range(-1, 2):
        s = _cut(simd.add(scale, simd.splat(ds)), scale_low, scale_high)
        for dm in range(-reach, reach + 1):
            m = _cut(simd.add(minimum, simd.splat(dm)), 0, min_high)
            error = _error(x, w, n, low, high, simd.mul(d, s), simd.mul(dmin, m))
            more = less(error, best)
            best, best_scale = choose(more, error, best), choose(more, s, best_scale)
            best_min = choose(more, m, best_min)
    simd.store_f32(scale_at, best_scale)
    simd.store_f32(min_at, best_min)
    return best


@jit.device_function(strict=True)
def _refit(at, form):
    """Make d and dmin the least squares solution for the present codes, scales and minima."""
    n, low, high = form[:3]
    d, dmin = simd.load_f32(at + D), simd.load_f32(at + DMIN)
    aa = ab = bb = ax = bx = simd.splat(0.0)  # x = d * a - dmin * b
    for j in range(SUPER // n):
        s, m = simd.load_f32(at + SCALES + j * VECTOR), simd.load_f32(at + MINS + j * VECTOR)
        shift, inverse = simd.mul(dmin, m), _reciprocal(simd.mul(d, s))
        sum_w = sum_q = sum_qq = sum_x = sum_xq = simd.splat(0.0)
        for i in range(at + j * n * VECTOR, at + (j + 1) * n * VECTOR, VECTOR):
            v, weight = simd.load_f32(X + i), simd.load_f32(W + i)
            code = _cut(simd.rint(simd.mul(simd.add(v, shift), inverse)), low, high)
            part = simd.mul(weight, code)
            sum_w, sum_q = simd.add(sum_w, weight), simd.add(sum_q, part)
            sum_qq, sum_xq = simd.fma(part, code, sum_qq), simd.fma(part, v, sum_xq)
            sum_x = simd.fma(weight, v, sum_x)
        aa = simd.fma(simd.mul(s, s), sum_qq, aa)
        ab = simd.fma(simd.mul(s, m), sum_q, ab)
        bb = simd.fma(simd.mul(m, m), sum_w, bb)
        ax, bx = simd.fma(s, sum_xq, ax), simd.fma(m, sum_x, bx)
    spread = simd.sub(simd.mul(aa, bb), simd.mul(ab, ab))
    both = simd.div(simd.sub(simd.mul(ax, bb), simd.mul(bx, ab)), spread)
    shifted = simd.div(simd.sub(simd.mul(ax, ab), simd.mul(bx, aa)), spread)
    # where all minima are 0, or in proportion to the scales, d alone is fitted
    solvable = less(simd.mul(simd.splat(1e-6), simd.mul(aa, bb)), spread)
    alone = simd.mul(simd.fma(dmin, ab, ax), _reciprocal(aa))
    _set_d(at, choose(solvable, both, alone), choose(solvable, shifted, dmin))


@jit.device_function(strict=True)
def _set_d(at, d, dmin):
    """Round d and dmin to float16 (their bits are kept too) and make them the present ones."""
    factor, back = simd.load_f32(at + FACTOR), simd.load_f32(at + BACK)
    for value, bits, kept in ((d, BITS, D), (dmin, BITS_MIN, DMIN)):
        stored = _cut(simd.mul(value, back), -F16_MAX, F16_MAX)
        simd_memory.store_f16(at + bits, stored)
        simd.store_f32(at + kept, simd.mul(simd.load_f16(at + bits), factor))


@jit.device_function(strict=True)
def _away_from_zero(v, factor):
    """Return `v`, or the smallest float16 with its sign where `v` is smaller but not 0."""
    smallest = simd.mul(absolute(factor), simd.splat(2.0**-24))
    signed = choose(less(v, simd.splat(0.0)), simd.mul(smallest, simd.splat(-1.0)), smallest)
    small = simd.and_(less(absolute(v), smallest), differs(v, simd.splat(0.0)))
    return choose(small, signed, v)


@jit.device_function(strict=True)
def _start(at, form, k):
    """Set d, dmin and the integers nearest to the targets for start `k` >= 1."""
    n, _, _, scale_low, scale_high, min_high = form
    count = SUPER // n
    factor = simd.load_f32(at + FACTOR)
    away = np.float32(STRIDE) * np.float32(k // 2 if k & 1 else -(k // 2))
    # signed scales reach one further down than up
    steps = np.float32(scale_low) - away if scale_low else np.float32(scale_high) + away
    d = simd.div(_largest(at + STEPS, count), simd.splat(steps))
    dmin = simd.div(_largest(at + SHIFTS, count), simd.splat(np.float32(scale_high) + away))
    _set_d(at, _away_from_zero(d, factor), _away_from_zero(dmin, factor))
    d, dmin = _reciprocal(simd.load_f32(at + D)), _reciprocal(simd.load_f32(at + DMIN))
    for i in range(at, at + count * VECTOR, VECTOR):
        s = simd.rint(simd.mul(simd.load_f32(STEPS + i), d))
        m = simd.rint(simd.mul(simd.load_f32(SHIFTS + i), dmin))
        simd.store_f32(SCALES + i, _cut(s, scale_low, scale_high))
        simd.store_f32(MINS + i, _cut(m, 0, min_high))


@jit.device_function(strict=True)
def _improve(at, form, starts):
    """Write the best d, dmin, scales and minima of all starts and rounds to the scratch memory."""
    count = SUPER // form[0]
    for k in range(starts):
        if k > 0:
            _start(at, form, k)
        for turn in range(ROUNDS):
            if turn > 0:
                _refit(at, form)
            total = simd.splat(0.0)
            for j in range(count):
                total = simd.add(total, _polish(at, form, j))
            more = less(total, simd.load_f32(at + BEST_ERROR))
            _keep(total, more, at + BEST_ERROR)
            _keep(simd.load_f32(at + D), more, at + BEST_D)
            _keep(simd.load_f32(at + DMIN), more, at + BEST_DMIN)
            for i in range(at, at + count * VECTOR, VECTOR):
                _keep(simd.load_f32(SCALES + i), more, BEST_SCALES + i)
                _keep(simd.load_f32(MINS + i), more, BEST_MINS + i)


@jit.device_function(strict=True)
def _keep(v, mask, target):
    """Replace the lanes of the vector at `target` where the mask is true."""
    simd.store_f32(target, choose(mask, v, simd.load_f32(target)))


# ---- whole super-blocks -------------------------------------------------------------------------


@jit.device_function(strict=True)
def _normalize(at):
    """Scale the panels in place: weights to about 1, importances to at most 1.

    Keeps the factor of the weights, a power of two, and its reciprocal.
    """
    largest = heaviest = simd.splat(0.0)
    for i in range(at, at + SUPER * VECTOR, VECTOR):
        largest = simd.maximum(largest, absolute(simd.load_f32(X + i)))
        heaviest = simd.maximum(heaviest, simd.load_f32(W + i))
    exponent = simd.shr(simd.as_i32(largest), simd.splat_i32(23))
    exponent = simd_compare.clamp(simd.sub(simd.splat_i32(253), exponent), 27, 227)
    factor = simd.as_f32(simd.shl(exponent, simd.splat_i32(23)))
    back = simd.as_f32(simd.shl(simd.sub(simd.splat_i32(254), exponent), simd.splat_i32(23)))
    normal = _reciprocal(heaviest)
    for i in range(at, at + SUPER * VECTOR, VECTOR):
        simd.store_f32(X + i, simd.mul(simd.load_f32(X + i), factor))
        simd.store_f32(W + i, simd.mul(simd.load_f32(W + i), normal))
    simd.store_f32(at + FACTOR, factor)
    simd.store_f32(at + BACK, back)


@jit.device_function(strict=True)
def _mirror(at, n):
    """Negate the super-blocks whose sub-blocks lie above zero more than below it."""
    zero = simd.splat(0.0)
    above = below = zero
    for j in range(at, at + SUPER * VECTOR, n * VECTOR):
        low = high = simd.load_f32(X + j)
        for i in range(j, j + n * VECTOR, VECTOR):
            v = simd.load_f32(X + i)
            low, high = simd.minimum(low, v), simd.maximum(high, v)
        above = simd.add(above, simd.maximum(low, zero))
        below = simd.sub(below, simd.minimum(high, zero))
    sign = choose(less(below, above), simd.splat(-1.0), simd.splat(1.0))
    for i in range(at, at + SUPER * VECTOR, VECTOR):
        simd.store_f32(X + i, simd.mul(simd.load_f32(X + i), sign))
    for i in (FACTOR, BACK):
        simd.store_f32(at + i, simd.mul(simd.load_f32(at + i), sign))


@jit.device_function(strict=True)
def _prepare(at, form, grid, clip):
    """Find the sub-blocks' targets and the error of the published parameters."""
    n, low, high, _, _, min_high = form
    _normalize(at)
    if min_high > 0:
        _mirror(at, n)
    for j in range(SUPER // n):
        x, w = at + X + j * n * VECTOR, at + W + j * n * VECTOR
        step_at, shift_at = at + STEPS + j * VECTOR, at + SHIFTS + j * VECTOR
        if min_high > 0:
            _target_range(x, w, n, high, grid, clip, step_at, shift_at)
        else:
            _target_signed(x, w, n, low, high, grid, clip, step_at)
    d = simd.mul(simd.load_f16(at + BITS), simd.load_f32(at + FACTOR))
    dmin = simd.mul(simd.load_f16(at + BITS_MIN), simd.load_f32(at + FACTOR))
    total = simd.splat(0.0)
    for j in range(SUPER // n):
        step = simd.mul(d, simd.load_f32(at + SCALES + j * VECTOR))
        shift = simd.mul(dmin, simd.load_f32(at + MINS + j * VECTOR))
        x, w = at + X + j * n * VECTOR, at + W + j * n * VECTOR
        total = simd.add(total, _error(x, w, n, low, high, step, shift))
    # the published d may be infinite: its error is then NaN
    total = choose(less(total, simd.splat(HUGE)), total, simd.splat(HUGE))
    for v, kept in ((d, D), (d, BEST_D), (dmin, DMIN), (dmin, BEST_DMIN)):
        simd.store_f32(at + kept, v)
    simd.store_f32(at + REFERENCE_ERROR, total)
    simd.store_f32(at + BEST_ERROR, total)


@jit.device_function(strict=True)
def _finish(at, form):
    """Write the codes of the best parameters, from 0, and the bits of d and dmin."""
    n, low, high = form[:3]
    for j in range(SUPER // n):
        step = simd.mul(simd.load_f32(at + BEST_D), simd.load_f32(at + BEST_SCALES + j * VECTOR))
        shift = simd.mul(simd.load_f32(at + BEST_DMIN), simd.load_f32(at + BEST_MINS + j * VECTOR))
        inverse = _reciprocal(step)
        for i in range(at + j * n * VECTOR, at + (j + 1) * n * VECTOR, VECTOR):
            steps = simd.mul(simd.add(simd.load_f32(X + i), shift), inverse)
            code = _cut(simd.rint(steps), low, high)
            simd.store_f32(CODES + i, simd.sub(code, simd.splat(low)))
    _set_d(at, simd.load_f32(at + BEST_D), simd.load_f32(at + BEST_DMIN))


@jit.kernel(strict=True)
def search(
    x, importance, blocks, form, starts, grid, clip, codes, scales, mins, params, start, stop
):
    """Improve the published super-blocks: groups [start, stop) of 16.

    `x` float32 (super-blocks, 256); `importance` float32 (1 or rows, columns), 0 for padding, rows
    of `blocks` super-blocks.  `starts` different d are tried; `grid` and `clip` are those of
    `_target_range` and `_target_signed`.  `codes` and the others are those of
    `ggml_k.quantize_ranges`, on entry and on return.
    """
    scratch = np.zeros((VECTORS, 16), np.float32)
    at, count = simd.address(scratch), SUPER // form[0]
    stored = [scratch[i // VECTOR : i // VECTOR + count] for i in (SCALES, MINS)]
    best = [scratch[i // VECTOR : i // VECTOR + count] for i in (BEST_SCALES, BEST_MINS)]
    halves = [scratch[i // VECTOR].view(np.uint16) for i in (BITS, BITS_MIN)]
    errors = [scratch[i // VECTOR] for i in (REFERENCE_ERROR, BEST_ERROR)]
    for group in range(start, stop):
        first = 16 * group
        used = min(16, len(x) - first)
        simd_panel.load_panel(x, first, scratch[:SUPER])
        simd_panel.load_importance(importance, blocks, first, scratch[SUPER : 2 * SUPER])
        simd_panel.load_panel(scales, first, stored[0])
        if mins.shape[1]:
            simd_panel.load_panel(mins, first, stored[1])
        for lane in range(used):
            halves[0][lane], halves[1][lane] = params[first + lane, 0], params[first + lane, 1]
        _prepare(at, form, grid, clip)
        _improve(at, form, starts)
        _finish(at, form)
        for lane in range(used):
            s = first + lane
            if errors[1][lane] < errors[0][lane]:
                _write(scratch[2 * SUPER : 3 * SUPER, lane], codes[s])
                _write(best[0][:, lane], scales[s])
                _write(best[1][: mins.shape[1], lane], mins[s])
                params[s, 0], params[s, 1] = halves[0][lane], halves[1][lane]


@jit.device_function(inline="always")
def _write(values, target):
    """Write small integers to an array of integers."""
    for i in range(len(values)):
        target[i] = np.int32(values[i])

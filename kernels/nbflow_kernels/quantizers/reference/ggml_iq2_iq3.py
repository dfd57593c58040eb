"""GGML's iq2 and iq3 quantizers, bit for bit: one algorithm with a `Recipe` per format.

In each sub-block, the error weight of x with importance q is q * sqrt(x**2 + s), where s is the
mean of x**2 over the block, or twice that; without importance, x**2 (iq2_s: + s / 4).  Signs are
separated; where only 7 of 8 are stored and the number of negative weights is odd, the weight with
the least x**2 times error weight changes its sign.  Then scales around largest / highest level are
tried: magnitudes are rounded to levels 1, 3, 5, ..., a group off the grid moves to the best of its
neighbours (by the root of the error weights), and the least squares scale gives the gain.  The best
scale chooses the points once more and is fitted.  Then the scales of a block are divided by 1/31 of
the largest one and rounded to odd numbers; d is that 1/31 times an empirical factor.

GGML's iq2_xxs and iq2_xs (and iq1_s) do not work without importance; here that means equal ones.
One difference: GGML's iq3_s writes the data after a sub-block of zeros to the wrong place.

Source: GGML, ggml-quants.c (quantize_row_iq2_xxs_impl, quantize_row_iq2_xs_impl,
quantize_row_iq2_s_impl, quantize_row_iq3_xxs_impl, quantize_row_iq3_s_impl, make_qp_quants).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_compare import choose, less
from nbflow_kernels.formats.ggml.iq_grids import OnGrid
from nbflow_kernels.formats.registry import Floats
from nbflow_kernels.quantizers.grid_neighbours import neighbours
from nbflow_kernels.quantizers.reference.codebook import no_importance

COST = 2000.0  # operations per weight, for the choice of thread count

LOSSES = 64 + 256  # scratch floats of `point_of`
MOST_TRIALS = 32  # at least 2 * tries + 1 of all recipes
FEW_POINTS = 12  # lists of more neighbours are faster with sums of four losses in a table
INVERSE, STEP, SUM_X, SUM_Q = range(4)
AGAIN_OFF_GRID, AGAIN_ALL, AGAIN_ALWAYS = 0, 1, 2


class Recipe(NamedTuple):
    """Parameters in which the published quantizers differ."""

    sub_block: int
    n_levels: int
    """Levels of a magnitude: 3 or 8."""
    tries: int
    """Trial scales on either side of the middle."""
    distance: np.float32
    """Distance of trial scales, in levels."""
    nothing: np.float32
    """A sub-block with a smaller largest weight counts as zeros."""
    again: int
    """Groups for which the best scale chooses points again: those off the grid (AGAIN_OFF_GRID),
    all if one is (AGAIN_ALL), or always all (AGAIN_ALWAYS; tries scales around a fitted one)."""
    seven_signs: bool
    twice_mean: np.float32
    """1 or 2: factor of the mean square in the error weights."""
    unweighted: np.float32
    """Fraction of the mean square added to x**2 without importance."""
    factor: np.float32
    """Empirical factor of d."""


_f = np.float32
RECIPES = {
    "iq2_xxs": Recipe(32, 3, 6, _f(0.1), _f(1e-15), AGAIN_ALWAYS, True, _f(1), _f(0), _f(1)),
    "iq2_xs": Recipe(16, 3, 9, _f(0.1), _f(1e-15), AGAIN_OFF_GRID, True, _f(1), _f(0), _f(1)),
    "iq2_s": Recipe(
        16, 3, 9, _f(0.1), _f(1e-8), AGAIN_OFF_GRID, False, _f(2), _f(0.25), _f(0.9875)
    ),
    "iq3_xxs": Recipe(32, 8, 15, _f(0.2), _f(1e-8), AGAIN_OFF_GRID, True, _f(2), _f(0), _f(1.0125)),
    "iq3_s": Recipe(32, 8, 9, _f(0.2), _f(1e-45), AGAIN_ALL, False, _f(2), _f(0), _f(1.033)),
}


def empty(x: Floats, dimensions: int, sub_block: int) -> OnGrid:
    """Return the arrays for rows `x` of weights, filled with zeros."""
    n_rows, width = x.shape
    return OnGrid(
        np.zeros((n_rows, width // dimensions), np.uint16),
        np.zeros((n_rows, width // 8), np.uint8),
        np.zeros((n_rows, width // sub_block), np.uint8),
        np.zeros((n_rows, width // 256), np.uint16),
    )


def quantize(name: str, x: Floats, importance: Floats | None) -> OnGrid:
    """Return rows (rows, K) of weights on the grid of the format `name`."""
    recipe, near = RECIPES[name], neighbours(name)
    out = empty(x, near.dimensions, recipe.sub_block)
    weight = no_importance() if importance is None else importance
    parallel_for(_quantize, len(x), COST * x.size, x, weight, recipe, near, out)
    return out


@jit.kernel(strict=True)
def _quantize(x, importance, recipe, near, out, start, stop):
    """Quantize rows [start, stop)."""
    sub, dimensions = recipe.sub_block, near.dimensions
    weight, root, value = np.empty((3, sub), np.float32)
    found = np.empty(256 // sub, np.float32)
    scratch = (
        np.empty((sub // dimensions, MOST_TRIALS), np.uint16),
        np.empty((sub // dimensions, MOST_TRIALS + 1), np.bool_), np.empty(LOSSES, np.float32),
        np.empty(sub, np.uint8), np.empty((4, MOST_TRIALS), np.float32),
        np.empty(MOST_TRIALS, np.int32),
    )  # fmt: skip
    for row in range(start, stop):
        q = importance[min(row, len(importance) - 1)] if len(importance) else importance.reshape(-1)
        for b in range(x.shape[1] // 256):
            mean = recipe.twice_mean * mean_square(x[row, 256 * b : 256 * b + 256])
            for s in range(len(found)):
                first, last = 256 * b + s * sub, 256 * b + (s + 1) * sub
                error_weights(x[row], q, first, mean, recipe.unweighted * mean, weight)
                for j in range(sub):
                    root[j] = np.sqrt(weight[j])
                signs = out.signs[row, first // 8 : last // 8]
                split_signs(x[row, first:last], weight, recipe.seven_signs, value, signs)
                points = out.points[row, first // dimensions : last // dimensions]
                found[s] = _sub_block(value, weight, root, recipe, near, points, signs, scratch)
            scales = out.scales[row, b * len(found) : (b + 1) * len(found)]
            out.d[row, b] = scales_of(found, recipe.factor, scales)


@jit.device_function(strict=True)
def mean_square(x):
    """Return the mean square of weights, added up in order."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total / np.float32(len(x))


@jit.device_function(strict=True)
def largest_of(x):
    """Return the largest magnitude."""
    largest = np.float32(0)
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
    return largest


@jit.device_function(strict=True)
def error_weights(x, importance, at, mean, plus, weight):
    """Write the error weights from `at` on; `importance` may be empty."""
    for j in range(len(weight)):
        square = x[at + j] * x[at + j]
        if len(importance):
            weight[j] = importance[at + j] * np.sqrt(mean + square)
        else:
            weight[j] = plus + square


@jit.device_function(strict=True)
def split_signs(x, weight, seven_signs, value, signs):
    """Write magnitudes and signs of a sub-block."""
    for k in range(len(x) // 8):
        mask, least = 0, 8 * k
        for j in range(8 * k, 8 * k + 8):
            value[j] = abs(x[j])
            mask |= (x[j] < 0) << (j - 8 * k)
            if weight[j] * x[j] * x[j] < weight[least] * x[least] * x[least]:
                least = j
        folded = mask ^ (mask >> 4)
        folded ^= folded >> 2
        folded ^= folded >> 1
        if seven_signs and folded & 1:
            value[least] = -value[least]
            mask ^= 1 << (least - 8 * k)
        signs[k] = mask


@jit.device_function(strict=True)
def _sub_block(value, weight, root, recipe, near, points, signs, scratch):
    """Choose the points of a sub-block; return its scale, which is not negative."""
    scale, middle = first_scale(
        value, weight, recipe.nothing, recipe.again, recipe.n_levels, scratch[3]
    )
    for k in range(len(points)):
        points[k] = 0
    if scale <= 0:
        for k in range(len(signs)):
            signs[k] = 0
        return np.float32(0)
    scale = _best_scale(value, weight, root, scale, middle, recipe, near, points, scratch)
    if scale < 0:
        for k in range(len(signs)):
            signs[k] ^= 255
    return abs(scale)


@jit.device_function(strict=True)
def first_scale(value, weight, nothing, again, n_levels, codes):
    """Return the first scale of a sub-block and the magnitude around which to try others."""
    largest = value[0]
    for j in range(len(value)):
        largest = max(largest, value[j])
    scale, middle = np.float32(0), largest
    if largest >= nothing and again == AGAIN_ALWAYS:
        scale = _fitted_scale(value, weight, largest, n_levels + 1, codes)
        middle = scale * np.float32(n_levels)
    elif largest >= nothing:
        scale = largest / np.float32(2 * n_levels - 1)
    return scale, middle


@jit.device_function(strict=True)
def _best_scale(value, weight, root, scale, middle, recipe, near, points, scratch):
    """Choose the points of a sub-block by the scales around `middle`; return the best scale."""
    tried, off, losses, _, trials, codes = scratch
    first, lists, grid, dimensions = near.first, near.points, near.grid, near.dimensions
    best, any_off = np.float32(0), recipe.again != AGAIN_OFF_GRID
    for k in range(len(points)):
        off[k, MOST_TRIALS] = any_off
    n_trials = 2 * recipe.tries + 1
    _try_scales(value, weight, root, middle, recipe, near, tried, off, losses, trials, codes)
    for i in range(n_trials):
        qx, qq = trials[SUM_X, i], trials[SUM_Q, i]
        if qq > 0 and qx * qx > best * qq:
            scale = qx / qq
            best = scale * qx
            any_off = recipe.again == AGAIN_ALWAYS
            for k in range(len(points)):
                points[k], off[k, MOST_TRIALS] = tried[k, i], off[k, i]
                any_off |= off[k, i]
    if scale > 0 and any_off:
        inverse = np.float32(1) / scale
        for k in range(len(points)):
            if off[k, MOST_TRIALS] or recipe.again != AGAIN_OFF_GRID:
                points[k], _ = point_of(
                    value, root, k, inverse, scale, first, lists, grid, dimensions, losses
                )
        qx, qq = sums(value, weight, grid, dimensions, points)
        if qq > 0:
            scale = qx / qq
    return scale


@jit.device_function(strict=True)
def _try_scales(value, weight, root, middle, recipe, near, tried, off, losses, trials, codes):
    """Choose the points of a sub-block for each trial scale, and add up `sums`.

    A SIMD lane holds a trial: `trials` (4, MOST_TRIALS) are the INVERSE scales, their reciprocals
    STEP, SUM_X and SUM_Q.  `codes` int32 (MOST_TRIALS,) are the rounded weights of a group, then
    its grid points.
    """
    first, lists, grid, dimensions = near.first, near.points, near.grid, near.dimensions
    width = 2 if dimensions == 8 else 3
    highest = np.float32(2 * recipe.n_levels - 1)
    n_trials = 2 * recipe.tries + 1
    for i in range(MOST_TRIALS):
        trials[INVERSE, i] = (highest + np.float32(i - recipe.tries) * recipe.distance) / middle
        trials[STEP, i] = np.float32(1) / trials[INVERSE, i]
        trials[SUM_X, i] = trials[SUM_Q, i] = np.float32(0)
    inverse_at, code_at = simd.address(trials), simd.address(codes)
    sum_at = inverse_at + 4 * SUM_X * MOST_TRIALS
    top = simd.splat(recipe.n_levels - 1)
    zero, one, half = simd.splat(0.0), simd.splat(1.0), simd.splat(0.5)
    for k in range(value.shape[0] // dimensions):
        at = k * dimensions
        for t in range(0, 4 * n_trials, 64):
            inverse, bits = simd.load_f32(inverse_at + t), simd.splat_i32(0)
            for i in range(dimensions):
                level = simd.sub(simd.mul(inverse, simd.splat(value[at + i])), one)
                level = simd.rint(simd.mul(half, level))
                level = choose(less(level, top), level, top)
                level = simd.to_i32(choose(less(zero, level), level, zero))
                bits = simd.or_(bits, simd.shl(level, simd.splat_i32(width * i)))
            simd.store_i32(code_at + t, bits)
        for t in range(n_trials):
            bits = codes[t]
            point = lists[first[bits]]
            off[k, t] = grid[point] != bits
            if off[k, t]:
                if dimensions == 8:
                    point = _near_8(value, root, at, trials[STEP, t], bits, near, losses)
                else:
                    point = _near_4(value, root, at, trials[STEP, t], bits, near, losses)
            tried[k, t], codes[t] = point, grid[point]
        for t in range(0, 4 * n_trials, 64):
            bits, to = simd.load_i32(code_at + t), sum_at + t
            qx, qq = simd.load_f32(to), simd.load_f32(to + 4 * MOST_TRIALS)
            for i in range(dimensions):
                level = simd.shr(bits, simd.splat_i32(width * i))
                level = simd.to_f32(simd.and_(level, simd.splat_i32((1 << width) - 1)))
                q, w = simd.add(simd.add(level, level), one), weight[at + i]
                qx = simd.add(qx, simd.mul(simd.splat(w * value[at + i]), q))
                qq = simd.add(qq, simd.mul(simd.mul(simd.splat(w), q), q))
            simd.store_f32(to, qx)
            simd.store_f32(to + 4 * MOST_TRIALS, qq)


@jit.device_function(strict=True)
def _near_4(value, root, at, step, bits, near, losses):
    """Return the point near `bits` with the least loss; see `point_of`."""
    for i in range(4):
        for level in range(8):
            difference = step * np.float32(2 * level + 1) - value[at + i]
            losses[8 * i + level] = root[at + i] * difference * difference
    first, lists, grid = near.first, near.points, near.grid
    best, least = lists[first[bits]], np.float32(3.4028235e38)
    for n in range(first[bits], first[bits + 1]):
        point = np.int64(grid[lists[n]])
        loss = losses[point & 7] + losses[8 + ((point >> 3) & 7)]
        loss = loss + losses[16 + ((point >> 6) & 7)] + losses[24 + (point >> 9)]
        if loss < least:
            best, least = lists[n], loss
    return best


@jit.device_function(strict=True)
def _near_8(value, root, at, step, bits, near, losses):
    """Return the point near `bits` with the least loss; see `point_of`."""
    for i in range(8):
        for level in range(3):
            difference = step * np.float32(2 * level + 1) - value[at + i]
            losses[8 * i + level] = root[at + i] * difference * difference
    first, lists, grid = near.first, near.points, near.grid
    start, stop = first[bits], first[bits + 1]
    if stop - start > FEW_POINTS:
        return _nearest_of_8(first, lists, grid, bits, losses)
    best, least = lists[start], np.float32(3.4028235e38)
    for n in range(start, stop):
        point = np.int64(grid[lists[n]])
        loss = losses[point & 3] + losses[8 + ((point >> 2) & 3)]
        loss = loss + losses[16 + ((point >> 4) & 3)] + losses[24 + ((point >> 6) & 3)]
        loss = loss + losses[32 + ((point >> 8) & 3)] + losses[40 + ((point >> 10) & 3)]
        loss = loss + losses[48 + ((point >> 12) & 3)] + losses[56 + (point >> 14)]
        if loss < least:
            best, least = lists[n], loss
    return best


@jit.device_function(strict=True)
def point_of(value, root, k, inverse, step, first, lists, grid, dimensions, losses):
    """Return the grid point of group `k`, and True if its rounded codes are off the grid.

    `first`, `lists` and `grid` are the fields of `Neighbours`.
    """
    width, n_levels = (2, 3) if dimensions == 8 else (3, 8)
    at, highest = k * dimensions, np.float32(n_levels - 1)
    bits = 0
    for i in range(dimensions):
        level = np.rint(np.float32(0.5) * (inverse * value[at + i] - np.float32(1)))
        bits |= np.int64(max(np.float32(0), min(highest, level))) << (width * i)
    best = lists[first[bits]]
    if grid[best] == bits:
        return best, False
    for i in range(dimensions):
        for level in range(n_levels):
            difference = step * np.float32(2 * level + 1) - value[at + i]
            losses[8 * i + level] = root[at + i] * difference * difference
    if dimensions == 8:
        return _nearest_of_8(first, lists, grid, bits, losses), True
    least = np.float32(3.4028235e38)
    for n in range(first[bits], first[bits + 1]):
        point = np.int64(grid[lists[n]])
        loss = losses[point & 7] + losses[8 + ((point >> 3) & 7)]
        loss = loss + losses[16 + ((point >> 6) & 7)] + losses[24 + (point >> 9)]
        if loss < least:
            best, least = lists[n], loss
    return best, True


@jit.device_function(strict=True)
def _nearest_of_8(first, lists, grid, bits, losses):
    """Return the point near `bits` with the least loss.

    ``losses[8 * i + level]`` is the loss of coordinate `i`; losses are added in order.  Sums of the
    first four, which many points share, go to 64 and beyond.
    """
    for low in range(9):
        pair = losses[low % 3] + losses[8 + low // 3]
        for high in range(9):
            at = low % 3 + 4 * (low // 3) + 16 * (high % 3) + 64 * (high // 3)
            losses[64 + at] = pair + losses[16 + high % 3] + losses[24 + high // 3]
    best, least = lists[first[bits]], np.float32(3.4028235e38)
    for n in range(first[bits], first[bits + 1]):
        point = np.int64(grid[lists[n]])
        loss = losses[64 + (point & 255)] + losses[32 + ((point >> 8) & 3)]
        loss = loss + losses[40 + ((point >> 10) & 3)] + losses[48 + ((point >> 12) & 3)]
        loss = loss + losses[56 + (point >> 14)]
        if loss < least:
            best, least = lists[n], loss
    return best


@jit.device_function(strict=True)
def sums(value, weight, grid, dimensions, points):
    """Return the weighted sums of level * value and level**2, in order."""
    width = 2 if dimensions == 8 else 3
    qx, qq = np.float32(0), np.float32(0)
    for k in range(len(points)):
        point = np.int64(grid[points[k]])
        for i in range(dimensions):
            level = (point >> (width * i)) & ((1 << width) - 1)
            w, q = weight[k * dimensions + i], np.float32(2 * level + 1)
            qx += w * value[k * dimensions + i] * q
            qq += w * q * q
    return qx, qq


@jit.device_function(strict=True)
def scales_of(found, factor, scales):
    """Write the integer scales of a block; return its stored d."""
    d = largest_of(found) / np.float32(31)
    if d == 0:
        return np.uint16(0)
    inverse = np.float32(1) / d
    for s in range(len(found)):
        scale = np.rint(np.float32(0.5) * (inverse * found[s] - np.float32(1)))
        scales[s] = np.int64(max(np.float32(0), min(np.float32(15), scale)))
    return simd.float_to_half(d * factor)


@jit.device_function(strict=True)
def _fitted_scale(value, weight, largest, n, codes):
    """Return the best scale for codes 0..n: trials around largest / n, then coordinate descent.

    Codes are bytes, and a value below -1/2 is 255 in the first trial, as published.
    """
    top = np.float32(n)
    best_inverse, least = np.float32(0), np.float32(0)
    for i in range(-5, 5):  # -5 stands for the middle, which comes first
        shift = np.float32(0) if i == -5 else np.float32(0.1) * np.float32(i)
        inverse = (shift + top) / largest
        step, error = np.float32(1) / inverse, np.float32(0)
        for j in range(len(value)):
            code = np.rint(inverse * value[j])
            code = np.float32(np.uint8(np.int64(code))) if i == -5 else min(top, code)
            difference = value[j] - step * code
            error += weight[j] * difference * difference
        if i == -5 or (i != 0 and error < least):
            best_inverse, least = inverse, error
    qx, qq = np.float32(0), np.float32(0)
    for j in range(len(value)):
        code = min(top, np.rint(best_inverse * value[j]))
        codes[j] = np.int64(code)
        qx += weight[j] * value[j] * code
        qq += weight[j] * code * code
    return _refined(value, weight, codes, top, qx, qq)


@jit.device_function(strict=True)
def _refined(value, weight, codes, top, qx, qq):
    """Return the scale after changing one code at a time while the fit gains."""
    for _ in range(5):
        changed = False
        for j in range(len(value)):
            w, code = weight[j], np.float32(codes[j])
            rest_x, rest_q = qx - w * value[j] * code, qq - w * code * code
            if rest_x > 0 and rest_q > 0:
                new = min(top, np.rint(value[j] * rest_q / rest_x))
                if new != code:
                    rest_x += w * value[j] * new
                    rest_q += w * new * new
                    if rest_x * rest_x * qq > qx * qx * rest_q:
                        codes[j] = np.int64(new)
                        qx, qq, changed = rest_x, rest_q, True
        if not changed:
            break
    return qx / qq if qq > 0 else np.float32(0)

"""GGML's iq1 quantizers, bit for bit: the best three-way split of a sub-block's weights.

The error weight of x with importance q is q * sqrt(x**2 + 2 * mean of x**2 over the block); without
importance, which only iq1_m allows, x**2.  The weights of a sub-block are sorted; all splits into
-1, 0 and 1 are tried with both shifts (iq1_m: of either group of 8), and the least squares scale
gives the gain.  Groups off the grid move to the best of their neighbours, and the scale is fitted
again.  The scales of a block are divided by 1/15 of the largest
one and rounded to odd numbers; 1.125 times that (iq1_m: 1.1125 times the d of least squares) is
stored.  Equal weights stay in order when sorted.

Source: GGML, ggml-quants.c (quantize_row_iq1_s_impl, quantize_row_iq1_m_impl).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_compare
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.ggml.iq_grids import OnGrid
from nbflow_kernels.formats.registry import Floats
from nbflow_kernels.quantizers.grid_neighbours import neighbours
from nbflow_kernels.quantizers.reference.codebook import no_importance
from nbflow_kernels.quantizers.reference.ggml_iq2_iq3 import (
    empty,
    error_weights,
    largest_of,
    mean_square,
)

COST = 1500.0  # operations per weight, for the choice of thread count
NOTHING = {32: np.float32(1e-12), 16: np.float32(1e-7)}  # smaller weights count as zero
FACTOR = {32: np.float32(1.125), 16: np.float32(1.1125)}  # empirical, as published
RAMP = np.arange(16, dtype=np.float32)
# levels by shift: 1/8, -1/8
SHIFTED = np.array([[-0.875, 0.125, 1.125], [-1.125, -0.125, 0.875]], np.float32)


def quantize(sub_block: int, x: Floats, importance: Floats | None) -> OnGrid:
    """Return rows (rows, K) of weights on the grid; `signs` are the shifts, (rows, K / 8)."""
    near = neighbours("iq1")
    out = empty(x, 8, sub_block)
    weight = no_importance() if importance is None else importance
    parallel_for(
        _quantize, len(x), COST * x.size, x, weight, SHIFTED, NOTHING[sub_block], FACTOR[sub_block],
        near.first, near.points, near.grid, *out,
    )  # fmt: skip
    return out


@jit.kernel(strict=True)
def _quantize(
    x, importance, shifted, nothing, factor, first, near, grid, points, shifts, scales, d, start,
    stop
):  # fmt: skip
    """Quantize rows [start, stop)."""
    sub = x.shape[1] // scales.shape[1]
    n_subs, groups = 256 // sub, sub // 8
    weight = np.empty((n_subs, sub), np.float32)
    found = np.empty(n_subs, np.float32)
    for row in range(start, stop):
        q = importance[min(row, len(importance) - 1)] if len(importance) else importance.reshape(-1)
        for b in range(d.shape[1]):
            mean = np.float32(2) * mean_square(x[row, 256 * b : 256 * b + 256])
            for s in range(n_subs):
                at = 256 * b + s * sub
                values = x[row, at : at + sub]
                error_weights(x[row], q, at, mean, np.float32(0), weight[s])
                found[s] = np.float32(0)
                if largest_of(values) >= nothing:
                    found[s] = _sub_block(
                        values, weight[s], shifted, first, near, grid,
                        points[row, at // 8 : at // 8 + groups],
                        shifts[row, at // 8 : at // 8 + groups],
                    )  # fmt: skip
            d[row, b] = scales_of(
                x[row, 256 * b : 256 * b + 256], weight.reshape(-1), found, factor, shifted, grid,
                points[row, 32 * b : 32 * b + 32], shifts[row, 32 * b : 32 * b + 32],
                scales[row, n_subs * b : n_subs * b + n_subs],
            )  # fmt: skip


@jit.device_function(strict=True)
def _sub_block(x, weight, shifted, first, near, grid, points, shifts):
    """Choose the points and shifts of a sub-block; return its scale."""
    order = np.empty(len(x), np.int32)
    sort(x, order)
    if len(x) == 32:
        low, high, shift, scale = _split_32(x, weight, order, shifted)
    else:
        low, high, shift, scale = _split_16(x, weight, order, shifted)
    if low < 0:
        return np.float32(0)
    codes = np.empty(len(x), np.int64)
    for j in range(len(x)):
        code = (j >= low) + (j >= high)
        codes[order[j]] = code if scale >= 0 else 2 - code
    if scale < 0:
        scale, shift = -scale, 3 - shift
    all_on_grid = True
    for k in range(len(points)):
        shifts[k] = (shift >> (1 - k)) & 1 if len(x) == 16 else shift & 1
        points[k], on_grid = point_of(
            x, weight, codes, k, scale, shifted[shifts[k]], first, near, grid
        )
        all_on_grid &= on_grid
    if not all_on_grid:
        qx, qq = sums(x, weight, shifted, grid, points, shifts)
        if qx > 0 and qq > 0:
            scale = qx / qq
    return scale


@jit.device_function(strict=True)
def sort(x, order):
    """Write the indices of 16 or 32 numbers in ascending order; equal numbers stay in order.

    The place of a number is the count of those before it: a sort would mispredict its branches.
    """
    places = np.empty(len(x), np.int32)
    one, lanes = simd.splat_i32(1), simd.load_f32(simd.address(RAMP))
    for at in range(0, len(x), 16):
        v, place = simd.load_f32(simd.address(x) + 4 * at), simd.splat_i32(0)
        for k in range(len(x)):
            other = simd.splat(x[k])
            below, above = simd_compare.less(other, v), simd_compare.less(v, other)
            is_earlier = simd_compare.less(simd.splat(np.float32(k - at)), lanes)
            before = simd_compare.choose(is_earlier, simd.sub(above, simd.splat_i32(-1)), below)
            place = simd.add(place, simd.and_(before, one))
        simd.store_i32(simd.address(places) + 4 * at, place)
    for j in range(len(x)):
        order[places[j]] = j


@jit.device_function(strict=True)
def _split_32(x, weight, order, shifted):
    """Return the best split (low, high), shift (0 or 3) and scale; low is -1 if none fits."""
    n = len(x)
    sum_x, sum_w = np.empty(n + 1, np.float32), np.empty(n + 1, np.float32)
    add_up_32(x, weight, order, sum_x, sum_w)
    best, found = np.float32(-3.4028235e38), (-1, -1, 0, np.float32(0))
    for low in range(n + 1):
        for high in range(low, n + 1):
            for shift in range(2):
                qx, qq = gain_32(sum_x, sum_w, low, high, shifted[shift])
                if qq > 0 and qx * qx > best * qq:
                    scale = qx / qq
                    best, found = scale * qx, (low, high, 3 * shift, scale)
    return found


@jit.device_function(strict=True)
def add_up_32(x, weight, order, sum_x, sum_w):
    """Write prefix sums of the sorted weights times error weights, and of error weights."""
    sum_x[0] = sum_w[0] = np.float32(0)
    for j in range(len(x)):
        sum_x[j + 1] = sum_x[j] + weight[order[j]] * x[order[j]]
        sum_w[j + 1] = sum_w[j] + weight[order[j]]


@jit.device_function(strict=True)
def gain_32(sum_x, sum_w, low, high, values):
    """Return the sums of level * x and level**2 of a split."""
    v0, v1, v2 = values[0], values[1], values[2]
    last = len(sum_x) - 1
    qx = sum_x[low] * v0 + (sum_x[high] - sum_x[low]) * v1
    qx += (sum_x[last] - sum_x[high]) * v2
    qq = sum_w[low] * v0 * v0 + (sum_w[high] - sum_w[low]) * v1 * v1
    qq += (sum_w[last] - sum_w[high]) * v2 * v2
    return qx, qq


@jit.device_function(strict=True)
def _split_16(x, weight, order, shifted):
    """Return the best split (low, high), shifts and scale; low is -1 if none fits.

    The shifts are two bits, that of the second group of 8 the lower.  The gains of all `high` of a
    `low` are computed at once, and looked through where one is better.
    """
    sum_x, sum_w = np.empty((2, 17), np.float32), np.empty((2, 17), np.float32)
    add_up_16(x, weight, order, sum_x, sum_w)
    top_x, terms = np.empty((2, 2), np.float32), np.empty((2, 2, 2, 17), np.float32)
    for half in range(2):
        for shift in range(2):
            v0, v1, top = shifted[shift, 0], shifted[shift, 1], shifted[shift, 2]
            top_x[half, shift] = sum_x[half, 16] * top
            top_q = sum_w[half, 16] * top * top
            of_low, of_high = v0 * v0 - v1 * v1, v1 * v1 - top * top  # exact
            for j in range(17):
                terms[half, shift, 0, j] = top_q + sum_w[half, j] * of_low
                terms[half, shift, 1, j] = sum_w[half, j] * of_high
    best, found = np.float32(-3.4028235e38), (-1, -1, 0, np.float32(0))
    gains = np.empty((2, 4, 16), np.float32)
    for low in range(17):
        first = low if low < 16 and _gains_of(low, best, sum_x, top_x, terms, gains) else 16
        for high in range(first, 17):
            for shift in range(4):
                if high < 16:
                    qx, qq = gains[0, shift, high], gains[1, shift, high]
                else:
                    s0, s1 = shift >> 1, shift & 1
                    qx = top_x[0, s0] - (sum_x[0, low] + sum_x[0, 16])
                    qx += top_x[1, s1] - (sum_x[1, low] + sum_x[1, 16])
                    qq = terms[0, s0, 0, low] + terms[0, s0, 1, 16]
                    qq += terms[1, s1, 0, low] + terms[1, s1, 1, 16]
                if qq > 0 and qx * qx > best * qq:
                    scale = qx / qq
                    best, found = scale * qx, (low, high, shift, scale)
    return found


@jit.device_function(strict=True)
def _gains_of(low, best, sum_x, top_x, terms, gains):
    """Write the gains of all splits with a `low` and ``high < 16``; return whether one is better.

    `gains` are the sums of level * x and of level**2 by shift and `high`.
    """
    x0 = simd.add(simd.splat(sum_x[0, low]), simd.load_f32(simd.address(sum_x)))
    x1 = simd.add(simd.splat(sum_x[1, low]), simd.load_f32(simd.address(sum_x) + 68))
    lanes = simd.load_f32(simd.address(RAMP))
    is_split = simd_compare.less(simd.splat(np.float32(low) - np.float32(0.5)), lanes)
    better, bound, place = simd.splat_i32(0), simd.splat(best), simd.address(terms)
    for shift in range(4):
        s0, s1 = shift >> 1, shift & 1
        qx = simd.sub(simd.splat(top_x[0, s0]), x0)
        qx = simd.add(qx, simd.sub(simd.splat(top_x[1, s1]), x1))
        q0 = simd.load_f32(place + 68 * (2 * s0 + 1))
        q1 = simd.load_f32(place + 68 * (4 + 2 * s1 + 1))
        qq = simd.add(
            simd.add(simd.splat(terms[0, s0, 0, low]), q0),
            simd.add(simd.splat(terms[1, s1, 0, low]), q1),
        )
        simd.store_f32(simd.address(gains) + 64 * shift, qx)
        simd.store_f32(simd.address(gains) + 256 + 64 * shift, qq)
        is_better = simd_compare.less(simd.mul(bound, qq), simd.mul(qx, qx))
        is_positive = simd_compare.less(simd.splat(np.float32(0)), qq)
        better = simd.or_(better, simd.and_(is_better, is_positive))
    return simd_compare.any_lane(simd.and_(better, is_split))


@jit.device_function(strict=True)
def add_up_16(x, weight, order, sum_x, sum_w):
    """Write the prefix sums of `add_up_32` for each group of 8."""
    for half in range(2):
        sum_x[half, 0] = sum_w[half, 0] = np.float32(0)
    for j in range(16):
        i = order[j]
        for half in range(2):
            sum_x[half, j + 1], sum_w[half, j + 1] = sum_x[half, j], sum_w[half, j]
        sum_x[i >> 3, j + 1] += weight[i] * x[i]
        sum_w[i >> 3, j + 1] += weight[i]


@jit.device_function(strict=True)
def point_of(x, weight, codes, k, scale, values, first, near, grid):
    """Return the grid point of group `k`, and True if its codes are on the grid."""
    bits = 0
    for i in range(8):
        bits |= codes[8 * k + i] << (2 * i)
    best, least = near[first[bits]], np.float32(3.4028235e38)
    if grid[best] == bits:
        return best, True
    codes_of, errors = np.empty(16, np.int32), np.empty(16, np.float32)
    for at in range(first[bits], first[bits + 1], 16):
        n = min(16, first[bits + 1] - at)
        for j in range(n):
            codes_of[j] = grid[near[at + j]]
        _errors_of(x, weight, 8 * k, scale, values[0], codes_of, errors)
        for j in range(n):
            if errors[j] < least:
                best, least = near[at + j], errors[j]
    return best, False


@jit.device_function(strict=True)
def _errors_of(x, weight, at, scale, lowest, grid_codes, errors):
    """Write the weighted errors of 8 weights on 16 grid points; levels are 1 apart, exactly."""
    points = simd.load_i32(simd.address(grid_codes))
    error, scales, level_0 = simd.splat(np.float32(0)), simd.splat(scale), simd.splat(lowest)
    for i in range(8):
        code = simd.and_(simd.shr(points, simd.splat_i32(2 * i)), simd.splat_i32(3))
        level = simd.add(simd.to_f32(code), level_0)
        difference = simd.sub(simd.mul(scales, level), simd.splat(x[at + i]))
        weighted = simd.mul(simd.splat(weight[at + i]), difference)
        error = simd.add(error, simd.mul(weighted, difference))
    simd.store_f32(simd.address(errors), error)


@jit.device_function(strict=True)
def sums(x, weight, shifted, grid, points, shifts):
    """Return the weighted sums of level * x and level**2, in order."""
    qx, qq = np.float32(0), np.float32(0)
    for k in range(len(points)):
        for i in range(8):
            w = weight[8 * k + i]
            q = shifted[shifts[k], (np.int64(grid[points[k]]) >> (2 * i)) & 3]
            qx += w * q * x[8 * k + i]
            qq += w * q * q
    return qx, qq


@jit.device_function(strict=True)
def scales_of(x, weight, found, factor, shifted, grid, points, shifts, scales):
    """Write the integer scales of a block; return its stored d."""
    d = largest_of(found) / np.float32(15)
    if d == 0:
        return np.uint16(0)
    inverse = np.float32(1) / d
    qx, qq = np.float32(0), np.float32(0)
    for s in range(len(found)):
        scale = np.rint(np.float32(0.5) * (inverse * found[s] - np.float32(1)))
        scales[s] = np.int64(max(np.float32(0), min(np.float32(7), scale)))
        if len(found) == 16:
            odd = np.float32(2 * np.int64(scales[s]) + 1)
            for k in range(2 * s, 2 * s + 2):
                for i in range(8):
                    w = weight[8 * k + i]
                    q = shifted[shifts[k], (np.int64(grid[points[k]]) >> (2 * i)) & 3] * odd
                    qx += w * q * x[8 * k + i]
                    qq += w * q * q
    if qq > 0:
        d = qx / qq
    return simd.float_to_half(d * factor)

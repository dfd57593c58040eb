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

from nbflow_kernels.cpu import jit, simd
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
    order = np.empty(len(x), np.int64)
    for j in range(len(x)):  # insertion sort: equal weights stay in order
        k = j
        while k > 0 and x[order[k - 1]] > x[j]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = j
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

    The shifts are two bits, that of the second group of 8 the lower.
    """
    sum_x, sum_w = np.empty((2, 17), np.float32), np.empty((2, 17), np.float32)
    add_up_16(x, weight, order, sum_x, sum_w)
    best, found = np.float32(-3.4028235e38), (-1, -1, 0, np.float32(0))
    qx, qq = np.empty((2, 2), np.float32), np.empty((2, 2), np.float32)  # half, shift
    for low in range(17):
        for high in range(low, 17):
            for half in range(2):
                for shift in range(2):
                    qx[half, shift], qq[half, shift] = half_gain_16(
                        sum_x[half], sum_w[half], low, high, shifted[shift]
                    )
            for shift in range(4):
                this_x = qx[0, shift >> 1] + qx[1, shift & 1]
                this_q = qq[0, shift >> 1] + qq[1, shift & 1]
                if this_q > 0 and this_x * this_x > best * this_q:
                    scale = this_x / this_q
                    best, found = scale * this_x, (low, high, shift, scale)
    return found


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
def half_gain_16(sum_x, sum_w, low, high, values):
    """Return the sums of level * x and level**2 of a split, of one group of 8."""
    v0, v1, top = values[0], values[1], values[2]
    qx = sum_x[16] * top - (sum_x[low] + sum_x[high])
    qq = sum_w[16] * top * top
    qq += sum_w[low] * (v0 * v0 - v1 * v1)  # the differences of squares are exact
    qq += sum_w[high] * (v1 * v1 - top * top)
    return qx, qq


@jit.device_function(strict=True)
def point_of(x, weight, codes, k, scale, values, first, near, grid):
    """Return the grid point of group `k`, and True if its codes are on the grid."""
    bits = 0
    for i in range(8):
        bits |= codes[8 * k + i] << (2 * i)
    best, least = near[first[bits]], np.float32(3.4028235e38)
    if grid[best] == bits:
        return best, True
    for n in range(first[bits], first[bits + 1]):
        error = np.float32(0)
        for i in range(8):
            level = values[(np.int64(grid[near[n]]) >> (2 * i)) & 3]
            difference = scale * level - x[8 * k + i]
            error += weight[8 * k + i] * difference * difference
        if error < least:
            best, least = near[n], error
    return best, False


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

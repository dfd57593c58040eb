"""Search for grid formats (quantizer "search"); see `two_level_scales`.

A group of weights takes the best of the grid points near its magnitudes.  Where only 7 of 8 signs
are stored and the parity is wrong, the weight with the least loss changes its sign.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.ggml.iq_grids import OnGrid
from nbflow_kernels.formats.registry import Floats
from nbflow_kernels.quantizers.grid_neighbours import neighbours
from nbflow_kernels.quantizers.reference.ggml_iq1 import SHIFTED
from nbflow_kernels.quantizers.reference.ggml_iq2_iq3 import RECIPES
from nbflow_kernels.quantizers.search.two_level_scales import (
    SearchResult,
    empty_result,
    rule,
    search_rows,
)

COST, COST_IQ1 = 3000.0, 5000.0  # operations per weight, for the choice of thread count

FEW_POINTS = 24  # lists of more neighbours are faster with sums of four losses in a table

# trial scales, relative to the one that puts the highest level at the largest weight
REACH = {3: (0.78, 0.9, 1.02, 1.15, 1.28, 1.42), 8: (0.85, 0.92, 1, 1.08, 1.16, 1.25)}
REACH_IQ1 = (0.4, 0.5, 0.6, 0.75)


def search(name: str, magnitudes: tuple[float, ...], x: Floats, weight: Floats) -> OnGrid:
    """Return rows (rows, K) of weights on the grid of the iq2 or iq3 format `name`.

    `magnitudes` are those of the decoder times its factor; `weight` (1 or rows, K) weighs the
    squared error of each weight.
    """
    recipe, near = RECIPES[name], neighbours(name)
    levels = np.array(magnitudes, np.float32)
    starts = np.array(REACH[len(levels)]) / levels[-1]
    search_rule = rule(starts, scales=(2, 1, 0, 15), tops=(31, 29, 27))
    n_points = recipe.sub_block // near.dimensions
    out = empty_result(x, 256, recipe.sub_block, n_points + recipe.sub_block // 8)
    tables = (
        levels, (levels[1:] + levels[:-1]) / 2, near.first, near.points, near.grid,
        near.dimensions, int(recipe.seven_signs),
    )  # fmt: skip
    parallel_for(_search, len(x), COST * x.size, x, weight, tables, search_rule, *out)
    return _on_grid(out, n_points)


def _on_grid(found: SearchResult, n_points: int) -> OnGrid:
    """Return a search result as rows on the grid."""
    n_rows = len(found.d)
    points, signs = found.chosen[:, :, :n_points], found.chosen[:, :, n_points:]
    return OnGrid(
        np.ascontiguousarray(points, np.uint16).reshape(n_rows, -1),
        signs.astype(np.uint8).reshape(n_rows, -1),
        found.scales.astype(np.uint8),
        found.d,
    )


@jit.kernel
def _search(x, weight, tables, rule, chosen, scales, d, start, stop):
    search_rows(_evaluate, x, weight, tables, rule, chosen, scales, d, start, stop)


@jit.device_function
def _evaluate(value, weight, step, tables, out, scratch):
    """Choose points and signs of a sub-block; see `two_level_scales.search_rows`."""
    levels, middles, first, near, grid, dimensions, seven_signs = tables
    n_points, width = len(value) // dimensions, 16 // dimensions - (dimensions == 4)
    inverse = np.float32(1) / step if step > 0 else np.float32(0)
    error, qx, qq = np.float32(0), np.float32(0), np.float32(0)
    for group in range(len(value) // 8):
        mask = _signs(value, weight, 8 * group, step, inverse, levels, middles, seven_signs)
        out[n_points + group] = mask
        for k in range(8 * group // dimensions, 8 * (group + 1) // dimensions):
            at = k * dimensions
            shift = mask >> (at & 7)
            bits = 0
            for i in range(dimensions):
                v = -value[at + i] if (shift >> i) & 1 else value[at + i]
                bits |= _level(v * inverse, middles) << (width * i)
            if first[bits + 1] > first[bits] + 1:
                for i in range(dimensions):
                    v = -value[at + i] if (shift >> i) & 1 else value[at + i]
                    for level in range(len(levels)):
                        difference = step * levels[level] - v
                        scratch[8 * i + level] = weight[at + i] * difference * difference
                if dimensions == 8:
                    out[k] = _best_of_8(first, near, grid, bits, scratch)[0]
                else:
                    out[k] = _best_of_4(first, near, grid, bits, scratch)
            else:
                out[k] = near[first[bits]]
            bits = grid[out[k]]
            for i in range(dimensions):
                q = levels[(bits >> (width * i)) & ((1 << width) - 1)]
                v = -value[at + i] if (shift >> i) & 1 else value[at + i]
                difference = step * q - v
                error += weight[at + i] * difference * difference
                qx += weight[at + i] * q * v
                qq += weight[at + i] * q * q
    return error, qx, qq


@jit.device_function
def _best_of_8(first, near, grid, bits, losses):
    """Return the point near `bits` with the least loss, and the loss.

    ``losses[8 * i + level]`` is the loss of coordinate `i`; the sums of four go to 64 and beyond.
    """
    if first[bits + 1] - first[bits] <= FEW_POINTS:
        return _best_of_few(first, near, grid, bits, losses)
    for half in range(2):
        for low in range(9):  # the two lower coordinates of four
            a, b = 32 * half + low % 3, 32 * half + 8 + low // 3
            pair = losses[a] + losses[b]
            at = 64 + 256 * half + low % 3 + 4 * (low // 3)
            for high in range(9):
                c, d = 32 * half + 16 + high % 3, 32 * half + 24 + high // 3
                losses[at + 16 * (high % 3) + 64 * (high // 3)] = pair + losses[c] + losses[d]
    best, least = near[first[bits]], np.float32(np.inf)
    for n in range(first[bits], first[bits + 1]):
        point = np.int64(grid[near[n]])
        loss = losses[64 + (point & 255)] + losses[320 + (point >> 8)]
        if loss < least:
            best, least = near[n], loss
    return best, least


@jit.device_function
def _best_of_few(first, near, grid, bits, losses):
    """Return what `_best_of_8` returns, without sums that many points would share."""
    best, least = near[first[bits]], np.float32(np.inf)
    for n in range(first[bits], first[bits + 1]):
        point = np.int64(grid[near[n]])
        loss = losses[point & 3] + losses[8 + ((point >> 2) & 3)]
        loss = loss + losses[16 + ((point >> 4) & 3)] + losses[24 + ((point >> 6) & 3)]
        other = losses[32 + ((point >> 8) & 3)] + losses[40 + ((point >> 10) & 3)]
        other = other + losses[48 + ((point >> 12) & 3)] + losses[56 + (point >> 14)]
        loss += other
        if loss < least:
            best, least = near[n], loss
    return best, least


@jit.device_function
def _best_of_4(first, near, grid, bits, losses):
    """Return the point near `bits` with the least loss; see `_best_of_8`."""
    best, least = near[first[bits]], np.float32(np.inf)
    for n in range(first[bits], first[bits + 1]):
        point = np.int64(grid[near[n]])
        loss = losses[point & 7] + losses[8 + ((point >> 3) & 7)]
        loss += losses[16 + ((point >> 6) & 7)] + losses[24 + (point >> 9)]
        if loss < least:
            best, least = near[n], loss
    return best


@jit.device_function
def _signs(value, weight, at, step, inverse, levels, middles, seven_signs):
    """Return the sign bits of 8 weights; with `seven_signs`, one may flip to make parity even."""
    mask, odd = 0, 0
    for i in range(8):
        negative = value[at + i] < 0
        mask |= negative << i
        odd ^= negative
    if seven_signs and odd:
        least, where = np.float32(np.inf), 0
        for i in range(8):
            v = abs(value[at + i])
            right = step * levels[_level(v * inverse, middles)] - v
            wrong = step * levels[0] + v
            loss = weight[at + i] * (wrong * wrong - right * right)
            if loss < least:
                least, where = loss, i
        mask ^= 1 << where
    return mask


@jit.device_function
def _level(v, middles):
    """Return the level nearest to a magnitude."""
    level = 0
    for m in range(len(middles)):
        level += v >= middles[m]
    return level


# ---- iq1 ----------------------------------------------------------------------------------------


def search_iq1(sub_block: int, x: Floats, weight: Floats) -> OnGrid:
    """Return rows of weights on the grid as `search`; `signs` are the shifts."""
    search_rule = rule(REACH_IQ1, scales=(2, 1, 0, 7), tops=(15, 13))
    near = neighbours("iq1")
    out = empty_result(x, 256, sub_block, 2 * (sub_block // 8))
    tables = SHIFTED, near.first, near.points, near.grid, int(sub_block == 32)
    parallel_for(_search_iq1, len(x), COST_IQ1 * x.size, x, weight, tables, search_rule, *out)
    return _on_grid(out, sub_block // 8)


@jit.kernel
def _search_iq1(x, weight, tables, rule, chosen, scales, d, start, stop):
    search_rows(_evaluate_iq1, x, weight, tables, rule, chosen, scales, d, start, stop)


@jit.device_function
def _evaluate_iq1(value, weight, step, tables, out, scratch):
    """Choose points and shifts of a sub-block; see `two_level_scales.search_rows`."""
    levels, first, near, grid, one_shift = tables
    groups = len(value) // 8
    totals, other = np.float32(0), np.float32(0)
    for k in range(groups):
        point, error = _point_iq1(value, weight, 8 * k, step, levels[0], first, near, grid, scratch)
        point_1, error_1 = _point_iq1(
            value, weight, 8 * k, step, levels[1], first, near, grid, scratch
        )
        out[k], out[groups + k] = point, 0
        if not one_shift and error_1 < error:
            out[k], out[groups + k] = point_1, 1
        out[2 * groups + k] = point_1
        totals += error
        other += error_1
    if one_shift and other < totals:
        for k in range(groups):
            out[k], out[groups + k] = out[2 * groups + k], 1
    error, qx, qq = np.float32(0), np.float32(0), np.float32(0)
    for k in range(groups):
        bits = np.int64(grid[out[k]])
        for i in range(8):
            q, w = levels[out[groups + k], (bits >> (2 * i)) & 3], weight[8 * k + i]
            v = value[8 * k + i]
            difference = step * q - v
            error += w * difference * difference
            qx += w * q * v
            qq += w * q * q
    return error, qx, qq


@jit.device_function
def _point_iq1(value, weight, at, step, levels, first, near, grid, losses):
    """Return the best grid point of the 8 weights from `at` on for the levels, and its error."""
    bits = 0
    for i in range(8):
        nearest = 0
        for level in range(3):
            difference = step * levels[level] - value[at + i]
            losses[8 * i + level] = weight[at + i] * difference * difference
            if losses[8 * i + level] < losses[8 * i + nearest]:
                nearest = level
        bits |= nearest << (2 * i)
    return _best_of_8(first, near, grid, bits, losses)

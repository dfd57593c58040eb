"""The encoder "best" of the formats on grids; see `block_search`.

A group of weights takes, of the grid points near its magnitudes, the one that loses least.  Where
only 7 of 8 signs are stored, the weight changes its sign that loses least by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels._jit import njit
from nbflow_kernels.quants.block_search import Searched, rows_searched, rule, search_rows
from nbflow_kernels.quants.formats import Bytes, Floats
from nbflow_kernels.quants.grid_plain import RECIPES, OnGrid
from nbflow_kernels.quants.integer_format import Encoder, weights
from nbflow_kernels.quants.neighbours import neighbours
from nbflow_kernels.threads import split_rows

COST, COST_IQ1 = 3000.0, 5000.0  # operations a weight costs, for the choice of thread count

# scales to try first, times the one that puts the highest level at the largest weight
REACH = {3: (0.85, 0.95, 1.05, 1.2, 1.4, 1.7), 8: (0.85, 0.92, 1, 1.08, 1.16, 1.25)}
REACH_IQ1 = (0.55, 0.75, 0.95, 1.2)


def best_encoder(
    name: str, magnitudes: tuple[float, ...], blocks: Callable[[OnGrid], Bytes]
) -> Encoder:
    """Return the encoder of an iq2 or iq3 format.

    `magnitudes` are those of the decoder times its factor; `blocks` makes rows of bytes of rows on
    the grid.
    """
    recipe = RECIPES[name]
    levels = np.array(magnitudes, np.float32)
    starts = np.array(REACH[len(levels)]) / levels[-1]
    search_rule = rule(starts, scales=(2, 1, 0, 15), tops=(31, 29, 27))

    def encode(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
        near = neighbours(name)
        n_points = recipe.sub_block // near.levels.shape[1]
        out = rows_searched(x, 256, recipe.sub_block, n_points + recipe.sub_block // 8)
        middles = (levels[1:] + levels[:-1]) / 2
        of_points = levels[(near.levels.astype(np.int64) - 1) // 2]
        tables = levels, middles, near.first, near.points, of_points, int(recipe.seven_signs)
        weight = weights(importance, counts)
        split_rows(_search, len(x), COST * x.size, x, weight, tables, search_rule, *out)
        return blocks(_on_grid(out, n_points))

    return encode


def _on_grid(found: Searched, n_points: int) -> OnGrid:
    """Return what was found as rows on the grid."""
    n_rows = len(found.d)
    points, signs = found.chosen[:, :, :n_points], found.chosen[:, :, n_points:]
    return OnGrid(
        np.ascontiguousarray(points).reshape(n_rows, -1),
        signs.astype(np.uint8).reshape(n_rows, -1),
        found.scales.astype(np.uint8),
        found.d,
    )


@njit
def _search(
    x: Any, weight: Any, tables: Any, how: Any, chosen: Any, scales: Any, d: Any, start: Any,
    stop: Any,
) -> None:  # fmt: skip
    search_rows(_evaluate, x, weight, tables, how, chosen, scales, d, start, stop)


@njit
def _evaluate(value: Any, weight: Any, step: Any, tables: Any, out: Any) -> Any:
    """Choose points and signs of a sub-block; see `block_search.search_rows`."""
    levels, middles, first, near, of_points, seven_signs = tables
    dimensions = of_points.shape[1]
    n_points = len(value) // dimensions
    inverse = np.float32(1) / step if step > 0 else np.float32(0)
    error, qx, qq = np.float32(0), np.float32(0), np.float32(0)
    for group in range(len(value) // 8):
        mask = _signs(value, weight, 8 * group, step, inverse, levels, middles, seven_signs)
        out[n_points + group] = mask
        for k in range(8 * group // dimensions, 8 * (group + 1) // dimensions):
            at = k * dimensions
            shift = mask >> (at & 7)
            out[k] = _point(
                value, weight, at, shift, step, inverse, middles, first, near, of_points
            )
            for i in range(dimensions):
                q = of_points[out[k], i]
                v = -value[at + i] if (shift >> i) & 1 else value[at + i]
                difference = step * q - v
                error += weight[at + i] * difference * difference
                qx += weight[at + i] * q * v
                qq += weight[at + i] * q * q
    return error, qx, qq


@njit
def _signs(
    value: Any, weight: Any, at: Any, step: Any, inverse: Any, levels: Any, middles: Any,
    seven_signs: Any,
) -> Any:  # fmt: skip
    """Return the sign bits of 8 weights; if need be, one is wrong so that their number is even."""
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


@njit
def _level(v: Any, middles: Any) -> Any:
    """Return the level nearest to a magnitude."""
    level = 0
    for m in range(len(middles)):
        level += v >= middles[m]
    return level


@njit
def _point(
    value: Any, weight: Any, at: Any, signs: Any, step: Any, inverse: Any, middles: Any,
    first: Any, near: Any, of_points: Any,
) -> Any:  # fmt: skip
    """Return the best grid point of the weights from `at` on."""
    dimensions = of_points.shape[1]
    width, bits = 2 if dimensions == 8 else 3, 0
    for i in range(dimensions):
        v = -value[at + i] if (signs >> i) & 1 else value[at + i]
        bits |= _level(v * inverse, middles) << (width * i)
    best, least = near[first[bits]], np.float32(np.inf)
    if first[bits + 1] == first[bits] + 1:
        return best
    for n in range(first[bits], first[bits + 1]):
        error = np.float32(0)
        for i in range(dimensions):
            v = -value[at + i] if (signs >> i) & 1 else value[at + i]
            difference = step * of_points[near[n], i] - v
            error += weight[at + i] * difference * difference
        if error < least:
            best, least = near[n], error
    return best


# ---- iq1 ----------------------------------------------------------------------------------------


def best_encoder_iq1(sub_block: int, blocks: Callable[[OnGrid], Bytes]) -> Encoder:
    """Return the encoder of an iq1 format; `blocks` makes rows of bytes of rows on the grid."""
    search_rule = rule(REACH_IQ1, scales=(2, 1, 0, 7), tops=(15, 13))
    shifts = np.array([[0.125], [-0.125]], np.float32)

    def encode(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
        near = neighbours("iq1")
        n_groups = sub_block // 8
        out = rows_searched(x, 256, sub_block, 2 * n_groups)
        coordinates = (near.levels - 3) / 2  # -1, 0, 1
        of_points = coordinates + shifts[:, :, None]
        tables = shifts[:, 0], near.first, near.points, of_points, int(sub_block == 32)
        weight = weights(importance, counts)
        split_rows(_search_iq1, len(x), COST_IQ1 * x.size, x, weight, tables, search_rule, *out)
        return blocks(_on_grid(out, n_groups))

    return encode


@njit
def _search_iq1(
    x: Any, weight: Any, tables: Any, how: Any, chosen: Any, scales: Any, d: Any, start: Any,
    stop: Any,
) -> None:  # fmt: skip
    search_rows(_evaluate_iq1, x, weight, tables, how, chosen, scales, d, start, stop)


@njit
def _evaluate_iq1(value: Any, weight: Any, step: Any, tables: Any, out: Any) -> Any:
    """Choose points and shifts of a sub-block; see `block_search.search_rows`."""
    shifts, first, near, of_points, one_shift = tables
    groups = len(value) // 8
    inverse = np.float32(1) / step if step > 0 else np.float32(0)
    totals, other = np.float32(0), np.float32(0)
    for k in range(groups):
        point, error = _point_iq1(
            value, weight, 8 * k, step, inverse, shifts[0], first, near, of_points[0]
        )
        point_1, error_1 = _point_iq1(
            value, weight, 8 * k, step, inverse, shifts[1], first, near, of_points[1]
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
        for i in range(8):
            q, v, w = of_points[out[groups + k], out[k], i], value[8 * k + i], weight[8 * k + i]
            difference = step * q - v
            error += w * difference * difference
            qx += w * q * v
            qq += w * q * q
    return error, qx, qq


@njit
def _point_iq1(
    value: Any, weight: Any, at: Any, step: Any, inverse: Any, shift: Any, first: Any, near: Any,
    of_points: Any,
) -> Any:  # fmt: skip
    """Return the best grid point of the 8 weights from `at` on for a shift, and its error."""
    bits = 0
    for i in range(8):
        v = value[at + i] * inverse - shift
        bits |= (1 + (v >= np.float32(0.5)) - (v <= np.float32(-0.5))) << (2 * i)
    best, least = near[first[bits]], np.float32(np.inf)
    for n in range(first[bits], first[bits + 1]):
        error = np.float32(0)
        for i in range(8):
            difference = step * of_points[near[n], i] - value[at + i]
            error += weight[at + i] * difference * difference
        if error < least:
            best, least = near[n], error
    return best, least

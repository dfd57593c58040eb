"""Search for formats with a table of levels and one scale per block, without integer scales.

The search of `two_level_scales`, for 16 blocks at a time, one per SIMD lane
(`quantizers.simd_panel`).  Sums run over the weights of a block in order.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.llvm import LANES
from nbflow_kernels.cpu.simd_compare import absolute, choose, differs, less, where_ge
from nbflow_kernels.quantizers import simd_panel
from nbflow_kernels.quantizers.search.two_level_scales import nearest_stored, stored_number
from nbflow_kernels.quantizers.simd_panel import VECTOR

# vectors behind the two panels of the scratch memory, of weights and error weights
IDEAL, NORM, NUMBER, SUM_X, SUM_Q, LEAST, N_VECTORS = range(7)


@jit.device_function(strict=True)
def _normalize(at, size):
    """Divide the panel at `at` by the largest magnitudes; return 1 / these (1 for zeros)."""
    largest = simd.splat(0.0)
    for i in range(at, at + size * VECTOR, VECTOR):
        v = absolute(simd.load_f32(i))
        largest = choose(less(largest, v), v, largest)
    one = simd.splat(1.0)
    norm = choose(less(simd.splat(1e-37), largest), simd.div(one, largest), one)
    for i in range(at, at + size * VECTOR, VECTOR):
        simd.store_f32(i, simd.mul(simd.load_f32(i), norm))
    return norm


@jit.device_function(strict=True)
def _reciprocal(step):
    """Return 1 / step, 0 for 0."""
    zero = simd.splat(0.0)
    return choose(differs(step, zero), simd.div(simd.splat(1.0), step), zero)


@jit.device_function(strict=True)
def _evaluate(at, size, step, levels, middles):
    """Return the error and the sums of w q x and w q q of the nearest levels q for a scale."""
    inverse = _reciprocal(step)
    error = qx = qq = simd.splat(0.0)
    for i in range(at, at + size * VECTOR, VECTOR):
        v, w = simd.load_f32(i), simd.load_f32(i + size * VECTOR)
        t, q = simd.mul(v, inverse), simd.splat(levels[0])
        for m in range(len(middles)):
            q = where_ge(t, simd.splat(middles[m]), simd.splat(levels[m + 1]), q)
        wq = simd.mul(w, q)
        difference = simd.fma(step, q, simd.mul(v, simd.splat(-1.0)))
        error = simd.fma(simd.mul(w, difference), difference, error)
        qx, qq = simd.fma(wq, v, qx), simd.fma(wq, q, qq)
    return error, qx, qq


@jit.device_function(strict=True)
def _ideal(at, size, levels, middles, starts, signed):
    """Return the best real scales of blocks."""
    extreme = magnitude = simd.splat(0.0)
    for i in range(at, at + size * VECTOR, VECTOR):
        v = simd.load_f32(i)
        more = less(magnitude, absolute(v))
        magnitude, extreme = choose(more, absolute(v), magnitude), choose(more, v, extreme)
    if not signed:
        extreme = magnitude
    best = gain = simd.splat(0.0)
    for i in range(len(starts) + 1):  # the last one refines the best
        scale = best
        if i < len(starts):
            scale = simd.mul(extreme, simd.splat(starts[i]))
        _, qx, qq = _evaluate(at, size, scale, levels, middles)
        more = less(simd.splat(0.0), qq)
        if i < len(starts):
            more = simd.and_(more, less(simd.mul(gain, qq), simd.mul(qx, qx)))
        best = choose(more, simd.div(qx, qq), best)
        gain = choose(more, simd.mul(qx, best), gain)
    return best


@jit.device_function(strict=True)
def _try(at, size, levels, middles):
    """Evaluate NUMBER of the lanes where it is finite; return the mask of the least errors."""
    v = at + 2 * size * VECTOR
    number = simd.load_f32(v + NUMBER * VECTOR)
    step = simd.mul(number, simd.load_f32(v + NORM * VECTOR))
    error, qx, qq = _evaluate(at, size, step, levels, middles)
    zero, infinity = simd.splat(0.0), simd.splat(np.inf)
    finite = less(absolute(number), infinity)
    some = less(error, infinity)
    qx, qq = choose(some, qx, zero), choose(some, qq, zero)
    for k, sums in ((SUM_X, qx), (SUM_Q, qq)):
        old = simd.load_f32(v + k * VECTOR)
        simd.store_f32(v + k * VECTOR, choose(finite, sums, old))
    least = simd.load_f32(v + LEAST * VECTOR)
    more = simd.and_(finite, less(error, least))
    simd.store_f32(v + LEAST * VECTOR, choose(more, error, least))
    return more


@jit.device_function
def _search_panel(at, rows, size, levels, middles, rule, index, best, more):
    """Write the best index of d of 16 blocks to `best`; `index` and `more` are scratch memory."""
    v = at + 2 * size * VECTOR
    _normalize(at + size * VECTOR, size)
    simd.store_f32(v + NORM * VECTOR, _normalize(at, size))
    ideal = _ideal(at, size, levels, middles, rule.starts, rule.signed)
    simd.store_f32(v + IDEAL * VECTOR, ideal)
    simd.store_f32(v + LEAST * VECTOR, simd.splat(np.inf))
    for lane in range(LANES):
        first = rows[IDEAL, lane] / rule.tops[0] / rows[NORM, lane]
        best[lane], index[lane] = nearest_stored(first, rule.stored, rule.buckets), 0
        rows[SUM_X, lane] = rows[SUM_Q, lane] = 0
    n_fitted = len(rule.tops) * rule.rounds
    n_attempts = n_fitted + len(rule.plain)
    for attempt in range(n_attempts + 2):
        for lane in range(LANES):
            norm = rows[NORM, lane]
            if n_fitted <= attempt < n_attempts:  # the largest weight is 1
                value = rule.plain[attempt - n_fitted] / norm
                index[lane] = nearest_stored(value, rule.stored, rule.buckets)
            elif attempt >= n_attempts:  # the neighbours of the best
                index[lane] = best[lane] + (-1 if attempt == n_attempts else 1)
            elif attempt % rule.rounds == 0:
                value = rows[IDEAL, lane] / rule.tops[attempt // rule.rounds] / norm
                index[lane] = nearest_stored(value, rule.stored, rule.buckets)
            elif rows[SUM_Q, lane] > 0:
                value = rows[SUM_X, lane] / rows[SUM_Q, lane] / norm
                index[lane] = nearest_stored(value, rule.stored, rule.buckets)
            rows[NUMBER, lane] = stored_number(index[lane], rule.stored)
        simd.store_i32(simd.address(more), _try(at, size, levels, middles))
        for lane in range(LANES):
            if more[lane]:
                best[lane] = index[lane]


@jit.device_function(strict=True)
def _write_codes(panel, lane, step, middles, codes):
    """Write the codes of a block, a lane of the panel, for the scale `step`."""
    inverse = np.float32(1) / step if step != 0 else np.float32(0)
    for j in range(len(codes)):
        v, code = panel[j, lane] * inverse, 0
        for m in range(len(middles)):
            code += v >= middles[m]
        codes[j] = code


@jit.kernel
def search(x, weight, blocks, levels, middles, rule, codes, d, start, stop):
    """Quantize groups [start, stop) of 16 blocks of `x` float32 (blocks, size).

    `weight` (1 or rows, columns), rows of `blocks` blocks, weighs squared errors.  `codes` uint8
    (blocks, size) gets indices of `levels`, `d` (blocks,) float16 bits or indices of
    ``rule.stored``.
    """
    size = x.shape[1]
    scratch = np.zeros((2 * size + N_VECTORS, LANES), np.float32)
    at, rows = simd.address(scratch), scratch[2 * size :]
    index, best, more = np.zeros((3, LANES), np.int32)
    for group in range(start, stop):
        first = LANES * group
        simd_panel.load_panel(x, first, scratch[:size])
        simd_panel.load_importance(weight, blocks, first, scratch[size : 2 * size])
        _search_panel(at, rows, size, levels, middles, rule, index, best, more)
        for lane in range(min(LANES, len(x) - first)):
            d[first + lane] = best[lane]
            step = stored_number(best[lane], rule.stored) * rows[NORM, lane]
            _write_codes(scratch, lane, step, middles, codes[first + lane])

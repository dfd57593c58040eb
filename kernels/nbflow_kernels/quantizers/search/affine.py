"""Search for the base and scale of each block with the least error (quantizer "search").

Each block tries clipped versions of its range: `a` and `c` quantization steps are cut off below and
above.  Each range gives codes; least squares gives the base and scale for these codes; both are
rounded to storage; codes are chosen again for the rounded values, and the exact squared error of
the decoded weights decides.  The best is refined in the same way, and then its neighbours among the
storable values are tried.

The search starts from the published quantizer's parameters, and codes are always the nearest ones
for the stored parameters.  So no block has a larger error than the published one.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.formats.affine_format import F16_SCALE, U8_PAIR

F16_MAX = 65504.0
GRID = 4  # clippings tried at each end; 6 x 6 gains 0.4 % more in twice the time
CLIP = 0.3  # distance of the clippings, in quantization steps
REFINEMENTS = 3


@jit.device_function
def _stored(value, parameters, is_base):
    """Return the storable integer nearest to a parameter; out of range: the largest."""
    if parameters == U8_PAIR:
        steps = 100.0 * value + 100.0 if is_base else 1000.0 * value
        return np.int64(min(max(np.rint(steps), 0.0), 255.0))
    return np.int64(simd.float_to_half(min(max(value, -F16_MAX), F16_MAX)))


@jit.device_function
def _value(stored, parameters, is_base):
    """Return the float32 parameter of a stored integer."""
    if parameters == U8_PAIR:
        if is_base:
            return np.float32(stored) / np.float32(100) - np.float32(1)
        return np.float32(stored) / np.float32(1000)
    return simd.half_to_float(np.uint16(stored))


@jit.device_function
def _codes(x, base, inverse, low, high):
    """Return the nearest codes of 16 weights, as float32."""
    return simd.minimum(simd.maximum(simd.rint(simd.mul(simd.sub(x, base), inverse)), low), high)


@jit.device_function
def _error(x, weight, size, low, high, base, scale, norm):
    """Return the sum of ``((decoded - x) * norm) ** 2`` over the block at address `x`."""
    inverse = simd.splat(np.float32(1) / scale if scale > 0 else np.float32(0))
    base_v, scale_v, norm_v = simd.splat(base), simd.splat(scale), simd.splat(norm)
    low_v, high_v = simd.splat(low), simd.splat(high)
    total = simd.splat(0.0)
    for i in range(0, 4 * size, 64):
        v = simd.load_f32(x + i)
        q = _codes(v, base_v, inverse, low_v, high_v)
        e = simd.mul(simd.sub(simd.fma(scale_v, q, base_v), v), norm_v)
        total = simd.fma(simd.mul(e, e), simd.load_f32(weight + i), total)
    return simd.sum(total)


@jit.device_function
def _refit(x, weight, size, low, high, base, scale, parameters, origin, norm):
    """Return the stored least squares base and scale for the codes of (base, scale)."""
    inverse = simd.splat(np.float32(1) / scale if scale > 0 else np.float32(0))
    base_v, low_v, high_v = simd.splat(base), simd.splat(low), simd.splat(high)
    origin_v, norm_v = simd.splat(origin), simd.splat(norm)
    n = q1 = q2 = u1 = uq = simd.splat(0.0)
    for i in range(0, 4 * size, 64):
        v = simd.load_f32(x + i)
        w = simd.load_f32(weight + i)
        q = _codes(v, base_v, inverse, low_v, high_v)
        u = simd.mul(simd.mul(simd.sub(v, origin_v), norm_v), w)
        wq = simd.mul(q, w)
        n, q1, q2 = simd.add(n, w), simd.add(q1, wq), simd.fma(q, wq, q2)
        u1, uq = simd.add(u1, u), simd.fma(u, q, uq)
    return _solve(
        np.float64(simd.sum(n)), np.float64(simd.sum(q1)), np.float64(simd.sum(q2)),
        np.float64(simd.sum(u1)), np.float64(simd.sum(uq)), parameters, origin, norm,
    )  # fmt: skip


@jit.device_function
def _solve(count, sum_q, sum_qq, sum_u, sum_uq, parameters, origin, norm):
    """Return stored (base, scale) of the least squares line u = b + s * q."""
    if parameters == F16_SCALE:
        slope = sum_uq / sum_qq if sum_qq > 0 else 0.0
        return np.int64(0), _stored(max(slope, 0.0) / norm, parameters, False)
    spread = count * sum_qq - sum_q * sum_q
    slope = (count * sum_uq - sum_q * sum_u) / spread if spread > 0 else 0.0
    scale = _stored(max(slope, 0.0) / norm, parameters, False)
    # the base is fitted to the rounded scale; without any weight it is arbitrary
    count = count if count > 0 else 1.0
    mean = (sum_u / norm - np.float64(_value(scale, parameters, False)) * sum_q) / count
    return _stored(np.float64(origin) + mean, parameters, True), scale


@jit.device_function
def _try(x, weight, size, low, high, parameters, norm, base, scale, best):
    """Return (stored base, stored scale, error): the better of `search` and the given ones."""
    base_value = np.float32(0) if parameters == F16_SCALE else _value(base, parameters, True)
    scale_value = _value(scale, parameters, False)
    finite = abs(base_value) <= F16_MAX and 0 <= scale_value <= F16_MAX
    if not finite or (base == best[0] and scale == best[1]):
        return best
    error = _error(x, weight, size, low, high, base_value, scale_value, norm)
    if error < best[2]:
        return base, scale, np.float64(error)
    return best


@jit.device_function
def _search_block(x, weight, size, low, high, parameters, base, scale, smallest, largest):
    """Return the best stored (base, scale) of a block; `base`, `scale` are the published ones."""
    symmetric = parameters == F16_SCALE
    extent = max(-smallest, largest) if symmetric else largest - smallest
    extent = min(extent, np.float32(3.4e38))
    origin = np.float32(0) if symmetric else smallest
    norm = np.float32(1) / max(extent if extent > 0 else abs(smallest), np.float32(1e-30))
    n_steps = np.float32(high) if symmetric else np.float32(high - low)
    best = (np.int64(-1), np.int64(-1), np.inf)
    best = _try(x, weight, size, low, high, parameters, norm, base, scale, best)
    for i in range(GRID):
        for j in range(1 if symmetric else GRID):
            a, c = np.float32(CLIP * i), np.float32(0.0 if symmetric else CLIP * j)
            step = extent / n_steps
            start = origin if symmetric else origin + a * step
            fitted = _refit(
                x, weight, size, low, high, start, step * (1 - (a + c) / n_steps), parameters,
                origin, norm,
            )  # fmt: skip
            best = _try(x, weight, size, low, high, parameters, norm, fitted[0], fitted[1], best)
    if best[2] == np.inf:  # a range near float32's largest number: the error cannot be computed
        return _stored(origin, parameters, True), _stored(extent / n_steps, parameters, False), 0.0
    for _ in range(REFINEMENTS):
        before = best[2]
        b = np.float32(0) if symmetric else _value(best[0], parameters, True)
        fitted = _refit(
            x, weight, size, low, high, b, _value(best[1], parameters, False), parameters, origin,
            norm,
        )  # fmt: skip
        best = _try(x, weight, size, low, high, parameters, norm, fitted[0], fitted[1], best)
        if best[2] == before:
            break
    return _neighbours(x, weight, size, low, high, parameters, norm, best)


@jit.device_function
def _neighbours(x, weight, size, low, high, parameters, norm, best):
    """Return the best of `search` and the stored values next to it."""
    base, scale = best[0], best[1]
    limit = 255 if parameters == U8_PAIR else 0xFFFF
    for i in range(-1, 2):
        for j in range(0 if parameters == F16_SCALE else -1, 1 if parameters == F16_SCALE else 2):
            b, s = base + j, scale + i
            if 0 <= b <= limit and 0 <= s <= limit:
                best = _try(x, weight, size, low, high, parameters, norm, b, s, best)
    return best


@jit.kernel
def search(x, weight, size, low, high, parameters, codes, stored, start, stop):
    """Improve the stored parameters of rows [start, stop) and choose their codes.

    `x` is float32 (rows, columns), `weight` float32 (1 or rows, columns) weighs squared errors, 0
    for padding.  `low`..`high` are the signed codes.  `stored` uint16 (rows, blocks, 2: base,
    scale) holds the published parameters on entry.  `codes` uint8 gets code - low.
    """
    for row in range(start, stop):
        weight_at = simd.address(weight) + 4 * (row % len(weight)) * weight.shape[1]
        for b in range(stored.shape[1]):
            first = b * size
            x_at = simd.address(x) + 4 * (row * x.shape[1] + first)
            smallest = largest = x[row, first]
            for i in range(first, first + size):
                smallest, largest = min(smallest, x[row, i]), max(largest, x[row, i])
            best = _search_block(
                x_at, weight_at + 4 * first, size, low, high, parameters,
                np.int64(stored[row, b, 0]), np.int64(stored[row, b, 1]), smallest, largest,
            )  # fmt: skip
            stored[row, b, 0], stored[row, b, 1] = best[0], best[1]
            base = np.float32(0) if parameters == F16_SCALE else _value(best[0], parameters, True)
            scale = _value(best[1], parameters, False)
            inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
            for i in range(first, first + size):
                q = np.rint((x[row, i] - base) * inverse)
                codes[row, i] = np.uint8(min(max(q, low), high) - low)

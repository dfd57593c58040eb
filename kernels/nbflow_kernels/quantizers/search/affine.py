"""Search for the base and scale of each block with the least error (quantizer "search").

Each block tries clipped versions of its range: `a` and `c` quantization steps are cut off below and
above.  Each range gives codes; least squares gives the base and scale for these codes; both are
rounded to storage; codes are chosen again for the rounded values, and the exact squared error of
the decoded weights decides.  The best is refined in the same way, and then its neighbours among the
storable values are tried.

The search starts from the published quantizer's parameters, and codes are always the nearest ones
for the stored parameters.  So no block has a larger error than the published one.

16 blocks are searched at a time, one per SIMD lane (`quantizers.simd_panel`).  Sums over the block
add weights i, i + 16, ... first and then halve the 16 sums, i and i + 8, i and i + 4, ...
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_double, simd_narrow
from nbflow_kernels.cpu.simd import LANES
from nbflow_kernels.cpu.simd_compare import absolute, any_lane, choose, clamp, less
from nbflow_kernels.formats.affine_format import F16_SCALE, U8_PAIR
from nbflow_kernels.quantizers import simd_panel
from nbflow_kernels.quantizers.simd_panel import VECTOR, clip

F16_MAX = 65504.0
GRID = 4  # clippings tried at each end; 6 x 6 gains 0.4 % more in twice the time
CLIP = 0.3  # distance of the clippings, in quantization steps
REFINEMENTS = 3
SIGN = 0x8000  # of a float16

# vectors behind the three panels of the scratch memory: weights, error weights, and targets of the
# least squares fit
(
    BASE, SCALE, INVERSE, BASE_BITS, SCALE_BITS, BEST_BASE, BEST_SCALE, BEST_BASE_BITS,
    BEST_SCALE_BITS, BEST_ERROR, ORIGIN, NORM, EXTENT, SUM_W, SUM_U, N_VECTORS,
) = range(16)  # fmt: skip


# ---- sums over the block ------------------------------------------------------------------------
#
# `x` is the address of the panel of weights, of `size` vectors; the others follow it.


@jit.device_function(strict=True)
def _codes(x, base, inverse, low, high):
    """Return the nearest codes of 16 weights, as float32."""
    return clip(simd.rint(simd.mul(simd.sub(x, base), inverse)), low, high)


@jit.device_function(strict=True)
def _sums_of_some(x, size, base, inverse, low, high):
    """Return the sums of w q, w q q and u q over every sixteenth weight from address `x` on."""
    sum_q = sum_qq = sum_uq = simd.splat(0.0)
    for i in range(x, x + size * VECTOR, 16 * VECTOR):
        q = _codes(simd.load_f32(i), base, inverse, low, high)
        wq = simd.mul(q, simd.load_f32(i + size * VECTOR))
        sum_q, sum_qq = simd.add(sum_q, wq), simd.fma(q, wq, sum_qq)
        sum_uq = simd.fma(simd.load_f32(i + 2 * size * VECTOR), q, sum_uq)
    return sum_q, sum_qq, sum_uq


@jit.device_function(strict=True)
def _plus(a, b):
    """Return the sums of two triples."""
    return simd.add(a[0], b[0]), simd.add(a[1], b[1]), simd.add(a[2], b[2])


@jit.device_function(strict=True)
def _sums_of_four(x, size, base, inverse, low, high):
    """Return the sums of `_sums_of_some` over every fourth weight from address `x` on."""
    a = _sums_of_some(x, size, base, inverse, low, high)
    b = _sums_of_some(x + 8 * VECTOR, size, base, inverse, low, high)
    c = _sums_of_some(x + 4 * VECTOR, size, base, inverse, low, high)
    d = _sums_of_some(x + 12 * VECTOR, size, base, inverse, low, high)
    return _plus(_plus(a, b), _plus(c, d))


@jit.device_function(strict=True)
def _sums(x, size, base, inverse, low, high):
    """Return the sums of w q, w q q and u q over the block."""
    a = _sums_of_four(x, size, base, inverse, low, high)
    b = _sums_of_four(x + 2 * VECTOR, size, base, inverse, low, high)
    c = _sums_of_four(x + VECTOR, size, base, inverse, low, high)
    d = _sums_of_four(x + 3 * VECTOR, size, base, inverse, low, high)
    return _plus(_plus(a, b), _plus(c, d))


@jit.device_function(strict=True)
def _error_of_some(x, size, base, inverse, low, high, scale, norm):
    """Return the sum of w ((decoded - x) norm)**2 over every sixteenth weight from `x` on."""
    total = simd.splat(0.0)
    for i in range(x, x + size * VECTOR, 16 * VECTOR):
        v = simd.load_f32(i)
        q = _codes(v, base, inverse, low, high)
        e = simd.mul(simd.sub(simd.fma(scale, q, base), v), norm)
        total = simd.fma(simd.mul(e, e), simd.load_f32(i + size * VECTOR), total)
    return total


@jit.device_function(strict=True)
def _error_of_four(x, size, base, inverse, low, high, scale, norm):
    """Return the sum of `_error_of_some` over every fourth weight from address `x` on."""
    a = _error_of_some(x, size, base, inverse, low, high, scale, norm)
    b = _error_of_some(x + 8 * VECTOR, size, base, inverse, low, high, scale, norm)
    c = _error_of_some(x + 4 * VECTOR, size, base, inverse, low, high, scale, norm)
    d = _error_of_some(x + 12 * VECTOR, size, base, inverse, low, high, scale, norm)
    return simd.add(simd.add(a, b), simd.add(c, d))


@jit.device_function(strict=True)
def _error(x, size, base, inverse, low, high, scale, norm):
    """Return the sum of w ((decoded - x) norm)**2 over the block."""
    a = _error_of_four(x, size, base, inverse, low, high, scale, norm)
    b = _error_of_four(x + 2 * VECTOR, size, base, inverse, low, high, scale, norm)
    c = _error_of_four(x + VECTOR, size, base, inverse, low, high, scale, norm)
    d = _error_of_four(x + 3 * VECTOR, size, base, inverse, low, high, scale, norm)
    return simd.add(simd.add(a, b), simd.add(c, d))


@jit.device_function(strict=True)
def _constant_sums(x, size):
    """Return the sums of w and of u, in the order of `_sums`."""
    sum_w = sum_u = simd.splat(0.0)
    for k in range(2):
        half_w = half_u = simd.splat(0.0)
        for j in range(k, k + 4, 2):
            two_w = two_u = simd.splat(0.0)
            for i in range(j, j + 8, 4):
                w = u = simd.splat(0.0)
                for at in range(x + i * VECTOR, x + 16 * VECTOR, 8 * VECTOR):
                    some_w = some_u = simd.splat(0.0)
                    for m in range(at + size * VECTOR, at + 2 * size * VECTOR, 16 * VECTOR):
                        some_w = simd.add(some_w, simd.load_f32(m))
                        some_u = simd.add(some_u, simd.load_f32(m + size * VECTOR))
                    w, u = simd.add(w, some_w), simd.add(u, some_u)
                two_w, two_u = simd.add(two_w, w), simd.add(two_u, u)
            half_w, half_u = simd.add(half_w, two_w), simd.add(half_u, two_u)
        sum_w, sum_u = simd.add(sum_w, half_w), simd.add(sum_u, half_u)
    return sum_w, sum_u


# ---- stored parameters --------------------------------------------------------------------------
#
# `v` is the address of the vectors behind the panels.


@jit.device_function(strict=True)
def _values(v, k, parameters, is_base):
    """Return the float32 parameters of the storable integers in vector `k`."""
    bits = simd.load_i32(v + k * VECTOR)
    if parameters == U8_PAIR:
        number = simd.to_f32(bits)
        if is_base:
            return simd.sub(simd.div(number, simd.splat(100)), simd.splat(1))
        return simd.div(number, simd.splat(1000))
    return simd_narrow.from_half_bits(bits)


@jit.device_function(strict=True)
def _round(v, k, bits, parameters, is_base):
    """Round the parameters in vector `k` to storage; write the integers to vector `bits`.

    One-byte parameters are given in steps, and those of float16 within its range.
    """
    if parameters == U8_PAIR:
        simd.store_i32(v + bits * VECTOR, simd.to_i32(simd.load_f32(v + k * VECTOR)))
    else:
        value = simd.load_f32(v + k * VECTOR)
        simd.store_i32(v + bits * VECTOR, simd_narrow.half_bits(value))
    simd.store_f32(v + k * VECTOR, _values(v, bits, parameters, is_base))


@jit.device_function(strict=True)
def _store_steps(v, k, value, parameters, is_base):
    """Write float64 parameters to vector `k`, clamped to the storable range, as `_round` takes."""
    low, high = -F16_MAX, F16_MAX
    if parameters == U8_PAIR:
        low, high = 0.0, 255.0
        steps = simd_double.splat(100.0)
        if is_base:
            value = simd_double.fma(value, steps, steps)
        else:
            value = simd_double.mul(value, simd_double.splat(1000.0))
        value = simd_double.rint(value)
    low_v, high_v = simd_double.splat(low), simd_double.splat(high)
    value = simd_double.where_less(value, low_v, low_v, value)
    value = simd_double.where_less(high_v, value, high_v, value)
    simd.store_f32(v + k * VECTOR, simd_double.narrow(value))


@jit.device_function(strict=True)
def _wide(v, k):
    """Return vector `k` as float64."""
    return simd_double.widen(simd.load_f32(v + k * VECTOR))


@jit.device_function(strict=True)
def _minus_product(a, b, c):
    """Return c - a * b in float64, with one rounding."""
    return simd_double.fma(simd_double.sub(simd_double.splat(0.0), a), b, c)


@jit.device_function(strict=True)
def _fit(v, size, low, high, parameters, symmetric):
    """Write the stored least squares base and scale for the codes of BASE and INVERSE.

    The base is fitted to the rounded scale; without any weight it is arbitrary.
    """
    sums = _sums(
        v - 3 * size * VECTOR, size, simd.load_f32(v + BASE * VECTOR),
        simd.load_f32(v + INVERSE * VECTOR), simd.splat(low), simd.splat(high),
    )  # fmt: skip
    zero, one = simd_double.splat(0.0), simd_double.splat(1.0)
    sum_q, above = simd_double.widen(sums[0]), simd_double.widen(sums[2])
    below = simd_double.widen(sums[1])
    count, sum_u, norm = _wide(v, SUM_W), _wide(v, SUM_U), _wide(v, NORM)
    if not symmetric:
        minus_q = simd_double.sub(zero, sum_q)
        above = simd_double.fma(count, above, simd_double.mul(minus_q, sum_u))
        below = simd_double.fma(count, below, simd_double.mul(minus_q, sum_q))
    slope = simd_double.div(above, simd_double.where_less(zero, below, below, one))
    slope = simd_double.where_less(zero, below, slope, zero)
    slope = simd_double.where_less(slope, zero, zero, slope)
    _store_steps(v, SCALE, simd_double.div(slope, norm), parameters, False)
    _round(v, SCALE, SCALE_BITS, parameters, False)
    if symmetric:
        return
    mean = _minus_product(_wide(v, SCALE), sum_q, simd_double.div(sum_u, norm))
    mean = simd_double.div(mean, simd_double.where_less(zero, count, count, one))
    _store_steps(v, BASE, simd_double.add(_wide(v, ORIGIN), mean), parameters, True)
    _round(v, BASE, BASE_BITS, parameters, True)


# ---- the search ---------------------------------------------------------------------------------


@jit.device_function(strict=True)
def _reciprocal(scale):
    """Return 1 / scale of positive lanes, else 0."""
    zero = simd.splat(0.0)
    return choose(less(zero, scale), simd.div(simd.splat(1.0), scale), zero)


@jit.device_function(strict=True)
def _try(v, size, low, high):
    """Keep BASE and SCALE in the lanes where their error is the least; return whether in any."""
    base, scale = simd.load_f32(v + BASE * VECTOR), simd.load_f32(v + SCALE * VECTOR)
    error = _error(
        v - 3 * size * VECTOR, size, base, _reciprocal(scale), simd.splat(low), simd.splat(high),
        scale, simd.load_f32(v + NORM * VECTOR),
    )  # fmt: skip
    more = less(error, simd.load_f32(v + BEST_ERROR * VECTOR))
    # infinity and NaN are not storable
    top = simd.splat(2 * F16_MAX)
    more = simd.and_(more, simd.and_(less(absolute(base), top), less(scale, top)))
    more = simd.and_(more, less(simd.splat(-1e-30), scale))
    simd.store_f32(
        v + BEST_ERROR * VECTOR, choose(more, error, simd.load_f32(v + BEST_ERROR * VECTOR))
    )
    for i in range(2):
        kept, tried = v + (BEST_BASE + i) * VECTOR, v + (BASE + i) * VECTOR
        simd.store_f32(kept, choose(more, simd.load_f32(tried), simd.load_f32(kept)))
        kept, tried = v + (BEST_BASE_BITS + i) * VECTOR, v + (BASE_BITS + i) * VECTOR
        simd.store_i32(kept, choose(more, simd.load_i32(tried), simd.load_i32(kept)))
    return any_lane(more)


@jit.device_function(strict=True)
def _prepare(v, size, parameters, symmetric):
    """Write the range of each block, the targets of the fit and the published parameters."""
    at = v - 3 * size * VECTOR
    smallest = largest = simd.load_f32(at)
    for i in range(at + VECTOR, at + size * VECTOR, VECTOR):
        x = simd.load_f32(i)
        smallest = choose(less(x, smallest), x, smallest)
        largest = choose(less(largest, x), x, largest)
    negative = simd.mul(smallest, simd.splat(-1.0))
    if symmetric:
        extent = choose(less(negative, largest), largest, negative)
        origin = simd.splat(0.0)
    else:
        extent, origin = simd.sub(largest, smallest), smallest
    extent = simd.minimum(extent, simd.splat(3.4e38))
    reach = choose(less(simd.splat(0.0), extent), extent, absolute(smallest))
    norm = simd.div(simd.splat(1.0), simd.maximum(reach, simd.splat(1e-30)))
    for k, value in ((EXTENT, extent), (ORIGIN, origin), (NORM, norm)):
        simd.store_f32(v + k * VECTOR, value)
    for i in range(at, at + size * VECTOR, VECTOR):
        target = simd.mul(simd.sub(simd.load_f32(i), origin), norm)
        target = simd.mul(target, simd.load_f32(i + size * VECTOR))
        simd.store_f32(i + 2 * size * VECTOR, target)
    sum_w, sum_u = _constant_sums(at, size)
    simd.store_f32(v + SUM_W * VECTOR, sum_w)
    simd.store_f32(v + SUM_U * VECTOR, sum_u)
    simd.store_f32(v + BEST_ERROR * VECTOR, simd.splat(np.inf))
    simd.store_f32(v + SCALE * VECTOR, _values(v, SCALE_BITS, parameters, False))
    base = simd.splat(0.0)
    if not symmetric:
        base = _values(v, BASE_BITS, parameters, True)
    simd.store_f32(v + BASE * VECTOR, base)


@jit.device_function(strict=True)
def _clipped_ranges(v, size, low, high, parameters, symmetric):
    """Fit the range of each block, clipped at either end."""
    n_steps = np.float32(high) if symmetric else np.float32(high - low)
    zero, one = simd_double.splat(0.0), simd_double.splat(1.0)
    for i in range(GRID):
        for j in range(1 if symmetric else GRID):
            a, c = np.float32(CLIP * i), np.float32(0.0 if symmetric else CLIP * j)
            share = 1.0 - np.float64((a + c) / n_steps)
            step = simd.div(simd.load_f32(v + EXTENT * VECTOR), simd.splat(n_steps))
            width = simd_double.mul(simd_double.widen(step), simd_double.splat(share))
            inverse = simd_double.div(one, simd_double.where_less(zero, width, width, one))
            inverse = simd_double.where_less(zero, width, inverse, zero)
            simd.store_f32(v + INVERSE * VECTOR, simd_double.narrow(inverse))
            start = simd.load_f32(v + ORIGIN * VECTOR)
            if not symmetric:
                start = simd.fma(simd.splat(a), step, start)
            simd.store_f32(v + BASE * VECTOR, start)
            _fit(v, size, low, high, parameters, symmetric)
            _try(v, size, low, high)


@jit.device_function(strict=True)
def _refine(v, size, low, high, parameters, symmetric):
    """Fit the best parameters again, then try their neighbours among the storable ones."""
    for _ in range(REFINEMENTS):
        simd.store_f32(v + BASE * VECTOR, simd.load_f32(v + BEST_BASE * VECTOR))
        inverse = _reciprocal(simd.load_f32(v + BEST_SCALE * VECTOR))
        simd.store_f32(v + INVERSE * VECTOR, inverse)
        _fit(v, size, low, high, parameters, symmetric)
        if not _try(v, size, low, high):
            break
    base_bits = simd.load_i32(v + BEST_BASE_BITS * VECTOR)
    scale_bits = simd.load_i32(v + BEST_SCALE_BITS * VECTOR)
    limit = 255 if parameters == U8_PAIR else 0xFFFF
    for i in range(-1, 2):
        for j in range(0 if symmetric else -1, 1 if symmetric else 2):
            if i == 0 and j == 0:
                continue
            bits = clamp(simd.add(scale_bits, simd.splat_i32(i)), 0, limit)
            simd.store_i32(v + SCALE_BITS * VECTOR, bits)
            simd.store_f32(v + SCALE * VECTOR, _values(v, SCALE_BITS, parameters, False))
            if not symmetric:
                bits = clamp(simd.add(base_bits, simd.splat_i32(j)), 0, limit)
                simd.store_i32(v + BASE_BITS * VECTOR, bits)
                simd.store_f32(v + BASE * VECTOR, _values(v, BASE_BITS, parameters, True))
            _try(v, size, low, high)


@jit.device_function(strict=True)
def _replace_failed(v, low, high, parameters, symmetric, found):
    """Store the published range in the lanes without the mask `found`, as far as possible."""
    n_steps = np.float32(high) if symmetric else np.float32(high - low)
    step = simd.div(simd.load_f32(v + EXTENT * VECTOR), simd.splat(n_steps))
    _store_steps(v, SCALE, simd_double.widen(step), parameters, False)
    _store_steps(v, BASE, _wide(v, ORIGIN), parameters, True)
    _round(v, SCALE, SCALE_BITS, parameters, False)
    _round(v, BASE, BASE_BITS, parameters, True)
    for i in range(2):
        kept, other = v + (BEST_BASE + i) * VECTOR, v + (BASE + i) * VECTOR
        simd.store_f32(kept, choose(found, simd.load_f32(kept), simd.load_f32(other)))
        kept, other = v + (BEST_BASE_BITS + i) * VECTOR, v + (BASE_BITS + i) * VECTOR
        simd.store_i32(kept, choose(found, simd.load_i32(kept), simd.load_i32(other)))


@jit.device_function(strict=True)
def _search_panel(v, size, low, high, parameters):
    """Search for the parameters of 16 blocks and choose their codes, from 0."""
    symmetric = parameters == F16_SCALE
    _prepare(v, size, parameters, symmetric)
    _try(v, size, low, high)
    _clipped_ranges(v, size, low, high, parameters, symmetric)
    # near float32's largest number the error cannot be computed
    found = less(simd.load_f32(v + BEST_ERROR * VECTOR), simd.splat(np.inf))
    _refine(v, size, low, high, parameters, symmetric)
    _replace_failed(v, low, high, parameters, symmetric, found)
    base, scale = simd.load_f32(v + BEST_BASE * VECTOR), simd.load_f32(v + BEST_SCALE * VECTOR)
    inverse = _reciprocal(scale)
    low_v, high_v = simd.splat(low), simd.splat(high)
    for i in range(v - 3 * size * VECTOR, v - 2 * size * VECTOR, VECTOR):
        q = _codes(simd.load_f32(i), base, inverse, low_v, high_v)
        simd.store_f32(i, simd.sub(q, low_v))


@jit.kernel
def search(x, weight, blocks, low, high, parameters, codes, stored, start, stop):
    """Improve the stored parameters of groups [start, stop) of 16 blocks and choose their codes.

    `x` is float32 (blocks, size), `weight` float32 (1 or rows, columns) weighs squared errors, 0
    for padding; a row has `blocks` blocks.  `low`..`high` are the signed codes.  `stored` uint16
    (blocks, 2: base, scale) holds the published parameters on entry.  `codes` uint8 gets
    code - low.  A block with a negative scale is searched as its mirror image.
    """
    size = x.shape[1]
    scratch = np.zeros((3 * size + N_VECTORS, LANES), np.float32)
    v = simd.address(scratch) + 3 * size * VECTOR
    bits = scratch[3 * size :].view(np.int32)
    for group in range(start, stop):
        first = LANES * group
        used = min(LANES, len(x) - first)
        simd_panel.load_panel(x, first, scratch[:size])
        simd_panel.load_importance(weight, blocks, first, scratch[size : 2 * size])
        for lane in range(LANES):
            block = min(first + lane, len(x) - 1)
            bits[BASE_BITS, lane] = stored[block, 0]
            bits[SCALE_BITS, lane] = stored[block, 1]
            if parameters == F16_SCALE and stored[block, 1] & SIGN:
                bits[SCALE_BITS, lane] ^= SIGN
                for i in range(size):
                    scratch[i, lane] = -scratch[i, lane]
        _search_panel(v, size, low, high, parameters)
        simd_panel.store_panel(scratch[:size], first, codes)
        for lane in range(used):
            sign = stored[first + lane, 1] & SIGN if parameters == F16_SCALE else 0
            stored[first + lane, 0] = bits[BEST_BASE_BITS, lane]
            stored[first + lane, 1] = bits[BEST_SCALE_BITS, lane] ^ sign

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

from nbflow_kernels.cpu import jit, simd, simd_memory, simd_narrow
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
    BEST_SCALE_BITS, BEST_ERROR, ORIGIN, NORM, EXTENT, SUM_Q, SUM_QQ, SUM_UQ, SUM_W, SUM_U,
    HALVES, N_VECTORS,
) = range(20)  # fmt: skip


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
# `v` is the address of the vectors behind the panels, `rows` (N_VECTORS, 16) the same as an array.


@jit.device_function(strict=True)
def _values(v, k, parameters, is_base):
    """Return the float32 parameters of the storable integers in vector `k`."""
    bits = simd.load_i32(v + k * VECTOR)
    if parameters == U8_PAIR:
        number = simd.to_f32(bits)
        if is_base:
            return simd.sub(simd.div(number, simd.splat(100)), simd.splat(1))
        return simd.div(number, simd.splat(1000))
    for lane in range(LANES):
        address = v + k * VECTOR + 4 * lane
        simd_narrow.write_u16(v + HALVES * VECTOR + 2 * lane, simd_memory.read_i32(address))
    return simd.load_f16(v + HALVES * VECTOR)


@jit.device_function(strict=True)
def _round(v, k, bits, parameters, is_base):
    """Round the parameters in vector `k` to storage; write the integers to vector `bits`.

    One-byte parameters are given in steps, and those of float16 within its range.
    """
    if parameters == U8_PAIR:
        simd.store_i32(v + bits * VECTOR, simd.to_i32(simd.load_f32(v + k * VECTOR)))
    else:
        simd_memory.store_f16(v + HALVES * VECTOR, simd.load_f32(v + k * VECTOR))
        wide = simd.as_i32(simd.load_bf16(v + HALVES * VECTOR))
        simd.store_i32(v + bits * VECTOR, simd.shr(wide, simd.splat_i32(16)))
    simd.store_f32(v + k * VECTOR, _values(v, bits, parameters, is_base))


@jit.device_function
def _steps(value, parameters, is_base):
    """Return a parameter within the storable range, in steps if it is stored in one byte."""
    if parameters == U8_PAIR:
        steps = 100.0 * value + 100.0 if is_base else 1000.0 * value
        return min(max(np.rint(steps), 0.0), 255.0)
    return min(max(value, -F16_MAX), F16_MAX)


@jit.device_function
def _fit(v, rows, size, low, high, parameters, symmetric):
    """Write the stored least squares base and scale for the codes of BASE and INVERSE.

    The base is fitted to the rounded scale; without any weight it is arbitrary.
    """
    at = v - 3 * size * VECTOR
    sums = _sums(
        at, size, simd.load_f32(v + BASE * VECTOR), simd.load_f32(v + INVERSE * VECTOR),
        simd.splat(low), simd.splat(high),
    )  # fmt: skip
    for i in range(3):
        simd.store_f32(v + (SUM_Q + i) * VECTOR, sums[i])
    for lane in range(LANES):
        sum_q, sum_qq = np.float64(rows[SUM_Q, lane]), np.float64(rows[SUM_QQ, lane])
        sum_uq, count = np.float64(rows[SUM_UQ, lane]), np.float64(rows[SUM_W, lane])
        if symmetric:
            above, below = sum_uq, sum_qq
        else:
            above = count * sum_uq - sum_q * np.float64(rows[SUM_U, lane])
            below = count * sum_qq - sum_q * sum_q
        slope = above / (below if below > 0 else 1.0)
        slope = max(slope if below > 0 else 0.0, 0.0)
        rows[SCALE, lane] = _steps(slope / rows[NORM, lane], parameters, False)
    _round(v, SCALE, SCALE_BITS, parameters, False)
    if symmetric:
        return
    for lane in range(LANES):
        count, mean_u = np.float64(rows[SUM_W, lane]), np.float64(rows[SUM_U, lane])
        mean = mean_u / rows[NORM, lane]
        mean = mean - np.float64(rows[SCALE, lane]) * np.float64(rows[SUM_Q, lane])
        mean = np.float64(rows[ORIGIN, lane]) + mean / (count if count > 0 else 1.0)
        rows[BASE, lane] = _steps(mean, parameters, True)
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


@jit.device_function
def _clipped_ranges(v, rows, size, low, high, parameters, symmetric):
    """Fit the range of each block, clipped at either end."""
    n_steps = np.float32(high) if symmetric else np.float32(high - low)
    for i in range(GRID):
        for j in range(1 if symmetric else GRID):
            a, c = np.float32(CLIP * i), np.float32(0.0 if symmetric else CLIP * j)
            share = 1.0 - np.float64((a + c) / n_steps)
            for lane in range(LANES):
                step = rows[EXTENT, lane] / n_steps
                width = np.float64(step) * share
                inverse = 1.0 / (width if width > 0 else 1.0)
                rows[INVERSE, lane] = inverse if width > 0 else 0.0
            start = simd.load_f32(v + ORIGIN * VECTOR)
            if not symmetric:
                step = simd.div(simd.load_f32(v + EXTENT * VECTOR), simd.splat(n_steps))
                start = simd.fma(simd.splat(a), step, start)
            simd.store_f32(v + BASE * VECTOR, start)
            _fit(v, rows, size, low, high, parameters, symmetric)
            _try(v, size, low, high)


@jit.device_function
def _refine(v, rows, size, low, high, parameters, symmetric):
    """Fit the best parameters again, then try their neighbours among the storable ones."""
    for _ in range(REFINEMENTS):
        simd.store_f32(v + BASE * VECTOR, simd.load_f32(v + BEST_BASE * VECTOR))
        inverse = _reciprocal(simd.load_f32(v + BEST_SCALE * VECTOR))
        simd.store_f32(v + INVERSE * VECTOR, inverse)
        _fit(v, rows, size, low, high, parameters, symmetric)
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


@jit.device_function
def _replace_failed(v, rows, low, high, parameters, symmetric, found):
    """Store the published range in the lanes without the mask `found`, as far as possible."""
    n_steps = np.float32(high) if symmetric else np.float32(high - low)
    for lane in range(LANES):
        rows[SCALE, lane] = _steps(rows[EXTENT, lane] / n_steps, parameters, False)
        rows[BASE, lane] = _steps(rows[ORIGIN, lane], parameters, True)
    _round(v, SCALE, SCALE_BITS, parameters, False)
    _round(v, BASE, BASE_BITS, parameters, True)
    for i in range(2):
        kept, other = v + (BEST_BASE + i) * VECTOR, v + (BASE + i) * VECTOR
        simd.store_f32(kept, choose(found, simd.load_f32(kept), simd.load_f32(other)))
        kept, other = v + (BEST_BASE_BITS + i) * VECTOR, v + (BASE_BITS + i) * VECTOR
        simd.store_i32(kept, choose(found, simd.load_i32(kept), simd.load_i32(other)))


@jit.device_function
def _search_panel(v, rows, size, low, high, parameters):
    """Search for the parameters of 16 blocks and choose their codes, from 0."""
    symmetric = parameters == F16_SCALE
    _prepare(v, size, parameters, symmetric)
    _try(v, size, low, high)
    _clipped_ranges(v, rows, size, low, high, parameters, symmetric)
    # near float32's largest number the error cannot be computed
    found = less(simd.load_f32(v + BEST_ERROR * VECTOR), simd.splat(np.inf))
    _refine(v, rows, size, low, high, parameters, symmetric)
    _replace_failed(v, rows, low, high, parameters, symmetric, found)
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
    rows = scratch[3 * size :]
    v = simd.address(scratch) + 3 * size * VECTOR
    bits = rows.view(np.int32)
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
        _search_panel(v, rows, size, low, high, parameters)
        simd_panel.store_panel(scratch[:size], first, codes)
        for lane in range(used):
            sign = stored[first + lane, 1] & SIGN if parameters == F16_SCALE else 0
            stored[first + lane, 0] = bits[BEST_BASE_BITS, lane]
            stored[first + lane, 1] = bits[BEST_SCALE_BITS, lane] ^ sign

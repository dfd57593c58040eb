"""GGML's encoders of the K-quants, bit for bit, 16 super-blocks in lockstep.

Each sub-block is fitted by itself (`nbflow_kernels.quants.ggml_fits`); the scales and minima found
are then quantized for the super-block; codes are chosen again for the quantized ones.

A sub-block whose quantized scale is 0 keeps the codes of its own fit: they do not matter, but they
are in the published bytes.

Source: GGML, ggml-quants.c (quantize_row_q2_K_ref to quantize_row_q6_K_ref, and the functions of
the same names with ``_impl`` where there are importance weights).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import lanes, simd
from nbflow_kernels._jit import inline, strict_njit
from nbflow_kernels.quants import ggml_fits, lockstep
from nbflow_kernels.quants.lockstep import (
    VECTOR,
    absolute,
    choose,
    clamp,
    differs,
    less,
    nearest,
    sqrt,
)

SUPER = 256  # weights of a super-block


@inline
def _squares(x: Any) -> Any:
    """Return the sum of squares of each super-block of the panel at `x`."""
    total = simd.splat(0.0)
    for at in range(x, x + SUPER * VECTOR, VECTOR):
        v = simd.load_f32(at)
        total = simd.add(total, simd.mul(v, v))
    return total


@inline
def _weigh_magnitudes(x: Any, w: Any, n: Any, with_mean: Any) -> None:
    """Write |x|, plus the root mean square of the sub-block, to `w`."""
    mean = simd.splat(0.0)
    if with_mean:
        for i in range(0, n * VECTOR, VECTOR):
            v = simd.load_f32(x + i)
            mean = simd.add(mean, simd.mul(v, v))
        mean = sqrt(simd.div(mean, simd.splat(n)))
    for i in range(0, n * VECTOR, VECTOR):
        simd.store_f32(w + i, simd.add(mean, absolute(simd.load_f32(x + i))))


@inline
def _half(v: Any, at: Any) -> Any:
    """Return the vector as float16 holds it; its bits are left at `at`."""
    lanes.store_f16(at, v)
    return simd.load_f16(at)


@inline
def _scale_down(values: Any, count: Any, top: Any, codes: Any) -> Any:
    """Write round(value * top / largest) to `codes`; return largest / top."""
    zero = simd.splat(0.0)
    largest = zero
    for i in range(0, count * VECTOR, VECTOR):
        v = simd.load_f32(values + i)
        largest = choose(less(largest, v), v, largest)
    some = less(zero, largest)
    inverse = choose(some, simd.div(simd.splat(top), largest), zero)
    for i in range(0, count * VECTOR, VECTOR):
        code = nearest(simd.mul(inverse, simd.load_f32(values + i)))
        code = lockstep.smaller(simd.and_(code, simd.splat_i32(255)), simd.splat_i32(top))
        simd.store_f32(codes + i, simd.to_f32(code))
    return simd.div(largest, simd.splat(top))


# ---- q2_k, q4_k, q5_k ---------------------------------------------------------------------------


@strict_njit
def encode_ranges(
    x: Any, importance: Any, blocks: Any, n: Any, top: Any, scale_top: Any, first: Any, step: Any,
    tries: Any, absolutely: Any, codes: Any, scales: Any, mins: Any, params: Any, start: Any,
    stop: Any,
) -> None:  # fmt: skip
    """Encode units [start, stop) of 16 super-blocks of `x` (super-blocks, 256).

    Sub-blocks have `n` weights with codes 0 .. `top`, scales and minima 0 .. `scale_top`; `first`,
    `step`, `tries` and `absolutely` are `fit_range`'s.  `importance` (0, 1 or rows; columns) are
    rows of `blocks` super-blocks.  Results: `codes` uint8 (super-blocks, 256), `scales` int16 and
    `mins` uint8 (super-blocks, 256 / n), `params` uint16 (super-blocks, 2): d and dmin.
    """
    panel, weight = np.empty((SUPER, 16), np.float32), np.empty((SUPER, 16), np.float32)
    code_panel = np.empty((SUPER, 16), np.float32)
    count = SUPER // n
    fits = np.empty((5, count, 16), np.float32)  # scale, minimum, their codes, sum of weights
    pair, halves = np.empty((2, 16), np.float32), np.empty((2, 16), np.uint16)
    x_at, w_at, q_at = simd.address(panel), simd.address(weight), simd.address(code_panel)
    scale_at, min_at, sum_at, ls_at, lm_at = (
        simd.address(fits[0]), simd.address(fits[1]), simd.address(fits[4]),
        simd.address(fits[2]), simd.address(fits[3]),
    )  # fmt: skip
    d_at, m_at = simd.address(halves[0]), simd.address(halves[1])
    weighted = len(importance) > 0
    for unit in range(start, stop):
        lockstep.fill_panel(x, unit * 16, panel)
        sigma = simd.splat(0.0)
        if weighted:
            lockstep.fill_importance(importance, blocks, unit * 16, weight)
            sigma = _squares(x_at)
            if n == 32:
                sigma = simd.add(sigma, sigma)
            sigma = simd.div(sigma, simd.splat(SUPER))
        for j in range(count):
            at, i = j * n * VECTOR, j * VECTOR
            if weighted:
                simd.store_f32(sum_at + i, ggml_fits.emphasize(x_at + at, w_at + at, n, sigma))
            else:
                _weigh_magnitudes(x_at + at, w_at + at, n, n == 32)
            ggml_fits.fit_range(
                x_at + at, w_at + at, n, top, first, step, tries, absolutely, q_at + at,
                scale_at + i, min_at + i,
            )  # fmt: skip
        if weighted:
            pair_at = simd.address(pair)
            ggml_fits.fit_positive(scale_at, sum_at, count, scale_top, ls_at, pair_at)
            ggml_fits.fit_positive(min_at, sum_at, count, scale_top, lm_at, pair_at + VECTOR)
            d, dmin = simd.load_f32(pair_at), simd.load_f32(pair_at + VECTOR)
        else:
            d = _scale_down(scale_at, count, scale_top, ls_at)
            dmin = _scale_down(min_at, count, scale_top, lm_at)
        d, dmin = _half(d, d_at), _half(dmin, m_at)
        for j in range(count):
            _choose_codes(
                x_at + j * n * VECTOR, q_at + j * n * VECTOR, n, 0, top,
                simd.mul(d, simd.load_f32(ls_at + j * VECTOR)),
                simd.mul(dmin, simd.load_f32(lm_at + j * VECTOR)),
            )  # fmt: skip
        lockstep.empty_panel(code_panel, unit * 16, codes)
        lockstep.empty_panel(fits[2], unit * 16, scales)
        lockstep.empty_panel(fits[3], unit * 16, mins)
        lockstep.empty_panel(halves, unit * 16, params)


@inline
def _choose_codes(x: Any, q: Any, n: Any, low: Any, top: Any, d: Any, m: Any) -> None:
    """Write code - low for the nearest codes low .. top of (x + m) / d, where d is not 0."""
    some = differs(d, simd.splat(0.0))
    for i in range(0, n * VECTOR, VECTOR):
        steps = nearest(simd.div(simd.add(simd.load_f32(x + i), m), d))
        code = simd.sub(clamp(steps, low, top), simd.splat_i32(low))
        simd.store_f32(q + i, choose(some, simd.to_f32(code), simd.load_f32(q + i)))


# ---- q3_k, q6_k ---------------------------------------------------------------------------------


@inline
def _scale_down_signed(values: Any, count: Any, low: Any, codes: Any) -> Any:
    """Write round(value * low / extreme) to `codes`; return extreme / low and where it is 0."""
    zero = simd.splat(0.0)
    extreme = magnitude = zero
    for i in range(0, count * VECTOR, VECTOR):
        v = simd.load_f32(values + i)
        more = less(magnitude, absolute(v))
        magnitude = choose(more, absolute(v), magnitude)
        extreme = choose(more, v, extreme)
    nothing = less(magnitude, simd.splat(ggml_fits.TINY if low == -128 else 1e-45))
    inverse = simd.div(simd.splat(low), extreme)
    for i in range(0, count * VECTOR, VECTOR):
        code = clamp(nearest(simd.mul(inverse, simd.load_f32(values + i))), low, -low - 1)
        # without any scale, q3_k's field of zeros means -32 and q6_k's 0
        none = simd.splat_i32(0 if low == -128 else low)
        simd.store_f32(codes + i, simd.to_f32(choose(nothing, none, code)))
    return choose(nothing, zero, simd.div(simd.splat(1.0), inverse)), nothing


@strict_njit
def encode_signed(
    x: Any, importance: Any, blocks: Any, top: Any, scale_top: Any, codes: Any, scales: Any,
    params: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Encode units [start, stop) of 16 super-blocks, codes -top .. top - 1 (stored plus top).

    Sub-blocks have 16 weights; scales are -scale_top .. scale_top - 1.  See `encode_ranges`.
    """
    n, count = 16, 16
    panel, weight = np.empty((SUPER, 16), np.float32), np.empty((SUPER, 16), np.float32)
    code_panel = np.empty((SUPER, 16), np.float32)
    fits = np.empty((3, count, 16), np.float32)  # scale, its code, sum of weights
    single, halves = np.empty(16, np.float32), np.zeros((2, 16), np.uint16)
    x_at, w_at, q_at = simd.address(panel), simd.address(weight), simd.address(code_panel)
    scale_at, ls_at, sum_at = (
        simd.address(fits[0]), simd.address(fits[1]), simd.address(fits[2])
    )  # fmt: skip
    d_at = simd.address(halves)
    weighted = len(importance) > 0
    for unit in range(start, stop):
        lockstep.fill_panel(x, unit * 16, panel)
        sigma = simd.splat(0.0)
        if weighted:
            lockstep.fill_importance(importance, blocks, unit * 16, weight)
            sigma = _squares(x_at)
            sigma = simd.div(simd.add(sigma, sigma), simd.splat(SUPER))
        for j in range(count):
            at, i = j * n * VECTOR, j * VECTOR
            if top == 4 and not weighted:
                ggml_fits.fit_signed_by_turns(x_at + at, n, top, q_at + at, scale_at + i)
                continue
            if top == 4:
                simd.store_f32(sum_at + i, ggml_fits.emphasize(x_at + at, w_at + at, n, sigma))
            elif not weighted:
                for k in range(at, at + n * VECTOR, VECTOR):
                    v = simd.load_f32(x_at + k)
                    simd.store_f32(w_at + k, simd.mul(v, v))
            ggml_fits.fit_signed(x_at + at, w_at + at, n, top, q_at + at, scale_at + i)
        if top == 4 and weighted:
            ggml_fits.fit_signed(scale_at, sum_at, count, scale_top, ls_at, simd.address(single))
            d = simd.load_f32(simd.address(single))
            for i in range(0, count * VECTOR, VECTOR):
                code = simd.sub(simd.load_f32(ls_at + i), simd.splat(scale_top))
                simd.store_f32(ls_at + i, code)
            nothing = less(simd.splat(0.0), simd.splat(0.0))
        else:
            d, nothing = _scale_down_signed(scale_at, count, -scale_top, ls_at)
        d = _half(d, d_at)
        for j in range(count):
            q = q_at + j * n * VECTOR
            _choose_codes(
                x_at + j * n * VECTOR, q, n, -top, top - 1,
                simd.mul(d, simd.load_f32(ls_at + j * VECTOR)), simd.splat(0.0),
            )  # fmt: skip
            if top == 32:  # a block of zeros is all zero bytes
                for i in range(0, n * VECTOR, VECTOR):
                    simd.store_f32(q + i, choose(nothing, simd.splat(0.0), simd.load_f32(q + i)))
        lockstep.empty_panel(code_panel, unit * 16, codes)
        lockstep.empty_panel(fits[1], unit * 16, scales)
        lockstep.empty_panel(halves, unit * 16, params)

"""Logits on the CPU: row by row, 16 columns at a time.

A row is read twice, for its top and for the sum of exponentials; a row of 128 thousand is half a
megabyte, so that the second time it comes from the cache.  Exponentials are float32, their sum is
float64 over blocks.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, not_capturable, parallel_for
from nbflow_kernels.cpu.simd_math import select, tanh
from nbflow_kernels.cpu.simd_memory import address_of, read_f32, read_u8, write_f32

BLOCK = 1024  # elements whose exponentials are added in float32, 64 in each lane
LOWEST = np.float32(-3.4028234663852886e38)
_COST = 20.0  # multiply-adds per element, for the decision to use more than one thread


def log_softmax(logits: np.ndarray, temperature: np.ndarray, cap: float, out: np.ndarray) -> None:
    """See `nbflow_kernels.log_softmax`; `temperature` is float32 (B,), `cap` 0 for none."""
    B, V = logits.shape
    hold(logits, temperature, out)
    rows = address_of(logits), V, address_of(temperature), cap
    parallel_for(_log_softmax, B, _COST * B * V, *rows, address_of(out))


def token_log_probs(
    logits: np.ndarray, ids: np.ndarray, temperature: np.ndarray, cap: float, out: np.ndarray
) -> None:
    """See `nbflow_kernels.token_log_probs`; `ids` is int32 (B, K), `out` float64 (B, K)."""
    B, V = logits.shape
    hold(logits, temperature, out)
    # without a cap, which few calls have, the kernel compiles faster
    rows = address_of(logits), V, address_of(temperature), cap or None
    parallel_for(_token_log_probs, B, _COST * B * V, *rows, ids, out)


def kl_divergence(logits_p: np.ndarray, logits_q: np.ndarray, out: np.ndarray) -> None:
    """See `nbflow_kernels.kl_divergence`; `out` is float64 (B,)."""
    B, V = logits_p.shape
    hold(logits_p, logits_q)
    work = 2.0 * _COST * B * V
    parallel_for(_kl_divergence, B, work, address_of(logits_p), address_of(logits_q), V, out)


def top1_agreement(logits_p: np.ndarray, logits_q: np.ndarray, out: np.ndarray) -> None:
    """See `nbflow_kernels.top1_agreement`; NumPy's argmax gives the index of a NaN, if any."""
    not_capturable()
    tops = [logits.argmax(axis=1) for logits in (logits_p, logits_q)]
    np.equal(tops[0], tops[1], out=out)
    for logits, top in zip((logits_p, logits_q), tops, strict=True):
        out &= ~np.isnan(np.take_along_axis(logits, top[:, None], axis=1)[:, 0])


def soft_cap(logits: np.ndarray, cap: float, out: np.ndarray) -> None:
    """See `nbflow_kernels.soft_cap`."""
    n = logits.size
    hold(logits, out)
    parallel_for(_soft_cap, -(-n // BLOCK), _COST * n, address_of(logits), n, cap, address_of(out))


def masked_softmax(scores, mask, bias, sm_scale, cap, causal, out):
    """See `nbflow_kernels.masked_softmax`.

    `scores` and `out` are (B, H, Tq, Tk); `mask` and `bias` have these axes too, with any strides
    but for the last axis, which is contiguous.
    """
    B, H, Tq, Tk = scores.shape
    hold(scores, mask, bias, out)
    parallel_for(
        _masked_softmax, B * H * Tq, 1.5 * _COST * scores.size,
        address_of(scores), *_places(mask), *_places(bias), H, Tq, Tk, sm_scale, cap, causal,
        address_of(out),
    )  # fmt: skip


def _places(x: np.ndarray | None) -> tuple[int, int, int, int]:
    """Return the address of an array of four axes and its first three strides; 0 for none."""
    if x is None:
        return 0, 0, 0, 0
    return address_of(x), x.strides[0], x.strides[1], x.strides[2]


@jit.device_function(inline="llvm")
def _capped(v, cap):
    """Return cap * tanh(v / cap), or `v` for a cap of 0 or None."""
    if cap is None or cap == 0.0:
        return v
    return simd.mul(tanh(simd.div(v, simd.splat(cap))), simd.splat(cap))


@jit.device_function(inline="llvm")
def _nan_sign(v):
    """Return int32 lanes that are negative where `v` is NaN."""
    magnitude = simd.and_(simd.as_i32(v), simd.splat_i32(0x7FFFFFFF))
    return simd.sub(simd.splat_i32(0x7F800000), magnitude)


@jit.device_function
def _top(row, n):
    """Return the largest of the `n` elements at `row`, NaN if one is NaN or the largest infinite.

    A row without an element above -inf has no distribution either: it gives NaN.
    """
    top = simd.splat(-np.inf)
    sign = simd.splat_i32(0)
    body = n - n % 16
    for d in range(0, body, 16):
        x = simd.load_f32(row + 4 * d)
        top = simd.maximum(top, x)
        sign = simd.or_(sign, _nan_sign(x))
    bad = simd.max(simd.to_f32(simd.shr(sign, simd.splat_i32(31)))) > 0.0
    largest = simd.max(top)
    for d in range(body, n):
        y = read_f32(row + 4 * d)
        bad = bad or y != y
        largest = max(largest, y)
    if bad or largest == np.inf or largest <= LOWEST:
        return np.float32(np.nan)
    return largest


@jit.device_function
def _end(row, n, stage):
    """Copy the last n % 16 elements at `row` to `stage`, padded with -inf."""
    body = n - n % 16
    for d in range(16):
        write_f32(stage + 4 * d, read_f32(row + 4 * (body + d)) if body + d < n else -np.inf)


@jit.device_function(inline="llvm")
def _seen(x):
    """Return 0 where `x` is the lowest finite number, else 1."""
    return simd.minimum(simd.sub(x, simd.splat(LOWEST)), simd.splat(1.0))


@jit.device_function
def _exps(row, n, top, factor, cap):
    """Return the sum of exp((c(x) - top) * factor) for `n` elements, a multiple of 16."""
    total = simd.splat(0.0)
    for d in range(0, n, 16):
        x = simd.maximum(_capped(simd.load_f32(row + 4 * d), cap), simd.splat(LOWEST))
        u = simd.mul(simd.sub(x, simd.splat(top)), simd.splat(factor))
        total = simd.fma(simd.exp(u), _seen(x), total)
    return simd.sum(total)


@jit.device_function
def _sum_exp(row, n, top, factor, cap):
    """Return the sum of exp((c(x) - top) * factor) in float64; c caps, `top` is capped."""
    total = 0.0
    body = n - n % 16
    for d in range(0, body, BLOCK):
        total += np.float64(_exps(row + 4 * d, min(BLOCK, body - d), top, factor, cap))
    for d in range(body, n):
        x = _capped_one(read_f32(row + 4 * d), cap)
        total += np.exp(np.float64((x - top) * factor))
    return total


@jit.device_function
def _capped_one(x, cap):
    """Return one logit after the cap."""
    return simd.max(_capped(simd.splat(x), cap))


@jit.device_function
def _top_and_sum(row, n, factor, cap):
    """Return the largest element, capped, and the sum of the others' exponentials relative to it.

    The largest is NaN for a row without a distribution.
    """
    top = _top(row, n)
    if top != top:
        return top, 1.0
    top = _capped_one(top, cap)
    return top, _sum_exp(row, n, top, factor, cap)


@jit.kernel
def _log_softmax(logits, V, temperature, cap, out, start, stop):
    body = V - V % 16
    for b in range(start, stop):
        row, target = logits + 4 * V * b, out + 4 * V * b
        factor = np.float32(1.0) / read_f32(temperature + 4 * b)
        top, total = _top_and_sum(row, V, factor, cap)
        # x - top first: elements near the top keep their precision
        shift = simd.splat(-np.log(total))
        for d in range(0, body, 16):
            x = simd.sub(_capped(simd.load_f32(row + 4 * d), cap), simd.splat(top))
            simd.store_f32(target + 4 * d, simd.fma(x, simd.splat(factor), shift))
        for d in range(body, V):
            y = np.float64(_capped_one(read_f32(row + 4 * d), cap) - top) * np.float64(factor)
            write_f32(target + 4 * d, y - np.log(total))


@jit.kernel(unroll=False)
def _token_log_probs(logits, V, temperature, cap, ids, out, start, stop):
    for b in range(start, stop):
        row = logits + 4 * V * b
        factor = np.float32(1.0) / read_f32(temperature + 4 * b)
        top, total = _top_and_sum(row, V, factor, cap)
        for i in range(ids.shape[1]):
            x = np.float64(_capped_one(read_f32(row + 4 * np.int64(ids[b, i])), cap))
            out[b, i] = (x - np.float64(top)) * np.float64(factor) - np.log(total)


@jit.device_function
def _add_kl_sums(p, q, n, top_p, top_q, sums):
    """Add to `sums` those over `n` elements, a multiple of 16, of four terms.

    With a = exp(p - top_p): a; exp(q - top_q); a * ((p - top_p) - (q - top_q)); a where q is -inf.
    """
    low = simd.splat(LOWEST)
    sum_p = sum_q = product = lost = simd.splat(0.0)
    for d in range(0, n, 16):
        x = simd.maximum(simd.load_f32(p + 4 * d), low)
        y = simd.maximum(simd.load_f32(q + 4 * d), low)
        u, v = simd.sub(x, simd.splat(top_p)), simd.sub(y, simd.splat(top_q))
        seen_q = _seen(y)
        a = simd.mul(simd.exp(u), _seen(x))
        sum_p = simd.add(sum_p, a)
        sum_q = simd.fma(simd.exp(v), seen_q, sum_q)
        product = simd.fma(a, simd.mul(simd.sub(u, v), seen_q), product)
        lost = simd.fma(a, simd.sub(simd.splat(1.0), seen_q), lost)
    sums[0] += np.float64(simd.sum(sum_p))
    sums[1] += np.float64(simd.sum(sum_q))
    sums[2] += np.float64(simd.sum(product))
    sums[3] += np.float64(simd.sum(lost))


@jit.kernel
def _kl_divergence(p, q, V, out, start, stop):
    scratch = np.zeros(32, np.float32)
    sums = np.zeros(4, np.float64)
    stage = simd.address(scratch)
    body = V - V % 16
    for b in range(start, stop):
        row_p, row_q = p + 4 * V * b, q + 4 * V * b
        top_p, top_q = _top(row_p, V), _top(row_q, V)
        if top_p != top_p or top_q != top_q:
            out[b] = np.nan
            continue
        sums[:] = 0.0
        for d in range(0, body, BLOCK):
            n = min(BLOCK, body - d)
            _add_kl_sums(row_p + 4 * d, row_q + 4 * d, n, top_p, top_q, sums)
        if body < V:
            _end(row_p, V, stage)
            _end(row_q, V, stage + 64)
            _add_kl_sums(stage, stage + 64, 16, top_p, top_q, sums)
        divergence = sums[2] / sums[0] + np.log(sums[1] / sums[0])
        # rounding may give slightly less than 0
        out[b] = np.inf if sums[3] > 0.0 else max(divergence, 0.0)


@jit.kernel
def _soft_cap(logits, n, cap, out, start, stop):
    """Cap blocks [start, stop) of `BLOCK` elements."""
    for d in range(start * BLOCK, min(stop * BLOCK, n), 16):
        if d + 16 <= n:
            simd.store_f32(out + 4 * d, _capped(simd.load_f32(logits + 4 * d), cap))
        else:
            for i in range(d, n):
                write_f32(out + 4 * i, _capped_one(read_f32(logits + 4 * i), cap))


@jit.device_function
def _score(x, bias, mask, has_bias, sm_scale, cap):
    """Return 16 scores, scaled, capped, with bias; -inf where `mask` (int32) is 0."""
    s = _capped(simd.mul(x, simd.splat(sm_scale)), cap)
    if has_bias:
        s = simd.add(s, simd.load_f32(bias))
    return select(mask, s, simd.splat(-np.inf))


@jit.device_function
def _write_scores(row, mask, bias, n, Tk, sm_scale, cap, scratch, marks, out):
    """Write `n` masked scores and -inf up to the next multiple of 16; return the end.

    It ends with the row at the latest, and then its ragged end goes through `scratch` (float32) and
    `marks` (uint8).
    """
    stage, lanes = simd.address(scratch), simd.load_u8(simd.address(marks) + 16)
    for d in range(0, n, 16):
        row_at, bias_at, mask_at, out_at = row + 4 * d, bias + 4 * d, mask + d, out + 4 * d
        if d + 16 > Tk:
            for i in range(16):
                inside = d + i < Tk
                scratch[i] = read_f32(row_at + 4 * i) if inside else 0.0
                scratch[16 + i] = read_f32(bias_at + 4 * i) if inside and bias != 0 else 0.0
                marks[i] = read_u8(mask_at + i) if inside and mask != 0 else 0
            row_at, bias_at, mask_at, out_at = stage, stage + 64, simd.address(marks), stage
        # 1 in the lanes below n - d
        seen = simd.shr(simd.sub(lanes, simd.splat_i32(n - d)), simd.splat_i32(31))
        if mask != 0:
            seen = simd.and_(seen, simd.load_u8(mask_at))
        s = _score(simd.load_f32(row_at), bias_at, seen, bias != 0, sm_scale, cap)
        simd.store_f32(out_at, s)
        if d + 16 > Tk:
            for i in range(Tk - d):
                write_f32(out + 4 * (d + i), scratch[i])
    return min(n + (16 - n % 16) % 16, Tk)


@jit.device_function
def _normalize(row, n, top, scratch):
    """Replace `n` scores by their softmax, in place."""
    stage = simd.address(scratch)
    body = n - n % 16
    total = 0.0
    minus = simd.splat(top)
    for d in range(0, n, BLOCK):
        part = simd.splat(0.0)
        for i in range(d, min(d + BLOCK, n), 16):
            at = row + 4 * i
            if i == body:
                _end(row, n, stage)
                at = stage
            x = simd.maximum(simd.load_f32(at), simd.splat(LOWEST))
            e = simd.mul(simd.exp(simd.sub(x, minus)), _seen(x))
            simd.store_f32(at, e)
            part = simd.add(part, e)
        total += np.float64(simd.sum(part))
    factor = np.float32(1.0 / total)
    for d in range(0, body, 16):
        simd.store_f32(row + 4 * d, simd.mul(simd.load_f32(row + 4 * d), simd.splat(factor)))
    for d in range(body, n):
        write_f32(row + 4 * d, scratch[d - body] * factor)


@jit.device_function
def _clear(row, n):
    """Write `n` zeros."""
    body = n - n % 16
    for d in range(0, body, 16):
        simd.store_f32(row + 4 * d, simd.splat(0.0))
    for d in range(body, n):
        write_f32(row + 4 * d, 0.0)


@jit.kernel
def _masked_softmax(
    scores, mask, mask_b, mask_h, mask_i, bias, bias_b, bias_h, bias_i, H, Tq, Tk, sm_scale, cap,
    causal, out, start, stop
):  # fmt: skip
    scratch = np.zeros(32, np.float32)
    marks = np.arange(-16, 16).astype(np.uint8)  # 16 bytes for a mask, then 0..15
    for r in range(start, stop):
        i, h, b = r % Tq, r // Tq % H, r // (Tq * H)
        row, target = scores + 4 * Tk * r, out + 4 * Tk * r
        n = max(min(Tk, Tk - Tq + i + 1), 0) if causal else Tk
        mask_at = mask + b * mask_b + h * mask_h + i * mask_i
        bias_at = bias + b * bias_b + h * bias_h + i * bias_i
        n = _write_scores(row, mask_at, bias_at, n, Tk, sm_scale, cap, scratch, marks, target)
        top = _top(target, n)
        if top == top:
            _normalize(target, n, top, scratch)
        else:
            # a fully masked row gives zeros, a NaN or infinite score NaN
            blind = True
            for d in range(n):
                blind = blind and read_f32(target + 4 * d) <= LOWEST
            for d in range(n):
                write_f32(target + 4 * d, 0.0 if blind else np.nan)
        _clear(target + 4 * n, Tk - n)

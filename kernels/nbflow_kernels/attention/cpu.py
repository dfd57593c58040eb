"""Attention on the CPU: one kernel for prefill, decode and mixtures of them.

A work item is a tile: some consecutive query rows of one request and all query heads that share one
key/value head.  The tile walks over its keys in chunks of 64, counted from the start of the
sequence, with the online softmax of FlashAttention.  Whatever the tile, the batch, the page size or
the team of threads, the additions that lead to one output element are the same and in the same
order, so a row's result is the same bit for bit.

The kernel takes addresses and byte strides: it is compiled once for all layouts and element types.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import njit
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.lanes import (
    address_of,
    prefetch,
    read_f16,
    read_f32,
    read_i64,
    read_u8,
    store_halves,
    sum16,
    write_f32,
)
from nbflow_kernels.threads import split_rows

CHUNK = 64
"""Keys per step of the online softmax; part of the result's bits, not only of its speed."""

# The score of a key that a row does not see.  Finite, so that NaN and infinity remain detectable.
HIDDEN = np.float32(-1e30)
LOG2_E = 1.4426950408889634
# Above this many query vectors a chunk is copied to aligned memory before it is read that often.
PACK_FROM = 8


def batch_attention(
    plan: AttentionPlan,
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
) -> None:
    """Attend as `plan` says: the fast path below `BatchPrefillWithPagedKVCacheWrapper.run`.

    Nothing is checked.  `q` (nnz, H, D) float32 may have rows far apart; `k_cache` and `v_cache`
    have equal strides, are float32 or float16 and lie as `plan.kv_layout` says; `out` (nnz, H, D)
    and `lse` (nnz, H) are contiguous.
    """
    attend(plan, q, k_cache, v_cache, out, lse, None)


def attend(
    plan: AttentionPlan,
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    visible: np.ndarray | None,
) -> None:
    """See `batch_attention`; `visible` is a contiguous (rows, keys) mask for one request."""
    strides = k_cache.strides
    token, head = (1, 2) if plan.kv_layout == "NHD" else (2, 1)
    split_rows(
        _attend,
        len(plan.items),
        plan.work,
        plan.items,
        plan.kv_indptr,
        plan.kv_indices,
        plan.kv_lens,
        plan.sizes,
        plan.sm_scale,
        plan.logits_soft_cap,
        address_of(q),
        q.strides[0],
        address_of(k_cache),
        address_of(v_cache),
        strides[0],
        strides[token],
        strides[head],
        k_cache.itemsize,
        address_of(out),
        0 if lse is None else address_of(lse),
        0 if visible is None else address_of(visible),
    )


def merge_state(
    v_a: np.ndarray,
    s_a: np.ndarray,
    v_b: np.ndarray,
    s_b: np.ndarray,
    v_out: np.ndarray,
    s_out: np.ndarray,
) -> None:
    """See `nbflow_kernels.merge_state`."""
    T, H, D = v_a.shape
    rows = [a.reshape(T * H, D) for a in (v_a, v_b, v_out)]
    sums = [a.reshape(T * H) for a in (s_a, s_b, s_out)]
    split_rows(_merge, T * H, 4.0 * T * H * D, *rows, *sums)


# ---- kernels: `rows` below are query vectors, one per query row and query head of a tile -------


@njit
def _copy_row(source: Any, itemsize: Any, n: Any, factor: Any, target: Any, padded: Any) -> None:
    """Copy n elements times `factor` to float32, and zeros up to `padded`."""
    times = simd.splat(factor)
    d = 0
    while d + 16 <= n:
        if itemsize == 2:
            simd.store_f32(target + 4 * d, simd.mul(simd.load_f16(source + 2 * d), times))
        else:
            simd.store_f32(target + 4 * d, simd.mul(simd.load_f32(source + 4 * d), times))
        d += 16
    while d < n:
        x = read_f16(source + 2 * d) if itemsize == 2 else read_f32(source + 4 * d)
        write_f32(target + 4 * d, x * np.float32(factor))
        d += 1
    while d < padded:
        write_f32(target + 4 * d, np.float32(0.0))
        d += 1


@njit
def _find_keys(
    pages: Any,
    at: Any,
    first: Any,
    last: Any,
    page_size: Any,
    page_bytes: Any,
    token_bytes: Any,
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
) -> None:
    """Write the addresses of keys and values [first, last) of the chunk from key `at` on."""
    page = (at + first) // page_size
    slot = at + first - page * page_size
    base = pages[page] * page_bytes + slot * token_bytes
    for j in range(first, last):
        if slot == page_size:
            page += 1
            slot = 0
            base = pages[page] * page_bytes
        keys[j] = k + base
        values[j] = v + base
        slot += 1
        base += token_bytes


@njit
def _prefetch_rows(rows: Any, first: Any, last: Any, n_bytes: Any) -> None:
    """Ask for rows of one head: far apart, so the hardware does not see the next coming."""
    for j in range(first, last):
        for d in range(0, n_bytes, 64):
            prefetch(rows[j] + d)


@njit
def _pack(
    rows: Any, first: Any, last: Any, itemsize: Any, D: Any, target: Any, padded: Any
) -> None:
    """Copy rows [first, last) to float32 rows at `target`, and let `rows` point there."""
    for j in range(first, last):
        place = target + 4 * padded * j
        _copy_row(rows[j], itemsize, D, 1.0, place, padded)
        rows[j] = place


@njit
def _score(
    q_a: Any, q_b: Any, keys: Any, first: Any, last: Any, n_bytes: Any, s_a: Any, s_b: Any
) -> None:
    """Write the dot products of two query vectors with keys [first, last), eight at a time."""
    for j in range(first, last, 8):
        at = keys + 8 * j
        k0, k1, k2, k3 = read_i64(at), read_i64(at + 8), read_i64(at + 16), read_i64(at + 24)
        at += 32
        k4, k5, k6, k7 = read_i64(at), read_i64(at + 8), read_i64(at + 16), read_i64(at + 24)
        zero = simd.splat(0.0)
        a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
        b0, b1, b2, b3, b4, b5, b6, b7 = zero, zero, zero, zero, zero, zero, zero, zero
        for d in range(0, n_bytes, 64):
            x, y = simd.load_f32(q_a + d), simd.load_f32(q_b + d)
            key = simd.load_f32(k0 + d)
            a0, b0 = simd.fma(x, key, a0), simd.fma(y, key, b0)
            key = simd.load_f32(k1 + d)
            a1, b1 = simd.fma(x, key, a1), simd.fma(y, key, b1)
            key = simd.load_f32(k2 + d)
            a2, b2 = simd.fma(x, key, a2), simd.fma(y, key, b2)
            key = simd.load_f32(k3 + d)
            a3, b3 = simd.fma(x, key, a3), simd.fma(y, key, b3)
            key = simd.load_f32(k4 + d)
            a4, b4 = simd.fma(x, key, a4), simd.fma(y, key, b4)
            key = simd.load_f32(k5 + d)
            a5, b5 = simd.fma(x, key, a5), simd.fma(y, key, b5)
            key = simd.load_f32(k6 + d)
            a6, b6 = simd.fma(x, key, a6), simd.fma(y, key, b6)
            key = simd.load_f32(k7 + d)
            a7, b7 = simd.fma(x, key, a7), simd.fma(y, key, b7)
        sums = sum16(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        store_halves(s_a + 4 * j, s_b + 4 * j, sums)


@njit
def _mix(
    acc_a: Any,
    acc_b: Any,
    shrink_a: Any,
    shrink_b: Any,
    p_a: Any,
    p_b: Any,
    values: Any,
    first: Any,
    last: Any,
    n_bytes: Any,
) -> None:
    """Shrink two accumulators and add the values [first, last) times their weights, in order."""
    scale_a, scale_b = simd.splat(shrink_a), simd.splat(shrink_b)
    d = 0
    while d + 256 <= n_bytes:
        a0 = simd.mul(simd.load_f32(acc_a + d), scale_a)
        a1 = simd.mul(simd.load_f32(acc_a + d + 64), scale_a)
        a2 = simd.mul(simd.load_f32(acc_a + d + 128), scale_a)
        a3 = simd.mul(simd.load_f32(acc_a + d + 192), scale_a)
        b0 = simd.mul(simd.load_f32(acc_b + d), scale_b)
        b1 = simd.mul(simd.load_f32(acc_b + d + 64), scale_b)
        b2 = simd.mul(simd.load_f32(acc_b + d + 128), scale_b)
        b3 = simd.mul(simd.load_f32(acc_b + d + 192), scale_b)
        for j in range(first, last):
            at = read_i64(values + 8 * j) + d
            x, y = simd.splat(read_f32(p_a + 4 * j)), simd.splat(read_f32(p_b + 4 * j))
            value = simd.load_f32(at)
            a0, b0 = simd.fma(x, value, a0), simd.fma(y, value, b0)
            value = simd.load_f32(at + 64)
            a1, b1 = simd.fma(x, value, a1), simd.fma(y, value, b1)
            value = simd.load_f32(at + 128)
            a2, b2 = simd.fma(x, value, a2), simd.fma(y, value, b2)
            value = simd.load_f32(at + 192)
            a3, b3 = simd.fma(x, value, a3), simd.fma(y, value, b3)
        simd.store_f32(acc_a + d, a0)
        simd.store_f32(acc_a + d + 64, a1)
        simd.store_f32(acc_a + d + 128, a2)
        simd.store_f32(acc_a + d + 192, a3)
        simd.store_f32(acc_b + d, b0)
        simd.store_f32(acc_b + d + 64, b1)
        simd.store_f32(acc_b + d + 128, b2)
        simd.store_f32(acc_b + d + 192, b3)
        d += 256
    while d < n_bytes:
        a0 = simd.mul(simd.load_f32(acc_a + d), scale_a)
        b0 = simd.mul(simd.load_f32(acc_b + d), scale_b)
        for j in range(first, last):
            value = simd.load_f32(read_i64(values + 8 * j) + d)
            a0 = simd.fma(simd.splat(read_f32(p_a + 4 * j)), value, a0)
            b0 = simd.fma(simd.splat(read_f32(p_b + 4 * j)), value, b0)
        simd.store_f32(acc_a + d, a0)
        simd.store_f32(acc_b + d, b0)
        d += 64


@njit
def _soft_cap(s: Any, cap: Any) -> Any:
    """Return cap * tanh(s / cap) lane by lane; a NaN stays one."""
    one = simd.splat(1.0)
    e = simd.exp(simd.mul(s, simd.splat(2.0 / cap)))
    tanh = simd.sub(one, simd.div(simd.splat(2.0), simd.add(e, one)))
    return simd.fma(s, simd.splat(0.0), simd.mul(simd.splat(cap), tanh))


@njit
def _weigh(s: Any, first: Any, last: Any, visible: Any, cap: Any, old_top: Any) -> Any:
    """Turn the 64 scores at `s` into weights exp(score - top); return top and the weights' sum.

    Keys outside [first, last), and those where the mask at `visible` is 0, get weight 0.
    """
    if cap > 0.0:
        for i in range(0, 4 * CHUNK, 64):
            simd.store_f32(s + i, _soft_cap(simd.load_f32(s + i), cap))
    for j in range(first):
        write_f32(s + 4 * j, HIDDEN)
    for j in range(last, CHUNK):
        write_f32(s + 4 * j, HIDDEN)
    if visible != 0:
        for j in range(first, last):
            if read_u8(visible + j) == 0:
                write_f32(s + 4 * j, HIDDEN)
    top = old_top
    for i in range(0, 4 * CHUNK, 64):
        top = max(top, simd.max(simd.load_f32(s + i)))
    zero, one, hidden, shift = (
        simd.splat(0.0),
        simd.splat(1.0),
        simd.splat(HIDDEN),
        simd.splat(top),
    )
    total = zero
    for i in range(0, 4 * CHUNK, 64):
        x = simd.load_f32(s + i)
        # 0 for a hidden key, else 1: visible scores are far above HIDDEN
        seen = simd.minimum(simd.sub(x, hidden), one)
        p = simd.mul(simd.exp(simd.sub(x, shift)), seen)
        simd.store_f32(s + i, p)
        # simd.max and simd.exp drop a NaN; x * 0 brings it back into the sum
        total = simd.add(total, simd.fma(x, zero, p))
    return top, simd.sum(total)


@njit
def _finish(acc: Any, top: Any, total: Any, D: Any, out: Any, lse: Any) -> None:
    """Divide an accumulator by the sum of its weights; write D elements and the base-2 LSE."""
    inverse = np.float32(0.0)
    if total != 0.0:
        inverse = np.float32(1.0) / total
    _copy_row(acc, 4, D, inverse, out, D)
    if lse != 0:
        if total == 0.0:
            write_f32(lse, -np.inf)
        else:
            write_f32(lse, np.float64(top) * LOG2_E + math.log2(np.float64(total)))


@njit
def _attend_chunk(
    M: Any,
    group: Any,
    at: Any,
    low: Any,
    high: Any,
    tile: Any,
    keys: Any,
    values: Any,
    state: Any,
    spans: Any,
    cap: Any,
    visible: Any,
    mask_row_bytes: Any,
) -> None:
    """Add the chunk of keys from key `at` on to the accumulators of M query vectors."""
    q, acc, s, row_bytes = tile
    for m in range(M):
        spans[0, m] = max(low[m // group] - at, 0)
        spans[1, m] = min(high[m // group] - at, CHUNK)
    for m in range(0, M, 2):
        n = min(m + 1, M - 1)
        first = min(spans[0, m], spans[0, n]) // 8 * 8
        last = max(spans[1, m], spans[1, n])
        q_m, q_n = q + m * row_bytes, q + n * row_bytes
        s_m, s_n = s + 4 * CHUNK * m, s + 4 * CHUNK * n
        _score(q_m, q_n, simd.address(keys), first, last, row_bytes, s_m, s_n)
    for m in range(M):
        first, last = spans[0, m], spans[1, m]
        if first < last:
            row_mask = 0 if visible == 0 else visible + (m // group) * mask_row_bytes + at
            old = state[0, m]
            top, total = _weigh(s + 4 * CHUNK * m, first, last, row_mask, cap, old)
            shrink = np.float32(1.0)
            if top != old:
                shrink = np.float32(math.exp(np.float64(old) - np.float64(top)))
            # float64: the product is exact, so it does not matter whether it is fused
            state[1, m] = np.float64(state[1, m]) * np.float64(shrink) + np.float64(total)
            state[0, m] = top
            state[2, m] = shrink
    for m in range(0, M, 2):
        n = min(m + 1, M - 1)
        together = spans[0, m] == spans[0, n] and spans[1, m] == spans[1, n]
        for a in range(m, m + 1 if together else n + 1):
            b = n if together else a
            first, last = spans[0, a], spans[1, a]
            if first < last:
                acc_a, acc_b = acc + a * row_bytes, acc + b * row_bytes
                s_a, s_b = s + 4 * CHUNK * a, s + 4 * CHUNK * b
                _mix(
                    acc_a,
                    acc_b,
                    state[2, a],
                    state[2, b],
                    s_a,
                    s_b,
                    simd.address(values),
                    first,
                    last,
                    row_bytes,
                )


@njit
def _attend(
    items: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_lens: Any,
    sizes: Any,
    scale: Any,
    cap: Any,
    q: Any,
    q_row_bytes: Any,
    k: Any,
    v: Any,
    page_bytes: Any,
    token_bytes: Any,
    head_bytes: Any,
    itemsize: Any,
    out: Any,
    lse: Any,
    visible: Any,
    start: Any,
    stop: Any,
) -> None:
    """Work on items [start, stop); see `plan.AttentionPlan` for `items` and `sizes`."""
    H, G, D, page_size, window, causal, tile_rows = sizes
    group = H // G
    padded = (D + 15) // 16 * 16  # rows in the tile's memory are padded with zeros
    most = tile_rows * group
    memory = np.empty(most * (2 * padded + CHUNK) + 2 * CHUNK * padded + 16, np.float32)
    q_tile = (simd.address(memory) + 63) // 64 * 64
    acc = q_tile + 4 * most * padded
    scores = acc + 4 * most * padded
    packed = scores + 4 * most * CHUNK
    state = np.empty((3, most), np.float32)  # top, sum of weights, last shrink factor
    spans = np.empty((2, most), np.int64)
    low, high = np.empty(tile_rows, np.int64), np.empty(tile_rows, np.int64)
    keys, values = np.empty((2, CHUNK), np.int64), np.empty((2, CHUNK), np.int64)

    for item in range(start, stop):
        request, row, n_rows, head = items[item, 0], items[item, 1], items[item, 2], items[item, 3]
        position = np.int64(items[item, 4])
        kv_len = np.int64(kv_lens[request])
        pages = kv_indptr[request]
        M = n_rows * group
        for i in range(n_rows):
            high[i] = min(kv_len, position + i + 1) if causal else kv_len
            low[i] = max(0, position + i - window) if window >= 0 else 0
        for m in range(M):
            source = q + (row + m // group) * q_row_bytes + 4 * D * (head * group + m % group)
            _copy_row(source, 4, D, scale, q_tile + 4 * padded * m, padded)
            for d in range(0, 4 * padded, 64):
                simd.store_f32(acc + 4 * padded * m + d, simd.splat(0.0))
            state[0, m] = HIDDEN
            state[1, m] = 0.0
        aligned = (k | v | page_bytes | token_bytes | head_bytes) % 64 == 0
        pack = itemsize == 2 or padded != D or (M >= PACK_FROM and not aligned)
        begin, end = low[0], high[n_rows - 1]
        k_head, v_head = k + head * head_bytes, v + head * head_bytes
        for at in range(begin // CHUNK * CHUNK - CHUNK, end, CHUNK):
            # the addresses of the next chunk, which is on its way while this one is worked on;
            # only keys that some row sees have addresses: others may lie on pages given back
            ahead = (at // CHUNK + 1) % 2
            first, last = max(begin - at - CHUNK, 0), min(end - at - CHUNK, CHUNK)
            if first < last:
                _find_keys(
                    kv_indices[pages:],
                    at + CHUNK,
                    first,
                    last,
                    page_size,
                    page_bytes,
                    token_bytes,
                    k_head,
                    v_head,
                    keys[ahead],
                    values[ahead],
                )
                _prefetch_rows(keys[ahead], first, last, itemsize * D)
                _prefetch_rows(values[ahead], first, last, itemsize * D)
            if at < begin // CHUNK * CHUNK:
                continue
            first, last = max(begin - at, 0), min(end - at, CHUNK)
            now_keys, now_values = keys[1 - ahead], values[1 - ahead]
            if pack:
                _pack(now_keys, first, last, itemsize, D, packed, padded)
                _pack(now_values, first, last, itemsize, D, packed + 4 * CHUNK * padded, padded)
            for j in range(first // 8 * 8, first):
                now_keys[j] = now_keys[first]
            for j in range(last, (last + 7) // 8 * 8):
                now_keys[j] = now_keys[last - 1]
            mask = 0 if visible == 0 else visible + row * kv_len
            tile = (q_tile, acc, scores, 4 * padded)
            _attend_chunk(
                M, group, at, low, high, tile, now_keys, now_values, state, spans, cap, mask, kv_len
            )
        for m in range(M):
            place = (row + m // group) * H + head * group + m % group
            place_lse = 0 if lse == 0 else lse + 4 * place
            _finish(
                acc + 4 * padded * m, state[0, m], state[1, m], D, out + 4 * D * place, place_lse
            )
    memory[0] = 0.0  # a last use: the array is freed after its last use, addresses do not count


@njit
def _merge(
    v_a: Any, v_b: Any, v_out: Any, s_a: Any, s_b: Any, s_out: Any, start: Any, stop: Any
) -> None:
    for row in range(start, stop):
        a, b = np.float64(s_a[row]), np.float64(s_b[row])
        top = max(a, b)
        if top == -np.inf:
            v_out[row, :] = 0.0
            s_out[row] = -np.inf
            continue
        weight_a, weight_b = 2.0 ** (a - top), 2.0 ** (b - top)
        total = weight_a + weight_b
        s_out[row] = top + math.log2(total)
        for d in range(v_a.shape[1]):
            mixed = weight_a * v_a[row, d] + weight_b * v_b[row, d]
            v_out[row, d] = mixed / total

"""The work of one item of an attention plan, whatever the elements of the cache are.

An item is a tile: some consecutive query rows of one request and all query heads that share one
key/value head, with a range of keys.  The tile walks over its keys in chunks of 64 counted from the
start of the sequence, with the online softmax of FlashAttention; after every `SPLIT_KEYS` keys the
sums start anew, and the partial results are added in order.  Whatever the tile, the batch, the page
size, the team of threads and the division into items, the additions that lead to one output element
are the same and in the same order, so a row's result is the same bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.core import types
from numba.core.extending import overload

from nbflow_kernels import simd
from nbflow_kernels._jit import njit, part
from nbflow_kernels.attention import layout as at
from nbflow_kernels.attention.layout import CHUNK
from nbflow_kernels.attention.tiles import (
    F32,
    HIDDEN,
    ROW,
    copy_floats,
    exp1,
    fold,
    hide,
    mix_two,
    prefetch_rows,
    score_1x16,
    score_4x4,
    soft_cap,
    weigh,
)
from nbflow_kernels.lanes import read_f32, read_i32, read_i64, write_f32
from nbflow_kernels.position.cpu import _rotate_halves as rotate_halves

LOG2_E = 1.4426950408889634


def copy_row(source: Any, kind: Any, row: Any, n: Any, target: Any, padded: Any) -> None:
    """Copy one head vector to float32; the type of the scalar `source` tells what it may be."""
    raise NotImplementedError("only inside kernels")


@overload(copy_row, inline="always", strict=False)
def _copy_row_overload(source: Any, kind: Any, row: Any, n: Any, target: Any, padded: Any) -> Any:
    if source == types.float32:
        return lambda source, kind, row, n, target, padded: copy_floats(
            kind, row, n, 1.0, target, padded
        )
    if source == types.uint8:
        from nbflow_kernels.kvcache.rows import copy_row as decode

        return lambda source, kind, row, n, target, padded: decode(
            kind, row, n, 1.0, target, padded
        )
    return lambda source, kind, row, n, target, padded: None  # rows are read where they lie


@part
def find_rows(
    pages: Any, page_size: Any, first: Any, last: Any, base: Any, k: Any, v: Any, strides: Any,
    keys: Any, values: Any,
) -> None:  # fmt: skip
    """Write the addresses of the keys and values [first, last) into tables that begin at `base`."""
    at = first
    while at < last:
        page = at // page_size
        slot = at - page * page_size
        number = read_i32(pages + 4 * page)
        key = k + number * strides[0] + slot * strides[1]
        value = v + number * strides[4] + slot * strides[5]
        count = min(page_size - slot, last - at)
        for i in range(count):
            keys[at - base + i] = key + i * strides[1]
            values[at - base + i] = value + i * strides[5]
        at += count


@part
def bytes_to_fetch(
    M: Any, rows: Any, ahead: Any, base: Any, first: Any, last: Any, end: Any, n_bytes: Any
) -> Any:
    """Return how much of each of the rows [last, end) of the next chunk to ask for: all or nothing.

    Memory that is read from end to end comes by itself, and faster so.  What lies elsewhere (on
    another page, or one head's rows among those of others) would have to be waited for, and so
    would everything where the work on a chunk takes longer than to read it.
    """
    next_base = last // CHUNK * CHUNK
    begin, stop = ahead[last - next_base], ahead[end - 1 - next_base]
    goes_on = (
        begin == rows[last - 1 - base] + n_bytes and stop == begin + (end - 1 - last) * n_bytes
    )
    return 0 if goes_on and M == 1 else n_bytes


@part
def score_chunk(
    like: Any, M: Any, q: Any, row_bytes: Any, keys: Any, spans: Any, s: Any, room: Any,
    ahead: Any, bytes_k: Any, bytes_v: Any,
) -> None:  # fmt: skip
    """Write the scores of a chunk; ask for rows of the next one meanwhile."""
    next_keys, next_values, next_first, next_last = ahead
    low, high = spans[0, 0], spans[1, 0]
    for i in range(1, M):
        low, high = min(low, spans[0, i]), max(high, spans[1, i])
    table = simd.address(keys)
    for j in range(low // 16 * 16, high, 16):
        first, last = max(j, next_first), min(j + 16, next_last)
        prefetch_rows(next_keys, first, last, bytes_k)
        prefetch_rows(next_values, first, last, bytes_v)
        m = np.int64(0)
        while m + 4 <= M:
            first = min(min(spans[0, m], spans[0, m + 1]), min(spans[0, m + 2], spans[0, m + 3]))
            last = max(max(spans[1, m], spans[1, m + 1]), max(spans[1, m + 2], spans[1, m + 3]))
            for i in range(max(j, first // 4 * 4), min(j + 16, last), 4):
                score_4x4(like, q + m * row_bytes, row_bytes, table + 8 * i, s + m * ROW + 4 * i)
            m += 4
        while m < M:
            if spans[0, m] < j + 16 and spans[1, m] > j:
                score_1x16(like, q + m * row_bytes, row_bytes, table + 8 * j,
                           min(spans[1, m] - j, 16), room, s + m * ROW + 4 * j)  # fmt: skip
            m += 1


@part
def mix_chunk(
    like: Any, M: Any, acc: Any, row_bytes: Any, state: Any, spans: Any, s: Any, values: Any,
    step: Any,
) -> None:  # fmt: skip
    """Add a chunk's values to the accumulators, `step` keys at a time.

    Two query vectors go together over the keys that both see; each goes alone over its keys before
    and behind these.
    """
    table = simd.address(values)
    for j in range(0, CHUNK, step):
        for a in range(0, M, 2):
            b = min(a + 1, M - 1)
            low, high = max(spans[0, a], spans[0, b]), min(spans[1, a], spans[1, b])
            for turn in range(5):
                # before: a alone, b alone; both together; behind: a alone, b alone
                m = b if turn == 1 or turn == 4 else a
                n = a if turn == 0 or turn == 3 else b
                first, last = low, high
                if turn < 2:
                    first, last = spans[0, m], min(spans[1, m], low)
                elif turn > 2:
                    first, last = max(spans[0, m], high), spans[1, m]
                first, last = max(first, j), min(last, j + step)
                if first < last:
                    mix_two(like, acc + m * row_bytes, acc + n * row_bytes, row_bytes,
                            state[2, m], state[2, n], s + m * ROW, s + n * ROW, table, first,
                            last)  # fmt: skip
                    state[2, m] = state[2, n] = np.float32(1.0)


@part
def weigh_chunk(
    header: Any, cap: Any, M: Any, group: Any, head: Any, request: Any, row: Any, position: Any,
    base: Any, spans: Any, s: Any, state: Any, ramp: Any,
) -> None:  # fmt: skip
    """Turn the scores of the chunk that begins at key `base` into weights, and update the state."""
    mask, bits, slopes = header[at.MASK], header[at.MASK_BITS], header[at.SLOPES]
    kv_len = read_i32(header[at.KV_LENS] + 4 * request)
    index = np.int64(0)
    if mask != 0:
        index = read_i64(header[at.MASK_STARTS] + 8 * request) + base
        index += (row - read_i32(header[at.QO_INDPTR] + 4 * request)) * kv_len
    for m in range(M):
        first, last = spans[0, m], spans[1, m]
        if first >= last:
            continue
        scores = s + m * ROW
        if slopes != 0:
            slope = simd.splat(read_f32(slopes + 4 * (head * group + m % group)))
            for i in range(0, ROW, 64):
                distance = simd.splat(base + i // 4 - (position + m // group))
                bias = simd.add(distance, simd.load_f32(ramp))
                simd.store_f32(scores + i, simd.fma(slope, bias, simd.load_f32(scores + i)))
        if cap > 0.0:
            for i in range(0, ROW, 64):
                simd.store_f32(scores + i, soft_cap(simd.load_f32(scores + i), cap))
        if first % 16 or last % 16 or mask != 0:
            hide(scores, first, last, mask, bits, index + (m // group) * kv_len)
        old = state[0, m]
        top, total = weigh(scores, first, last, old)
        shrink = np.float32(1.0)
        if top != old:
            shrink = exp1(old - top)
        # float64: the product is exact, so it does not matter whether it is fused
        state[1, m] = np.float64(state[1, m]) * np.float64(shrink) + np.float64(total)
        state[0, m] = top
        state[2, m] = shrink


@part
def finish(
    header: Any, acc: Any, top: Any, total: Any, row: Any, qo_head: Any, out: Any, lse: Any
) -> None:
    """Divide an accumulator by the sum of its weights; write the result and the LSE of a row."""
    H, D = header[at.QO_HEADS], header[at.DIM_VO]
    factor = np.float32(1.0)
    if header[at.OUT_FACTORS] != 0:
        factor = read_f32(header[at.OUT_FACTORS] + 4 * qo_head)
    if header[at.SINKS] != 0:
        sink = read_f32(header[at.SINKS] + 4 * qo_head)
        both = max(top, sink)
        shrink = exp1(top - both)
        total = np.float32(
            np.float64(total) * np.float64(shrink) + math.exp(np.float64(sink) - np.float64(both))
        )
        factor = factor * shrink
        top = both
    inverse = np.float32(0.0)
    if total != 0.0:
        inverse = factor / total
    place = row * H + qo_head
    copy_floats(F32, acc, D, inverse, out + 4 * D * place, D)
    if lse != 0:
        value = -np.inf
        if total != 0.0:
            value = np.float64(top) + math.log(np.float64(total))
            if header[at.LSE_NATURAL] == 0:
                value = value * LOG2_E
        write_f32(lse + 4 * place, value)


@part
def load_queries(
    header: Any, q: Any, q_row_bytes: Any, M: Any, group: Any, row: Any, head: Any, position: Any,
    target: Any, padded: Any,
) -> None:  # fmt: skip
    """Copy a tile's query vectors times their factors, rotated if the plan says so."""
    D, factors, rope = header[at.DIM_QK], header[at.SCORE_FACTORS], header[at.ROPE]
    for m in range(M):
        h = head * group + m % group
        place = target + 4 * padded * m
        source = q + (row + m // group) * q_row_bytes + 4 * D * h
        copy_floats(F32, source, D, read_f32(factors + 4 * h), place, padded)
        if rope != 0:
            rotate_halves(place, rope + 4 * D * max(position + m // group, 0), D // 2)


@part
def pack_rows(
    source: Any, kind: Any, table: Any, first: Any, last: Any, n: Any, target: Any, padded: Any
) -> None:
    """Copy rows [first, last) to float32 rows at `target`, and let the table point there."""
    for j in range(first, last):
        place = target + 4 * padded * j
        copy_row(source, kind, table[j], n, place, padded)
        table[j] = place


@part
def join_rows(
    source: Any, kind: Any, keys: Any, values: Any, first: Any, last: Any, n: Any, n_more: Any,
    target: Any, padded: Any,
) -> None:  # fmt: skip
    """Copy rows of `keys` and of `values`, one behind the other; both tables point there."""
    for j in range(first, last):
        place = target + 4 * padded * j
        copy_row(source, kind, keys[j], n, place, n)
        copy_row(source, kind, values[j], n_more, place + 4 * n, padded - n)
        keys[j] = place
        values[j] = place


@part
def reset(M: Any, acc: Any, row_bytes: Any, state: Any) -> None:
    """Empty the accumulators."""
    for m in range(M):
        state[0, m] = HIDDEN
        state[1, m] = 0.0
        state[2, m] = 1.0
        for d in range(0, row_bytes, 64):
            simd.store_f32(acc + m * row_bytes + d, simd.splat(0.0))


@part
def store_partial(M: Any, acc: Any, row_bytes: Any, state: Any, partials: Any, slot: Any) -> None:
    """Put a partial result aside for `merge_items`."""
    for m in range(M):
        place = partials + (slot + m) * (row_bytes + 4 * at.PARTIAL_TAIL)
        for d in range(0, row_bytes, 64):
            simd.store_f32(place + d, simd.load_f32(acc + m * row_bytes + d))
        write_f32(place + row_bytes, state[0, m])
        write_f32(place + row_bytes + 4, state[1, m])


@njit
def attend_items(
    header: Any, cap: Any, source: Any, like: Any, kind: Any, pack: Any,
    q: Any, q_row_bytes: Any, k: Any, v: Any, strides: Any, out: Any, lse: Any,
    start: Any, stop: Any,
) -> None:  # fmt: skip
    """Work on the items of the shares [start, stop); see `layout` for the plan's tables.

    `pack`: chunks are copied to float32 rows with `copy_row` first; `like` is float32 then.
    """
    H, G = header[at.QO_HEADS], header[at.KV_HEADS]
    D_qk, D_vo, group, most = header[at.DIM_QK], header[at.DIM_VO], H // G, header[at.MOST]
    page_size, window, split = header[at.PAGE_SIZE], header[at.WINDOW], header[at.SPLIT_KEYS]
    wide_qk, wide_vo = (D_qk + 15) // 16 * 16, (D_vo + 15) // 16 * 16
    qk_bytes, vo_bytes = 4 * wide_qk, 4 * wide_vo
    room_for_rows = CHUNK * (wide_qk + wide_vo) if pack else 0
    memory = np.empty(most * (wide_qk + 2 * wide_vo + CHUNK) + room_for_rows + 304, np.float32)
    q_tile = (simd.address(memory) + 63) // 64 * 64
    acc = q_tile + most * qk_bytes
    running = acc + most * vo_bytes
    s = running + most * vo_bytes
    room = s + most * ROW
    ramp = room + 1024
    packed = ramp + 64
    for i in range(16):
        write_f32(ramp + 4 * i, i)
    state = np.empty((5, most), np.float32)  # top, sum, last shrink; running top and sum
    spans = np.empty((2, most), np.int64)
    limits = np.empty((2, most), np.int64)
    tables = np.empty((4, CHUNK), np.int64)  # keys, values; those of the next chunk

    first_item = read_i64(header[at.SHARES] + 8 * start)
    end_item = read_i64(header[at.SHARES] + 8 * stop)
    for item in range(first_item, end_item):
        fields = header[at.ITEMS] + at.ITEM_BYTES * item
        request, row = read_i64(fields), read_i64(fields + 8)
        M, head = read_i64(fields + 16) * group, read_i64(fields + 24)
        position, first_key = read_i64(fields + 32), read_i64(fields + 40)
        end_key, partial = read_i64(fields + 48), read_i64(fields + 56)
        kv_len = read_i32(header[at.KV_LENS] + 4 * request)
        pages = header[at.KV_INDICES] + 4 * read_i32(header[at.KV_INDPTR] + 4 * request)
        k_head, v_head = k + head * strides[2], v + head * strides[6]
        for m in range(M):
            here = position + m // group
            limits[0, m] = max(0, here - window) if window >= 0 else 0
            limits[1, m] = max(0, min(kv_len, here + 1)) if header[at.CAUSAL] else kv_len
        begin, end = max(first_key, limits[0, 0]), min(end_key, limits[1, M - 1])
        several = end_key > (first_key // split + 1) * split
        load_queries(header, q, q_row_bytes, M, group, row, head, position, q_tile, wide_qk)
        reset(M, acc, vo_bytes, state)
        for m in range(M):
            state[3, m] = HIDDEN
            state[4, m] = 0.0
        # few rows stream through memory, many work from the caches
        step = 16 if group >= M else CHUNK
        key, stop_key, now = begin, begin, 0
        while key < end:
            base = key // CHUNK * CHUNK
            if stop_key == key:  # the first chunk: nobody has looked for its rows yet
                stop_key = min(min(base + CHUNK, end), (key // split + 1) * split)
                find_rows(pages, page_size, key, stop_key, base, k_head, v_head, strides,
                          tables[0], tables[1])  # fmt: skip
            # The next chunk is on its way while this one is worked on.  Only keys that some row
            # sees have addresses: others may lie on pages that were given back.
            next_stop = min(
                min((stop_key // CHUNK + 1) * CHUNK, end), (stop_key // split + 1) * split
            )
            next_base = stop_key // CHUNK * CHUNK
            keys, values = tables[now], tables[now + 1]
            next_keys, next_values = tables[2 - now], tables[3 - now]
            bytes_k = bytes_v = np.int64(0)
            if stop_key < next_stop:
                find_rows(pages, page_size, stop_key, next_stop, next_base, k_head, v_head,
                          strides, next_keys, next_values)  # fmt: skip
                bytes_k = bytes_to_fetch(M, keys, next_keys, base, key, stop_key, next_stop,
                                         strides[3])  # fmt: skip
                bytes_v = bytes_to_fetch(M, values, next_values, base, key, stop_key, next_stop,
                                         strides[7])  # fmt: skip
            ahead = (simd.address(next_keys), simd.address(next_values), stop_key - next_base,
                     next_stop - next_base)  # fmt: skip
            first, last = key - base, stop_key - base
            if pack and header[at.LATENT]:
                join_rows(source, kind, keys, values, first, last, D_vo, D_qk - D_vo, packed,
                          wide_qk)  # fmt: skip
            elif pack:
                pack_rows(source, kind, keys, first, last, D_qk, packed, wide_qk)
                pack_rows(source, kind, values, first, last, D_vo,
                          packed + CHUNK * qk_bytes, wide_vo)  # fmt: skip
                if header[at.ROPE] != 0:
                    for j in range(first, last):
                        rotate_halves(keys[j], header[at.ROPE] + 4 * D_qk * (base + j), D_qk // 2)
            for j in range(first // 16 * 16, first):
                keys[j] = keys[first]
            for j in range(last, (last + 15) // 16 * 16):
                keys[j] = keys[last - 1]
            for m in range(M):
                spans[0, m] = max(limits[0, m] - base, first)
                spans[1, m] = max(spans[0, m], min(limits[1, m] - base, last))
            score_chunk(like, M, q_tile, qk_bytes, keys, spans, s, room, ahead, bytes_k, bytes_v)
            weigh_chunk(header, cap, M, group, head, request, row, position, base, spans, s,
                        state, ramp)  # fmt: skip
            mix_chunk(like, M, acc, vo_bytes, state, spans, s, values, step)
            if several and (stop_key == end or stop_key % split == 0):
                for m in range(M):
                    state[3, m], state[4, m] = fold(
                        running + m * vo_bytes, state[3, m], state[4, m],
                        acc + m * vo_bytes, state[0, m], state[1, m], wide_vo,
                    )  # fmt: skip
                reset(M, acc, vo_bytes, state)
            key, stop_key, now = stop_key, next_stop, 2 - now
        if partial >= 0:
            store_partial(M, acc, vo_bytes, state, header[at.PARTIALS], partial)
            continue
        for m in range(M):
            h = head * group + m % group
            if state[3, m] != HIDDEN or state[4, m] != 0.0:  # partial results were added up
                finish(header, running + m * vo_bytes, state[3, m], state[4, m], row + m // group,
                       h, out, lse)  # fmt: skip
            else:
                finish(header, acc + m * vo_bytes, state[0, m], state[1, m], row + m // group, h,
                       out, lse)  # fmt: skip
    memory[0] = 0.0  # a last use: the array is freed after its last use, addresses do not count


@njit
def merge_items(header: Any, out: Any, lse: Any, start: Any, stop: Any) -> None:
    """Add the partial results of the merges [start, stop) in order."""
    group, n = header[at.QO_HEADS] // header[at.KV_HEADS], (header[at.DIM_VO] + 15) // 16 * 16
    bytes_each = 4 * (n + at.PARTIAL_TAIL)
    for merge in range(start, min(stop, header[at.N_MERGES])):
        fields = header[at.MERGES] + at.MERGE_BYTES * merge
        row, M, head = read_i64(fields), read_i64(fields + 8) * group, read_i64(fields + 16)
        slot, n_splits = read_i64(fields + 24), read_i64(fields + 32)
        for m in range(M):
            acc = header[at.PARTIALS] + (slot + m) * bytes_each
            top, total = read_f32(acc + 4 * n), read_f32(acc + 4 * n + 4)
            for i in range(1, n_splits):
                new = acc + i * M * bytes_each
                top, total = fold(
                    acc, top, total, new, read_f32(new + 4 * n), read_f32(new + 4 * n + 4), n
                )
            finish(header, acc, top, total, row + m // group, head * group + m % group, out, lse)

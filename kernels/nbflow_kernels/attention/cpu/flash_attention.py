"""The work of one item of an attention plan, whatever the elements of the cache are.

An item is a tile: some consecutive query rows of one request and all query heads that share one
key/value head, with a range of keys.  The tile walks over its keys in chunks of 64 counted from the
start of the sequence, with the online softmax of FlashAttention; after every `SPLIT_KEYS` keys the
sums start anew, and the partial results are added in order.  Whatever the tile, the batch, the page
size, the thread pool and the division into items, the additions that lead to one output element
are the same and in the same order, so a row's result is the same bit for bit.

The rows of an item may also be those of several requests that begin with the same pages: the item
walks over the shared keys with all of them, then over each request's own keys with its rows.

All memory is used by address: arrays as arguments would take the compiler several times as long.
Each query vector of a tile has a record of 64 bytes at ``state + 64 * m``, see the offsets below.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.core import types
from numba.core.extending import overload

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.online_softmax import (
    F32,
    HIDDEN,
    RECORD,
    ROW,
    copy_floats,
    exp1,
    fold,
    hide,
    mix_1x1,
    mix_1x4,
    mix_4x1,
    mix_4x4,
    mix_8x1,
    score_1x16,
    score_4x4,
    soft_cap,
    weigh,
)
from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import (
    allocate,
    read_f32,
    read_i32,
    read_i64,
    read_word,
    release,
    write_f32,
    write_i64,
)
from nbflow_kernels.position.cpu import _rotate_halves as rotate_halves

LOG2_E = 1.4426950408889634

# The record of a query vector: the greatest score and the sum of weights so far, the factor of the
# accumulator in this chunk, those of the splits before; the keys it sees in this chunk and in all.
TOP, TOTAL, SHRINK, RUN_TOP, RUN_TOTAL = 0, 4, 8, 12, 16
FIRST, LAST, LOW, HIGH = 24, 32, 40, 48
TABLE = 8 * CHUNK
"""Bytes of a table of addresses."""


def copy_row(source: Any, kind: Any, row: Any, n: Any, target: Any, padded: Any) -> None:
    """Copy one head vector to float32; the type of the scalar `source` tells what it may be."""
    if isinstance(source, np.float32):
        copy_floats(kind, row, n, 1.0, target, padded)
    elif isinstance(source, np.uint8):
        from nbflow_kernels.kv_cache.cpu_codec import decode_row as decode

        decode(kind, row, n, 1.0, target, padded)


@overload(copy_row, inline="always", strict=False)
def _copy_row_overload(source, kind, row, n, target, padded):
    if source == types.float32:
        return lambda source, kind, row, n, target, padded: copy_floats(
            kind, row, n, 1.0, target, padded
        )
    if source == types.uint8:
        from nbflow_kernels.kv_cache.cpu_codec import decode_row as decode

        return lambda source, kind, row, n, target, padded: decode(
            kind, row, n, 1.0, target, padded
        )
    return lambda source, kind, row, n, target, padded: None  # rows are read where they lie


def rotate(source: Any, row: Any, cos_sin: Any, half: Any) -> None:
    """Rotate a float32 row; kernels that read rows where they lie do without."""
    if isinstance(source, np.float32 | np.uint8):
        rotate_halves(row, cos_sin, half)


@overload(rotate, inline="always", strict=False)
def _rotate_overload(source, row, cos_sin, half):
    if source in (types.float32, types.uint8):
        return lambda source, row, cos_sin, half: rotate_halves(row, cos_sin, half)
    return lambda source, row, cos_sin, half: None


# ---- where the keys are -------------------------------------------------------------------------


@jit.device_function
def find_rows(pages, page_size, first, last, k, v, strides, table):
    """Write the addresses of keys, and behind them of values, [first, last) of one chunk."""
    key_at = first
    while key_at < last:
        page = key_at // page_size
        slot = key_at - page * page_size
        number = read_i32(pages + 4 * page)
        key = k + number * strides[0] + slot * strides[1]
        value = v + number * strides[4] + slot * strides[5]
        count = min(page_size - slot, last - key_at)
        place = table + 8 * (key_at % CHUNK)
        for i in range(count):
            write_i64(place + 8 * i, key + i * strides[1])
            write_i64(place + TABLE + 8 * i, value + i * strides[5])
        key_at += count


@jit.device_function
def pack_rows(source, kind, table, first, last, n, target, padded):
    """Copy rows [first, last) to float32 rows at `target`, and let the table point there."""
    for j in range(first, last):
        place = target + 4 * padded * j
        copy_row(source, kind, read_word(table, j), n, place, padded)
        write_i64(table + 8 * j, place)


@jit.device_function
def join_rows(source, kind, tables, first, last, n, n_more, target, padded):
    """Copy rows of keys and of values, one behind the other; both tables point there."""
    for j in range(first, last):
        place, key, value = target + 4 * padded * j, tables + 8 * j, tables + TABLE + 8 * j
        copy_row(source, kind, read_i64(key), n, place, n)
        copy_row(source, kind, read_i64(value), n_more, place + 4 * n, padded - n)
        write_i64(key, place)
        write_i64(value, place)


@jit.device_function
def fill_ends(table, first, last):
    """Give keys beside [first, last) an address: tiles of four keys may reach over the ends."""
    for j in range(first // 4 * 4, first):
        write_i64(table + 8 * j, read_word(table, first))
    for j in range(last, (last + 3) // 4 * 4):
        write_i64(table + 8 * j, read_i64(table + 8 * (last - 1)))
    for j in range(first // 16 * 16, first):
        write_i64(table + 8 * j, read_word(table, first))


# ---- one chunk ----------------------------------------------------------------------------------


@jit.device_function
def qk_scores(like, M, q, row_bytes, table, state, s, room, ahead, n_ahead):
    """Write the scores of a chunk."""
    for j in range(0, CHUNK, 16):
        m = np.int64(0)
        while m < M:
            first = np.int64(CHUNK)
            last = np.int64(0)
            for i in range(m, min(m + 4, M)):
                first = min(first, read_i64(state + RECORD * i + FIRST))
                last = max(last, read_i64(state + RECORD * i + LAST))
            if m + 4 <= M:
                for i in range(max(j, first // 4 * 4), min(j + 16, last), 4):
                    score_4x4(like, q + m * row_bytes, row_bytes, table + 8 * i,
                              s + m * ROW + 4 * i, ahead + 8 * i,
                              n_ahead if m == 0 else 0)  # fmt: skip
                m += 4
            else:
                first = read_i64(state + RECORD * m + FIRST)
                last = read_i64(state + RECORD * m + LAST)
                if first < j + 16 and j < last:
                    score_1x16(like, q + m * row_bytes, row_bytes, table + 8 * j,
                               min(last - j, 16), room, s + m * ROW + 4 * j, ahead + 8 * j,
                               n_ahead if m == 0 else 0)  # fmt: skip
                m += 1


@jit.device_function
def accumulate_pv(like, M, acc, row_bytes, state, s, values, ahead, n_ahead):
    """Add a chunk's values to the accumulators.

    Four query vectors go together over the keys that all of them see; each goes alone over its keys
    before and behind these.
    """
    m = np.int64(0)
    while m < M:
        n = np.int64(4 if m + 4 <= M else 1)
        low, high = np.int64(0), np.int64(CHUNK)
        for i in range(m, m + n):
            low = max(low, read_i64(state + RECORD * i + FIRST))
            high = min(high, read_i64(state + RECORD * i + LAST))
        high = max(low, high)
        if n == 4:
            for i in range(m, m + 4):
                record = state + RECORD * i
                first, last = read_i64(record + FIRST), min(read_i64(record + LAST), low)
                mix_row(like, acc + i * row_bytes, row_bytes, record, s + i * ROW, values, first,
                        last, ahead, 0)  # fmt: skip
            mix_four(like, acc + m * row_bytes, row_bytes, state + RECORD * m, s + m * ROW, values,
                     low, high, ahead, n_ahead if m == 0 else 0)  # fmt: skip
            for i in range(m, m + 4):
                record = state + RECORD * i
                first, last = max(read_i64(record + FIRST), high), read_i64(record + LAST)
                mix_row(like, acc + i * row_bytes, row_bytes, record, s + i * ROW, values, first,
                        last, ahead, 0)  # fmt: skip
        else:
            mix_row(like, acc + m * row_bytes, row_bytes, state + RECORD * m, s + m * ROW, values,
                    low, high, ahead, n_ahead if m == 0 else 0)  # fmt: skip
        m += n


@jit.device_function
def mix_row(like, acc, row_bytes, record, p, values, first, last, ahead, n_ahead):
    """Shrink one accumulator and add the values [first, last) times the weights at `p`."""
    if first >= last:
        return
    shrink, d, n = record + SHRINK, np.int64(0), n_ahead
    while d + 512 <= row_bytes:
        mix_8x1(like, acc, row_bytes, shrink, RECORD, p, values, first, last, d, ahead, n)
        d, n = d + 512, 0
    while d + 256 <= row_bytes:
        mix_4x1(like, acc, row_bytes, shrink, RECORD, p, values, first, last, d, ahead, n)
        d, n = d + 256, 0
    while d < row_bytes:
        mix_1x1(like, acc, row_bytes, shrink, RECORD, p, values, first, last, d, ahead, n)
        d, n = d + 64, 0
    write_f32(shrink, 1.0)


@jit.device_function
def mix_four(like, acc, row_bytes, records, p, values, first, last, ahead, n_ahead):
    """Do as `mix_row` for four query vectors in a row."""
    if first >= last:
        return
    shrink, d, n = records + SHRINK, np.int64(0), n_ahead
    while d + 256 <= row_bytes:
        mix_4x4(like, acc, row_bytes, shrink, RECORD, p, values, first, last, d, ahead, n)
        d, n = d + 256, 0
    while d < row_bytes:
        mix_1x4(like, acc, row_bytes, shrink, RECORD, p, values, first, last, d, ahead, n)
        d, n = d + 64, 0
    for i in range(4):
        write_f32(shrink + RECORD * i, 1.0)


@jit.device_function
def softmax_weights(header, cap, M, group, head, request, row, position, base, s, state, ramp):
    """Turn the scores of the chunk that begins at key `base` into weights, and update the state."""
    mask, slopes = read_word(header, at.MASK), read_word(header, at.SLOPES)
    table = read_word(header, at.BIAS)
    kv_len, index = np.int64(0), np.int64(0)
    if mask != 0:
        kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
        index = read_i64(read_word(header, at.MASK_STARTS) + 8 * request) + base
        index += (row - read_i32(read_word(header, at.QO_INDPTR) + 4 * request)) * kv_len
    for m in range(M):
        record = state + RECORD * m
        first, last = read_i64(record + FIRST), read_i64(record + LAST)
        if first >= last:
            continue
        scores = s + m * ROW
        if slopes != 0:
            slope = simd.splat(read_f32(slopes + 4 * (head * group + m % group)))
            for i in range(0, ROW, 64):
                distance = simd.splat(base + i // 4 - (position + m // group))
                bias = simd.add(distance, simd.load_f32(ramp))
                simd.store_f32(scores + i, simd.fma(slope, bias, simd.load_f32(scores + i)))
        if table != 0:
            biases = table + (head * group + m % group) * read_i64(header + 8 * at.BIAS_BYTES)
            biases += 4 * (base - (position + m // group))
            for i in range(0, ROW, 64):
                added = simd.add(simd.load_f32(scores + i), simd.load_f32(biases + i))
                simd.store_f32(scores + i, added)
        if cap > 0.0:
            for i in range(0, ROW, 64):
                simd.store_f32(scores + i, soft_cap(simd.load_f32(scores + i), cap))
        if first % 16 or last % 16 or mask != 0:
            hide(scores, first, last, mask, read_word(header, at.MASK_BITS) != 0,
                 index + (m // group) * kv_len)  # fmt: skip
        old = read_f32(record + TOP)
        top, total = weigh(scores, first, last, old)
        shrink = np.float32(1.0)
        if top != old:
            shrink = exp1(old - top)
        # float64: the product is exact, so it does not matter whether it is fused
        before = np.float64(read_f32(record + TOTAL)) * np.float64(shrink)
        write_f32(record + TOTAL, before + np.float64(total))
        write_f32(record + TOP, top)
        write_f32(record + SHRINK, shrink)


# ---- before and behind the chunks ---------------------------------------------------------------


@jit.device_function
def load_queries(header, source, q, q_row_bytes, M, group, row, head, position, target, padded):
    """Copy a tile's query vectors times their factors, rotated if the plan says so."""
    D, rope = read_word(header, at.DIM_QK), read_word(header, at.ROPE)
    factors = read_word(header, at.SCORE_FACTORS)
    for m in range(M):
        h = head * group + m % group
        place = target + 4 * padded * m
        vector = q + (row + m // group) * q_row_bytes + 4 * D * h
        copy_floats(F32, vector, D, read_f32(factors + 4 * h), place, padded)
        if rope != 0:
            rotate(source, place, rope + 4 * D * max(position + m // group, 0), D // 2)


@jit.device_function
def limit_rows(header, request, row, end_row, group, record):
    """Write which keys the rows of an item see, and that no split is finished."""
    window = read_word(header, at.WINDOW)
    while row < end_row:
        rows, position, _ = own_part(header, request, row, end_row, 0)
        kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
        for m in range(rows * group):
            here = position + m // group
            write_i64(record + LOW, max(0, here - window) if window >= 0 else 0)
            seen = kv_len
            if read_word(header, at.CAUSAL) != 0:
                seen = max(np.int64(0), min(kv_len, here + 1))
            write_i64(record + HIGH, seen)
            write_f32(record + RUN_TOP, HIDDEN)
            write_f32(record + RUN_TOTAL, 0.0)
            record += RECORD
        request, row = request + 1, row + rows


@jit.device_function
def own_part(header, request, row, end_row, end_key):
    """Return how many rows of an item are a request's, the first one's position, their last key."""
    kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
    own_end = read_i32(read_word(header, at.QO_INDPTR) + 4 * request + 4)
    rows, position = min(own_end, end_row) - row, kv_len - (own_end - row)
    end = min(end_key, kv_len)
    if read_word(header, at.CAUSAL) != 0:
        end = min(end, position + rows)
    return rows, position, end


@jit.device_function
def reset(M, acc, row_bytes, state):
    """Empty the accumulators."""
    for m in range(M):
        write_f32(state + RECORD * m + TOP, HIDDEN)
        write_f32(state + RECORD * m + TOTAL, 0.0)
        write_f32(state + RECORD * m + SHRINK, 1.0)
    for d in range(0, M * row_bytes, 64):
        simd.store_f32(acc + d, simd.splat(0.0))


@jit.device_function
def finish(header, acc, top, total, row, qo_head, out, lse):
    """Divide an accumulator by the sum of its weights; write the result and the LSE of a row."""
    H, D = read_word(header, at.QO_HEADS), read_word(header, at.DIM_VO)
    factors, sinks = read_word(header, at.OUT_FACTORS), read_word(header, at.SINKS)
    factor = np.float32(1.0)
    if factors != 0:
        factor = read_f32(factors + 4 * qo_head)
    if sinks != 0:
        sink = read_f32(sinks + 4 * qo_head)
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
            if read_word(header, at.LSE_NATURAL) == 0:
                value = value * LOG2_E
        write_f32(lse + 4 * place, value)


@jit.device_function
def store_partial(M, acc, row_bytes, state, target):
    """Put a partial result aside for `merge_items`."""
    for m in range(M):
        place = target + m * (row_bytes + 4 * at.PARTIAL_TAIL)
        for d in range(0, row_bytes, 64):
            simd.store_f32(place + d, simd.load_f32(acc + m * row_bytes + d))
        write_f32(place + row_bytes, read_f32(state + RECORD * m + TOP))
        write_f32(place + row_bytes + 4, read_f32(state + RECORD * m + TOTAL))


@jit.device_function
def fold_split(M, running, acc, row_bytes, state):
    """Add the finished split's sums to those of the splits before, and start anew."""
    for m in range(M):
        record = state + RECORD * m
        top, total = fold(
            running + m * row_bytes, read_f32(record + RUN_TOP), read_f32(record + RUN_TOTAL),
            acc + m * row_bytes, read_f32(record + TOP), read_f32(record + TOTAL), row_bytes // 4,
        )  # fmt: skip
        write_f32(record + RUN_TOP, top)
        write_f32(record + RUN_TOTAL, total)
    reset(M, acc, row_bytes, state)


@jit.kernel
def flash_attention(
    plan, cap, key_reader, value_reader, q, q_row_bytes, k, v, strides, out, lse, start, stop
):
    """Work on the items of the shares [start, stop); see `layout` for the plan's tables.

    A reader says how keys, or values, are read: (source, like, kind, pack).  The types of `source`
    and `like` choose the code of `copy_row` and of the tiles; `pack`: chunks are copied to float32
    rows with `copy_row` first, and `like` is float32 then; `kind` is the format.
    `strides` are the bytes per page, token, head and row, of keys and of values.
    """
    k_source, k_like, k_kind, k_pack = key_reader
    v_source, v_like, v_kind, v_pack = value_reader
    header = simd.address(plan)
    H, most = read_word(header, at.QO_HEADS), read_word(header, at.MOST)
    group = H // read_word(header, at.KV_HEADS)
    D_qk, D_vo = read_word(header, at.DIM_QK), read_word(header, at.DIM_VO)
    page_size, split = read_word(header, at.PAGE_SIZE), read_word(header, at.SPLIT_KEYS)
    rope, latent = read_word(header, at.ROPE), read_word(header, at.LATENT)
    wide_qk, wide_vo = (D_qk + 15) // 16 * 16, (D_vo + 15) // 16 * 16
    qk_bytes, vo_bytes = 4 * wide_qk, 4 * wide_vo
    packed_bytes = CHUNK * (qk_bytes + vo_bytes) if k_pack or v_pack else 0
    each = qk_bytes + 2 * vo_bytes + ROW + RECORD
    memory = allocate(most * each + 4 * TABLE + 1024 + 64 + packed_bytes + 64)
    q_tile = (memory + 63) // 64 * 64
    acc = q_tile + most * qk_bytes
    running = acc + most * vo_bytes
    s = running + most * vo_bytes
    state = s + most * ROW
    tables = state + most * RECORD
    room = tables + 4 * TABLE
    ramp = room + 1024
    packed = ramp + 64
    for i in range(16):
        write_f32(ramp + 4 * i, i)

    first_item = read_i64(read_word(header, at.SHARES) + 8 * start)
    end_item = read_i64(read_word(header, at.SHARES) + 8 * stop)
    for item in range(first_item, end_item):
        fields = read_word(header, at.ITEMS) + at.ITEM_BYTES * item
        request, row = read_i64(fields), read_i64(fields + 8)
        end_row, head = row + read_i64(fields + 16), read_i64(fields + 24)
        begin, end_key = read_i64(fields + 40), read_i64(fields + 48)
        partial, shared = read_i64(fields + 56), read_i64(fields + 72)
        k_head, v_head = k + head * strides[2], v + head * strides[6]
        border = (begin // split + 1) * split
        M, tile, together = (end_row - row) * group, np.int64(0), shared > 0
        load_queries(header, k_source, q, q_row_bytes, M, group, row, head, read_i64(fields + 32),
                     q_tile, wide_qk)  # fmt: skip
        reset(M, acc, vo_bytes, state)
        limit_rows(header, request, row, end_row, group, state)
        while row < end_row:  # first over the shared keys with all rows, then request by request
            pages = read_i32(read_word(header, at.KV_INDPTR) + 4 * request)
            pages = read_word(header, at.KV_INDICES) + 4 * pages
            rows, position, end = own_part(header, request, row, end_row, end_key)
            if together:
                end = shared
            else:
                M = rows * group
            several = together or end > border
            sums, records = acc + tile * vo_bytes, state + tile * RECORD
            key, now, ahead = begin, tables, tables + 2 * TABLE
            stop_key = min(min(key // CHUNK * CHUNK + CHUNK, end), (key // split + 1) * split)
            if key < end:
                find_rows(pages, page_size, key, stop_key, k_head, v_head, strides, now)
            while key < end:
                # Only keys that some row sees have addresses: others may lie on pages given back.
                base, next_base = key // CHUNK * CHUNK, stop_key // CHUNK * CHUNK
                next_stop = min(min(next_base + CHUNK, end), (stop_key // split + 1) * split)
                if stop_key < next_stop:
                    find_rows(pages, page_size, stop_key, next_stop, k_head, v_head, strides, ahead)
                # What is read half a chunk later is asked for now, in whole chunks.  Values that
                # are packed are read at once: then both halves ask for the next chunk.
                fetch_1, n_1 = now + TABLE, strides[7] if stop_key - key == CHUNK else 0
                fetch_2, n_2 = ahead, strides[3] if next_stop - stop_key == CHUNK else 0
                if v_pack:
                    fetch_1, n_1 = ahead, n_2
                    fetch_2, n_2 = ahead + TABLE, strides[7] if n_2 != 0 else 0
                first, last = key - base, stop_key - base
                if k_pack and latent:
                    join_rows(k_source, k_kind, now, first, last, D_vo, D_qk - D_vo, packed,
                              wide_qk)  # fmt: skip
                elif k_pack:
                    pack_rows(k_source, k_kind, now, first, last, D_qk, packed, wide_qk)
                    if rope != 0:
                        for j in range(first, last):
                            rotate(k_source, packed + j * qk_bytes, rope + 4 * D_qk * (base + j),
                                   D_qk // 2)  # fmt: skip
                if v_pack and not latent:
                    pack_rows(v_source, v_kind, now + TABLE, first, last, D_vo,
                              packed + CHUNK * qk_bytes, wide_vo)  # fmt: skip
                fill_ends(now, first, last)
                for m in range(M):
                    record = records + RECORD * m
                    seen = max(read_i64(record + LOW) - base, first)
                    write_i64(record + FIRST, seen)
                    write_i64(record + LAST, max(seen, min(read_i64(record + HIGH) - base, last)))
                qk_scores(k_like, M, q_tile + tile * qk_bytes, qk_bytes, now, records, s, room,
                            fetch_1, n_1)  # fmt: skip
                softmax_weights(header, cap, M, group, head, request, row, position, base, s,
                                records, ramp)  # fmt: skip
                accumulate_pv(v_like, M, sums, vo_bytes, records, s, now + TABLE, fetch_2, n_2)
                if several and (stop_key % split == 0 or (stop_key == end and not together)):
                    fold_split(M, running + tile * vo_bytes, sums, vo_bytes, records)
                key, stop_key, now, ahead = stop_key, next_stop, ahead, now
            if together:
                together, begin = False, shared
                continue
            if partial >= 0:
                place = partial * (vo_bytes + 4 * at.PARTIAL_TAIL)
                store_partial(M, sums, vo_bytes, records, read_word(header, at.PARTIALS) + place)
            for m in range(M if partial < 0 else 0):
                record, done = records + RECORD * m, sums + m * vo_bytes
                top, total = read_f32(record + TOP), read_f32(record + TOTAL)
                if several and read_f32(record + RUN_TOP) != HIDDEN:
                    top, total = read_f32(record + RUN_TOP), read_f32(record + RUN_TOTAL)
                    done = running + (tile + m) * vo_bytes
                finish(header, done, top, total, row + m // group, head * group + m % group, out,
                       lse)  # fmt: skip
            request, row, tile = request + 1, row + rows, tile + M
    release(memory)


@jit.kernel
def merge_items(plan, out, lse, start, stop):
    """Add the partial results of the merges [start, stop) in order."""
    header = simd.address(plan)
    group = read_word(header, at.QO_HEADS) // read_word(header, at.KV_HEADS)
    n = (read_word(header, at.DIM_VO) + 15) // 16 * 16
    bytes_each = 4 * (n + at.PARTIAL_TAIL)
    for merge in range(start, min(stop, read_word(header, at.N_MERGES))):
        fields = read_word(header, at.MERGES) + at.MERGE_BYTES * merge
        row, M, head = read_i64(fields), read_i64(fields + 8) * group, read_i64(fields + 16)
        slot, n_splits = read_i64(fields + 24), read_i64(fields + 32)
        for m in range(M):
            acc = read_word(header, at.PARTIALS) + (slot + m) * bytes_each
            top, total = read_f32(acc + 4 * n), read_f32(acc + 4 * n + 4)
            for i in range(1, n_splits):
                new = acc + i * M * bytes_each
                top, total = fold(
                    acc, top, total, new, read_f32(new + 4 * n), read_f32(new + 4 * n + 4), n
                )
            finish(header, acc, top, total, row + m // group, head * group + m % group, out, lse)

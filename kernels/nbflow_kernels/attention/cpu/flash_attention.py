"""FlashAttention on the CPU: the kernel of the work items of an attention plan.

A work item is a tile of consecutive query rows of a request, with all query heads of one KV head,
and a range of keys.  The tile walks over its keys in chunks of 64 counted from the start of the
sequence, with an online softmax; at every multiple of `SPLIT_KEYS` keys the accumulators are merged
into those of earlier splits.  The additions that lead to an output element and their order depend
neither on tile, batch, page size and threads nor on the schedule: a row always has the same bits.

An item may also have rows of several requests with a common prefix: the item walks over the shared
keys with all rows, then over each request's own keys with its rows.

Everything is addressed by raw pointers, because array arguments multiply the compile time.  Each
query vector has a state record of 64 bytes at ``state + 64 * m`` (`online_softmax`).  The same
algorithm in plain, single-steppable loops is `nbflow_kernels.attention.loops`.
"""

from __future__ import annotations

import math

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.chunk_products import accumulate_pv, qk_scores
from nbflow_kernels.attention.cpu.head_rows import (
    SCALE_TABLES,
    TABLE,
    copies,
    pad_table,
    prefetch_item,
    row_addresses,
    scale_addresses,
    unpack_keys,
    unpack_values,
)
from nbflow_kernels.attention.cpu.int8_scores import quantize_query
from nbflow_kernels.attention.cpu.online_softmax import (
    FIRST,
    HIGH,
    LAST,
    LOW,
    MASKED,
    RESCALE,
    ROW_MAX,
    ROW_SUM,
    RUN_MAX,
    RUN_SUM,
    SCORE_BYTES,
    STATE_BYTES,
    apply_mask,
    chunk_max,
    exp1,
    exp_weights,
    mask_ends,
    merge_partial,
    soft_cap,
    unmasked_scores,
)
from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.atomics import call_hook
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
from nbflow_kernels.kv_cache.cpu_codec import F32, copy_floats
from nbflow_kernels.position.cpu import rotate_halves

LOG2_E = 1.4426950408889634


# ---- softmax of a chunk --------------------------------------------------------------------------


@jit.device_function
def softmax_weights(
    header, extras, M, group, head, request, row, position, base, s, state, ramp
):  # fmt: skip
    """Replace the scores of the chunk at key `base` by softmax weights, and update the state."""
    if extras is not None:
        change_scores(header, extras, M, group, head, request, row, position, base, s, state, ramp)
    for m in range(M):
        record = state + STATE_BYTES * m
        first, last = read_i64(record + FIRST), read_i64(record + LAST)
        if first >= last:
            continue
        scores = s + m * SCORE_BYTES
        if first % 16 or last % 16:
            mask_ends(scores, first, last)
        if extras is not None and read_word(header, at.NO_SOFTMAX) != 0:
            unmasked_scores(scores, first, last)
            write_f32(record + ROW_MAX, 0.0)
            write_f32(record + ROW_SUM, 1.0)
            continue
        old = read_f32(record + ROW_MAX)
        row_max = chunk_max(scores, first, last, old)
        write_f32(record + RESCALE, exp1(old - row_max) if row_max != old else np.float32(1.0))
        write_f32(record + ROW_MAX, row_max)
    if extras is None or read_word(header, at.NO_SOFTMAX) == 0:
        exp_rows(M, s, state)


@jit.device_function
def change_scores(
    header, cap, M, group, head, request, row, position, base, s, state, ramp
):  # fmt: skip
    """Add biases, cap, apply the function of a variant and the custom mask."""
    mask, slopes = read_word(header, at.MASK), read_word(header, at.SLOPES)
    table = read_word(header, at.BIAS)
    hook = read_word(header, at.SCORES_HOOK)
    first_row = row - read_i32(read_word(header, at.QO_INDPTR) + 4 * request)
    kv_len, index = np.int64(0), np.int64(0)
    if mask != 0:
        kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
        index = read_i64(read_word(header, at.MASK_STARTS) + 8 * request) + base
        index += first_row * kv_len
    for m in range(M):
        record = state + STATE_BYTES * m
        first, last = read_i64(record + FIRST), read_i64(record + LAST)
        if first >= last:
            continue
        scores = s + m * SCORE_BYTES
        if slopes != 0:
            slope = simd.splat(read_f32(slopes + 4 * (head * group + m % group)))
            for i in range(0, SCORE_BYTES, 64):
                distance = simd.splat(base + i // 4 - (position + m // group))
                bias = simd.add(distance, simd.load_f32(ramp))
                simd.store_f32(scores + i, simd.fma(slope, bias, simd.load_f32(scores + i)))
        if table != 0:
            biases = table + (head * group + m % group) * read_i64(header + 8 * at.BIAS_BYTES)
            biases += 4 * (base - (position + m // group))
            for i in range(0, SCORE_BYTES, 64):
                added = simd.add(simd.load_f32(scores + i), simd.load_f32(biases + i))
                simd.store_f32(scores + i, added)
        if cap > 0.0:
            for i in range(0, SCORE_BYTES, 64):
                simd.store_f32(scores + i, soft_cap(simd.load_f32(scores + i), cap))
        if hook != 0:
            call_hook(
                hook, read_word(header, at.HOOK_PARAMS), scores, first, last, base, request,
                first_row + m // group, head * group + m % group, head,
            )  # fmt: skip
        if mask != 0:
            bits = read_word(header, at.MASK_BITS) != 0
            apply_mask(scores, first, last, mask, bits, index + (m // group) * kv_len)


@jit.device_function
def exp_rows(M, s, state):
    """Replace the scores of all rows by exp(score - row_max), and add them to the sums.

    In a loop after that of the maxima: a processor overlaps rows whose maxima it need not wait for.
    """
    for m in range(M):
        record = state + STATE_BYTES * m
        first, last = read_i64(record + FIRST), read_i64(record + LAST)
        if first >= last:
            continue
        row_sum = exp_weights(s + m * SCORE_BYTES, first, last, read_f32(record + ROW_MAX))
        # float64: the product is exact, with or without fma
        before = np.float64(read_f32(record + ROW_SUM)) * np.float64(read_f32(record + RESCALE))
        write_f32(record + ROW_SUM, before + np.float64(row_sum))


# ---- queries, visible keys and results ----------------------------------------------------------


@jit.device_function
def load_queries(
    header, like, pack, q, q_row_bytes, M, group, row, head, position, target, padded
):  # fmt: skip
    """Load a tile's query vectors times their factors, rotated if the plan has RoPE."""
    D, rope = read_word(header, at.DIM_QK), read_word(header, at.ROPE)
    factors = read_word(header, at.SCORE_FACTORS)
    for m in range(M):
        h = head * group + m % group
        place = target + 4 * padded * m
        vector = q + (row + m // group) * q_row_bytes + 4 * D * h
        copy_floats(F32, vector, D, read_f32(factors + 4 * h), place, padded)
        if pack is not None and rope != 0:  # with RoPE, keys are copied
            rotate_halves(place, rope + 4 * D * max(position + m // group, 0), D // 2)
        quantize_query(like, place, 4 * padded)


@jit.device_function
def visible_ranges(header, request, row, end_row, group, record):
    """Initialize the visible key ranges of an item's rows, and the sums of earlier splits."""
    window, chunk = read_word(header, at.WINDOW), read_word(header, at.ATTENTION_CHUNK)
    while row < end_row:
        rows, position, _ = request_rows(header, request, row, end_row, np.int64(0))
        kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
        for m in range(rows * group):
            here = position + m // group
            low = np.int64(0)
            if window >= 0:
                low = max(low, here - window)
            seen = kv_len
            if chunk > 0:
                begin = max(np.int64(0), here) // chunk * chunk
                low, seen = max(low, begin), min(seen, begin + chunk)
            if read_word(header, at.CAUSAL) != 0:
                seen = max(np.int64(0), min(seen, here + 1))
            write_i64(record + LOW, low)
            write_i64(record + HIGH, seen)
            write_f32(record + RUN_MAX, MASKED)
            write_f32(record + RUN_SUM, 0.0)
            record += STATE_BYTES
        request, row = request + 1, row + rows


@jit.device_function
def narrow_ranges(extras, header, M, group, head, request, row, base, records):
    """Let the function of a variant, if any, narrow the ranges of visible keys in a chunk."""
    if extras is not None:
        hook = read_word(header, at.RANGE_HOOK)
        first_row = row - read_i32(read_word(header, at.QO_INDPTR) + 4 * request)
        for m in range(M if hook != 0 else 0):
            record = records + STATE_BYTES * m
            first, last = read_i64(record + FIRST), read_i64(record + LAST)
            if first < last:
                call_hook(
                    hook, read_word(header, at.HOOK_PARAMS), record + FIRST, first, last, base,
                    request, first_row + m // group, head * group + m % group, head,
                )  # fmt: skip


@jit.device_function
def request_rows(header, request, row, end_row, end_key):
    """Return the number of an item's rows in a request, the first position, and the end key."""
    kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
    own_end = read_i32(read_word(header, at.QO_INDPTR) + 4 * request + 4)
    rows, position = min(own_end, end_row) - row, kv_len - (own_end - row)
    end = min(end_key, kv_len)
    if read_word(header, at.CAUSAL) != 0:
        end = min(end, position + rows)
    return rows, position, end


@jit.device_function
def reset_state(M, acc, row_bytes, state):
    """Reset accumulators and softmax state."""
    for m in range(M):
        write_f32(state + STATE_BYTES * m + ROW_MAX, MASKED)
        write_f32(state + STATE_BYTES * m + ROW_SUM, 0.0)
        write_f32(state + STATE_BYTES * m + RESCALE, 1.0)
    for d in range(0, M * row_bytes, 64):
        simd.store_f32(acc + d, simd.splat(0.0))


@jit.device_function
def write_result(header, extras, acc, row_max, row_sum, row, qo_head, out, lse):
    """Normalize an accumulator and write the result and the LSE of a query vector."""
    H, D = read_word(header, at.QO_HEADS), read_word(header, at.DIM_VO)
    factor = np.float32(1.0)
    if extras is not None:
        factor, row_max, row_sum = with_sink(header, qo_head, row_max, row_sum)
    inverse = np.float32(0.0)
    if row_sum != 0.0:
        inverse = factor / row_sum
    place = row * H + qo_head
    copy_floats(F32, acc, D, inverse, out + 4 * D * place, D)
    if lse != 0:
        value = -np.inf
        if row_sum != 0.0:
            value = np.float64(row_max) + math.log(np.float64(row_sum))
            if read_word(header, at.LSE_NATURAL) == 0:
                value = value * LOG2_E
        write_f32(lse + 4 * place, value)


@jit.device_function
def with_sink(header, qo_head, row_max, row_sum):
    """Return the factor of a head's results, and maximum and sum with the head's sink."""
    factors, sinks = read_word(header, at.OUT_FACTORS), read_word(header, at.SINKS)
    factor = np.float32(1.0)
    if factors != 0:
        factor = read_f32(factors + 4 * qo_head)
    if sinks == 0:
        return factor, row_max, row_sum
    sink = read_f32(sinks + 4 * qo_head)
    both = max(row_max, sink)
    rescale = exp1(row_max - both)
    row_sum = np.float32(
        np.float64(row_sum) * np.float64(rescale) + math.exp(np.float64(sink) - np.float64(both))
    )
    return factor * rescale, both, row_sum


@jit.device_function
def write_results(
    header, extras, M, group, request, row, head, acc, running, row_bytes, state, out, lse
):  # fmt: skip
    """Write the final results of a tile; `running` has those of its splits, or is 0."""
    for m in range(M):
        record, source = state + STATE_BYTES * m, acc + m * row_bytes
        row_max, row_sum = read_f32(record + ROW_MAX), read_f32(record + ROW_SUM)
        if running != 0 and read_f32(record + RUN_MAX) != MASKED:
            row_max, row_sum = read_f32(record + RUN_MAX), read_f32(record + RUN_SUM)
            source = running + m * row_bytes
        qo_head = head * group + m % group
        here = row + m // group
        write_result(header, extras, source, row_max, row_sum, here, qo_head, out, lse)
        if extras is not None:
            hook, n = read_word(header, at.OUTPUT_HOOK), read_word(header, at.DIM_VO)
            if hook != 0:
                place = here * read_word(header, at.QO_HEADS) + qo_head
                first_row = read_i32(read_word(header, at.QO_INDPTR) + 4 * request)
                call_hook(
                    hook, read_word(header, at.HOOK_PARAMS), out + 4 * n * place, 0, n, 0, request,
                    here - first_row, qo_head, head,
                )  # fmt: skip


@jit.device_function
def store_partial(M, acc, row_bytes, state, target):
    """Store a partial result for `merge_splits`."""
    for m in range(M):
        place = target + m * (row_bytes + 4 * at.PARTIAL_TAIL)
        for d in range(0, row_bytes, 64):
            simd.store_f32(place + d, simd.load_f32(acc + m * row_bytes + d))
        write_f32(place + row_bytes, read_f32(state + STATE_BYTES * m + ROW_MAX))
        write_f32(place + row_bytes + 4, read_f32(state + STATE_BYTES * m + ROW_SUM))


@jit.device_function
def merge_split(M, running, acc, row_bytes, state):
    """Merge the accumulators of a finished split into those of earlier splits, and reset them."""
    for m in range(M):
        record = state + STATE_BYTES * m
        row_max, row_sum = merge_partial(
            running + m * row_bytes, read_f32(record + RUN_MAX), read_f32(record + RUN_SUM),
            acc + m * row_bytes, read_f32(record + ROW_MAX), read_f32(record + ROW_SUM),
            row_bytes // 4,
        )  # fmt: skip
        write_f32(record + RUN_MAX, row_max)
        write_f32(record + RUN_SUM, row_sum)
    reset_state(M, acc, row_bytes, state)


@jit.kernel(unroll=False, vectorize=False)
def flash_attention(
    plan, extras, key_reader, value_reader, q, q_row_bytes, k, v, strides, out, lse, start, stop
):
    """Process the work items of the shares [start, stop); `plan_layout` describes the tables.

    A reader (source, like, kind, pack) tells how keys or values are read: the types of `source` and
    `like` select the code of `copy_rows` and of the register tiles, `kind` is the format, `pack`
    decodes chunks to float32 rows first (None: never).  `strides` are bytes per page, token, head
    and row, of keys and of values.  `extras` is the soft cap of the scores, 0 for none, or None for
    a plan with nothing that `has_extras` names: without that code half is compiled.
    """
    k_source, k_like, k_kind, k_pack = key_reader
    v_source, v_like, v_kind, v_pack = value_reader
    header = simd.address(plan)
    H, max_vectors = read_word(header, at.QO_HEADS), read_word(header, at.MAX_VECTORS)
    group = H // read_word(header, at.KV_HEADS)
    D_qk, D_vo = read_word(header, at.DIM_QK), read_word(header, at.DIM_VO)
    page_size, split = read_word(header, at.PAGE_SIZE), read_word(header, at.SPLIT_KEYS)
    latent = read_word(header, at.LATENT)
    wide_qk, wide_vo = (D_qk + 15) // 16 * 16, (D_vo + 15) // 16 * 16
    qk_bytes, vo_bytes = 4 * wide_qk, 4 * wide_vo
    packed_bytes = CHUNK * max(qk_bytes, vo_bytes) if copies(k_pack) or copies(v_pack) else 0
    each = qk_bytes + 2 * vo_bytes + SCORE_BYTES + STATE_BYTES
    memory = allocate(max_vectors * each + 2 * SCALE_TABLES + 1024 + 64 + packed_bytes + 64)
    q_tile = (memory + 63) // 64 * 64
    acc = q_tile + max_vectors * qk_bytes
    running = acc + max_vectors * vo_bytes
    s = running + max_vectors * vo_bytes
    state = s + max_vectors * SCORE_BYTES
    tables = state + max_vectors * STATE_BYTES
    scratch = tables + 2 * SCALE_TABLES
    ramp = scratch + 1024
    packed = ramp + 64
    for i in range(16):
        write_f32(ramp + 4 * i, i)

    first_item = read_word(read_word(header, at.SHARES), start)
    end_item = read_word(read_word(header, at.SHARES), stop)
    for item in range(first_item, end_item):
        fields = read_word(header, at.ITEMS) + at.ITEM_BYTES * item
        request, row = read_word(fields, at.ITEM_REQUEST), read_word(fields, at.ITEM_ROW)
        end_row = row + read_word(fields, at.ITEM_N_ROWS)
        head, first_position = read_word(fields, at.ITEM_HEAD), read_word(fields, at.ITEM_POSITION)
        begin, end_key = read_word(fields, at.ITEM_FIRST_KEY), read_word(fields, at.ITEM_END_KEY)
        partial, shared = read_word(fields, at.ITEM_PARTIAL), read_word(fields, at.ITEM_SHARED)
        k_head, v_head = k + head * strides[2], v + head * strides[6]
        border = (begin // split + 1) * split
        M, tile, shared_pass = (end_row - row) * group, np.int64(0), shared > 0
        load_queries(
            header, k_like, k_pack, q, q_row_bytes, M, group, row, head, first_position, q_tile,
            wide_qk,
        )  # fmt: skip
        reset_state(M, acc, vo_bytes, state)
        visible_ranges(header, request, row, end_row, group, state)
        while row < end_row:  # shared keys with all rows, then each request's own keys
            pages = read_i32(read_word(header, at.KV_INDPTR) + 4 * request)
            pages = read_word(header, at.KV_INDICES) + 4 * pages
            rows, position, end = request_rows(header, request, row, end_row, end_key)
            if shared_pass:
                end = shared
            else:
                M = rows * group
            multi_split = shared_pass or end > border
            sums, records = acc + tile * vo_bytes, state + tile * STATE_BYTES
            key, now, ahead = begin, tables, tables + 2 * TABLE
            stop_key = min(min(key // CHUNK * CHUNK + CHUNK, end), (key // split + 1) * split)
            if key < end:
                row_addresses(pages, page_size, key, stop_key, k_head, v_head, strides, now)
                scale_addresses(k_source, header, pages, page_size, head, key, stop_key, now)
            while key < end:
                # Only visible keys are addressed: others may lie on freed pages.
                base, next_base = key // CHUNK * CHUNK, stop_key // CHUNK * CHUNK
                next_stop = min(min(next_base + CHUNK, end), (stop_key // split + 1) * split)
                if stop_key < next_stop:
                    row_addresses(
                        pages, page_size, stop_key, next_stop, k_head, v_head, strides, ahead
                    )
                    scale_addresses(
                        k_source, header, pages, page_size, head, stop_key, next_stop, ahead
                    )
                # Prefetch whole chunks half a chunk ahead: values during Q K^T, and the next keys
                # during P V; latent keys and values are decoded together.
                n_keys = strides[3] if next_stop - stop_key == CHUNK else 0
                n_values = strides[7] if stop_key - key == CHUNK else 0
                next_values = now + TABLE
                if latent:
                    next_values, n_values = ahead + TABLE, strides[7] if n_keys != 0 else 0
                first, last = key - base, stop_key - base
                unpack_keys(k_source, k_kind, k_pack, header, head, base, now, first, last, packed)
                pad_table(now, first, last)
                for m in range(M):
                    record = records + STATE_BYTES * m
                    seen = max(read_i64(record + LOW) - base, first)
                    write_i64(record + FIRST, seen)
                    seen_end = max(seen, min(read_i64(record + HIGH) - base, last))
                    write_i64(record + LAST, seen_end)
                narrow_ranges(extras, header, M, group, head, request, row, base, records)
                vectors = q_tile + tile * qk_bytes
                qk_scores(
                    k_like, M, vectors, qk_bytes, now, records, s, scratch, next_values, n_values
                )
                if stop_key == end and item + 1 < end_item:
                    prefetch_item(header, item + 1, page_size, k, v, strides)
                softmax_weights(
                    header, extras, M, group, head, request, row, position, base, s, records, ramp
                )
                if not latent:
                    unpack_values(v_source, v_kind, v_pack, now + TABLE, first, last, D_vo, packed)
                accumulate_pv(v_like, M, sums, vo_bytes, records, s, now + TABLE, ahead, n_keys)
                if multi_split and (stop_key % split == 0 or (stop_key == end and not shared_pass)):
                    merge_split(M, running + tile * vo_bytes, sums, vo_bytes, records)
                key, stop_key, now, ahead = stop_key, next_stop, ahead, now
            if shared_pass:
                shared_pass, begin = False, shared
                continue
            if partial >= 0:
                place = partial * (vo_bytes + 4 * at.PARTIAL_TAIL)
                store_partial(M, sums, vo_bytes, records, read_word(header, at.PARTIALS) + place)
            else:
                others = running + tile * vo_bytes if multi_split else np.int64(0)
                write_results(
                    header, extras, M, group, request, row, head, sums, others, vo_bytes, records,
                    out, lse,
                )  # fmt: skip
            request, row, tile = request + 1, row + rows, tile + M
    release(memory)

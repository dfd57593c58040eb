"""The division of a step's attention into work items; compiled, because it runs every step."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import (
    allocate,
    read_i32,
    read_i64,
    read_word,
    release,
    write_i64,
)

# Reading a key and its value costs about what the sums of four query vectors cost; starting an
# item costs as much as a chunk of keys for one vector.
KEY_COST = 4
ITEM_COST = 64
PIECES_PER_THREAD = 4
"""A tile that is more than a piece is divided along its keys, where it has several splits."""


@jit.device_function
def share_out(items, n_items, total, shares, n_shares):
    """Write the first item of each share: contiguous, and as equal in cost as that allows."""
    done, item = np.int64(0), np.int64(0)
    for share in range(n_shares):
        write_i64(shares + 8 * share, item)
        target = total * (share + 1) // n_shares
        while item < n_items:
            cost = read_i64(items + at.ITEM_BYTES * item + 64)
            if done + cost // 2 >= target and share < n_shares - 1:
                break
            done += cost
            item += 1
    write_i64(shares + 8 * n_shares, n_items)


@jit.device_function
def write_item(place, request, row, rows, head, position, first, end, partial, cost, shared):
    """Write a row of the table of items."""
    write_i64(place, request)
    write_i64(place + 8, row)
    write_i64(place + 16, rows)
    write_i64(place + 24, head)
    write_i64(place + 32, position)
    write_i64(place + 40, first)
    write_i64(place + 48, end)
    write_i64(place + 56, partial)
    write_i64(place + 64, cost)
    write_i64(place + 72, shared)


@jit.device_function
def count_shared(header, rows_at, kv_indptr, kv_indices, lens_at, b, most_own):
    """Return how many first keys of requests `b` and `b` - 1 lie on the same pages.

    Whole chunks, all of which every row of the two sees; each has keys of its own behind them, and
    at most `most_own`.
    """
    row = read_i32(rows_at + 4 * b)
    n_rows, rows_before = read_i32(rows_at + 4 * b + 4) - row, row - read_i32(rows_at + 4 * b - 4)
    if n_rows == 0 or rows_before == 0:
        return np.int64(0)
    kv_len, len_before = read_i32(lens_at + 4 * b), read_i32(lens_at + 4 * b - 4)
    most = min(kv_len, len_before) - 1
    if read_word(header, at.CAUSAL) != 0:
        most = min(most, min(kv_len - n_rows, len_before - rows_before) + 1)
    start = read_i32(kv_indptr + 4 * b)
    before = read_i32(kv_indptr + 4 * b - 4)
    page_size, n = read_word(header, at.PAGE_SIZE), np.int64(0)
    while n < most and read_i32(kv_indices + 4 * start) == read_i32(kv_indices + 4 * before):
        start, before, n = start + 1, before + 1, n + page_size
    n = max(min(n, most), np.int64(0)) // CHUNK * CHUNK
    return n if max(kv_len, len_before) - n <= most_own else np.int64(0)


@jit.device_function
def gather(alike, rows_at, b, n_requests, tile_rows, most):
    """Return how many requests from `b` on go together, and how many keys they share.

    One more joins where that saves reading: n requests that share P keys save (n - 1) P of them.
    """
    n, shared = np.int64(1), np.int64(0)
    while b + n < n_requests and n < most:
        common = read_i64(alike + 8 * (b + n))
        if n > 1:
            common = min(common, shared)
        n_rows = read_i32(rows_at + 4 * (b + n) + 4) - read_i32(rows_at + 4 * b)
        if common == 0 or n_rows > tile_rows or n * common < (n - 1) * shared:
            break
        n, shared = n + 1, common
    return n, shared


@jit.kernel
def schedule(plan, qo_indptr, kv_indptr, kv_indices, kv_lens, n_threads):
    """Fill the tables; return numbers of items, merges, shares, partial rows and multiply-adds.

    Nothing is written beyond the tables' ends: where a number is larger than its table, the
    caller makes the table larger and calls again.
    """
    header = simd.address(plan)
    items, merges = read_word(header, at.ITEMS), read_word(header, at.MERGES)
    G = read_word(header, at.KV_HEADS)
    group = read_word(header, at.QO_HEADS) // G
    window, causal = read_word(header, at.WINDOW), read_word(header, at.CAUSAL)
    split = read_word(header, at.SPLIT_KEYS)
    may_split = read_word(header, at.MAY_SPLIT) != 0 and n_threads > 1
    may_share = read_word(header, at.MAY_SHARE) != 0 and window < 0
    for place in (at.MASK, at.SLOPES, at.BIAS, at.ROPE):  # what depends on the request
        may_share = may_share and read_word(header, place) == 0
    tile_rows = max(1, at.TILE_VECTORS // group)
    rows_at, lens_at = simd.address(qo_indptr), simd.address(kv_lens)
    n_items, n_merges, n_partials = np.int64(0), np.int64(0), np.int64(0)
    total, pairs, most, piece = np.int64(0), np.int64(0), np.int64(1), np.int64(0)
    n_requests = len(kv_lens)
    # With fewer heads than threads long keys are divided among threads, which items of several
    # requests are not.
    most_own = split if may_split and n_threads > G else np.int64(1) << 62
    alike = allocate(8 * n_requests + 8)
    for b in range(n_requests):
        shared = np.int64(0)
        if b > 0 and may_share:
            shared = count_shared(
                header, rows_at, simd.address(kv_indptr), simd.address(kv_indices), lens_at, b,
                most_own,
            )  # fmt: skip
        write_i64(alike + 8 * b, shared)
    together = max(np.int64(1), n_requests * G // n_threads)  # so that all threads have an item
    # head -1 only counts, so that the cost of all is known before the keys of a tile are divided
    for head in range(-1, G):
        next_request = np.int64(0)
        for b in range(n_requests):
            if b < next_request:
                continue
            row, kv_len = read_i32(rows_at + 4 * b), read_i32(lens_at + 4 * b)
            n, shared = gather(alike, rows_at, b, n_requests, tile_rows, together)
            if n > 1:
                next_request = b + n
                rows, cost, end = np.int64(0), shared * KEY_COST + ITEM_COST, np.int64(0)
                for i in range(b, b + n):
                    own, keys = read_i32(rows_at + 4 * i + 4), read_i32(lens_at + 4 * i)
                    own -= read_i32(rows_at + 4 * i)
                    rows, end = rows + own, max(end, keys)
                    cost += keys * own * group + (keys - shared) * KEY_COST
                    if head < 0:
                        pairs += keys * own * group
                most = max(most, rows * group)
                if head < 0:
                    total += cost
                    continue
                if n_items < read_word(header, at.ITEM_ROOM):
                    position = kv_len - (read_i32(rows_at + 4 * b + 4) - row)
                    write_item(
                        items + at.ITEM_BYTES * n_items, b, row, rows, head, position, 0, end, -1,
                        cost, shared,
                    )  # fmt: skip
                n_items += 1
                continue
            end_row = read_i32(rows_at + 4 * b + 4)
            position = kv_len - (end_row - row)
            while row < end_row:
                rows = min(tile_rows, end_row - row)
                begin, end = np.int64(0), kv_len
                if window >= 0:
                    begin = max(begin, position - window)
                if causal != 0:
                    end = min(end, position + rows)
                end = max(begin, end)
                each = rows * group + KEY_COST
                most = max(most, rows * group)
                pieces = (end + split - 1) // split - begin // split
                if not may_split or (end - begin) * each <= piece:
                    pieces = min(pieces, 1)
                if head < 0:
                    total += (end - begin) * each + ITEM_COST
                    pairs += (end - begin) * rows * group
                    pieces = np.int64(0)
                elif pieces < 1:
                    pieces = np.int64(1)
                first, partial = begin, np.int64(-1)
                for i in range(pieces):
                    stop = end
                    if pieces > 1:
                        stop = min(end, (first // split + 1) * split)
                        partial = n_partials + i * rows * group
                    if n_items < read_word(header, at.ITEM_ROOM):
                        write_item(
                            items + at.ITEM_BYTES * n_items, b, row, rows, head, position, first,
                            stop, partial, (stop - first) * each + ITEM_COST, 0,
                        )  # fmt: skip
                    n_items += 1
                    first = stop
                if pieces > 1:
                    if n_merges < read_word(header, at.MERGE_ROOM):
                        place = merges + at.MERGE_BYTES * n_merges
                        write_i64(place, row)
                        write_i64(place + 8, rows)
                        write_i64(place + 16, head)
                        write_i64(place + 24, n_partials)
                        write_i64(place + 32, pieces)
                    n_merges += 1
                    n_partials += pieces * rows * group
                row += rows
                position += rows
        if head < 0:
            total *= G
            piece = total // (PIECES_PER_THREAD * n_threads)
    release(alike)
    n_shares = max(min(n_threads, n_items), 1)
    if n_items <= read_word(header, at.ITEM_ROOM):
        share_out(items, n_items, total, read_word(header, at.SHARES), n_shares)
    write_i64(header + 8 * at.N_MERGES, n_merges)
    write_i64(header + 8 * at.MOST, most)
    write_i64(header + 8 * at.QO_INDPTR, rows_at)
    write_i64(header + 8 * at.KV_INDPTR, simd.address(kv_indptr))
    write_i64(header + 8 * at.KV_INDICES, simd.address(kv_indices))
    write_i64(header + 8 * at.KV_LENS, lens_at)
    dims = read_word(header, at.DIM_QK) + read_word(header, at.DIM_VO)
    return n_items, n_merges, n_shares, n_partials, np.float64(pairs) * G * dims

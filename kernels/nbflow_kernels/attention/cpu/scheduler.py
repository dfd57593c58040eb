"""Schedule of a step's attention for CPU threads: work items, shares and split-KV merges.

Compiled, because it runs every step.
"""

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

# Cost model, in products of one query vector with one key: loading a key and its value costs about
# four, starting an item 64.
KEY_COST = 4
ITEM_COST = 64
SPLITS_PER_THREAD = 4
"""Work quanta per thread; a tile above one quantum is split along its keys."""


@jit.device_function
def assign_shares(items, n_items, shares, n_shares):
    """Assign contiguous items to shares of about equal cost; write the first item of each.

    Every share gets an item if there are enough.
    """
    total, done, item = np.int64(0), np.int64(0), np.int64(0)
    for i in range(n_items):
        total += read_word(items + at.ITEM_BYTES * i, at.ITEM_COST)
    for share in range(n_shares):
        write_i64(shares + 8 * share, item)
        first, left = item, n_shares - share - 1
        target = total * (share + 1) // n_shares
        while item < n_items - left:
            cost = read_word(items + at.ITEM_BYTES * item, at.ITEM_COST)
            if left > 0 and item > first and done + cost // 2 >= target:
                break
            done += cost
            item += 1
    write_i64(shares + 8 * n_shares, n_items)


@jit.device_function
def write_row(place, columns):
    """Write a row of the item table or of the merge table."""
    for i in range(len(columns)):
        write_i64(place + 8 * i, columns[i])


@jit.device_function
def shared_prefix_keys(header, rows_at, kv_indptr, kv_indices, lens_at, b, max_own):
    """Return the length of the common prefix of requests `b` and `b` - 1 on shared pages.

    In whole chunks visible to all their rows; each request has 1 to `max_own` keys after it.
    """
    row = read_i32(rows_at + 4 * b)
    n_rows, rows_before = read_i32(rows_at + 4 * b + 4) - row, row - read_i32(rows_at + 4 * b - 4)
    if n_rows == 0 or rows_before == 0:
        return np.int64(0)
    kv_len, len_before = read_i32(lens_at + 4 * b), read_i32(lens_at + 4 * b - 4)
    max_vectors = min(kv_len, len_before) - 1
    if read_word(header, at.CAUSAL) != 0:
        max_vectors = min(max_vectors, min(kv_len - n_rows, len_before - rows_before) + 1)
    start = read_i32(kv_indptr + 4 * b)
    before = read_i32(kv_indptr + 4 * b - 4)
    page_size, n = read_word(header, at.PAGE_SIZE), np.int64(0)
    while n < max_vectors and read_i32(kv_indices + 4 * start) == read_i32(kv_indices + 4 * before):
        start, before, n = start + 1, before + 1, n + page_size
    n = max(min(n, max_vectors), np.int64(0)) // CHUNK * CHUNK
    return n if max(kv_len, len_before) - n <= max_own else np.int64(0)


@jit.device_function
def group_requests(prefix_keys, rows_at, b, n_requests, tile_rows, max_vectors):
    """Return the number of requests from `b` on to process as one item, and their shared keys.

    A request joins where that saves loads: n requests sharing P keys save (n - 1) P.
    """
    n, shared = np.int64(1), np.int64(0)
    while b + n < n_requests and n < max_vectors:
        common = read_i64(prefix_keys + 8 * (b + n))
        if n > 1:
            common = min(common, shared)
        n_rows = read_i32(rows_at + 4 * (b + n) + 4) - read_i32(rows_at + 4 * b)
        if common == 0 or n_rows > tile_rows or n * common < (n - 1) * shared:
            break
        n, shared = n + 1, common
    return n, shared


@jit.kernel(unroll=False)
def schedule(plan, qo_indptr, kv_indptr, kv_indices, kv_lens, n_threads):
    """Fill the tables; return the numbers of items, merges, shares, partial rows and multiply-adds.

    Rows beyond the capacity of a table are counted but not written: the caller grows the table and
    calls again.
    """
    header = simd.address(plan)
    items, merges = read_word(header, at.ITEMS), read_word(header, at.MERGES)
    G = read_word(header, at.KV_HEADS)
    group = read_word(header, at.QO_HEADS) // G
    window, causal = read_word(header, at.WINDOW), read_word(header, at.CAUSAL)
    split = read_word(header, at.SPLIT_KEYS)
    may_split = read_word(header, at.MAY_SPLIT) != 0 and n_threads > 1
    chunk = read_word(header, at.ATTENTION_CHUNK)
    may_share = read_word(header, at.MAY_SHARE) != 0 and window < 0 and chunk == 0
    for field in (at.MASK, at.SLOPES, at.BIAS, at.ROPE):  # per-request tables
        may_share = may_share and read_word(header, field) == 0
    tile_rows = max(1, at.TILE_VECTORS // group)
    rows_at, lens_at = simd.address(qo_indptr), simd.address(kv_lens)
    n_items, n_merges, n_partials = np.int64(0), np.int64(0), np.int64(0)
    total, pairs, max_vectors, quantum = np.int64(0), np.int64(0), np.int64(1), np.int64(0)
    n_requests = len(kv_lens)
    # With fewer heads than threads, long sequences are split, which shared items cannot be.
    max_own = split if may_split and n_threads > G else np.int64(1) << 62
    nothing, whole = np.int64(0), np.int64(-1)  # literals would compile `write_row` twice more
    prefix_keys = allocate(8 * n_requests + 8)
    for b in range(n_requests):
        shared = np.int64(0)
        if b > 0 and may_share:
            shared = shared_prefix_keys(
                header, rows_at, simd.address(kv_indptr), simd.address(kv_indices), lens_at, b,
                max_own,
            )  # fmt: skip
        write_i64(prefix_keys + 8 * b, shared)
    max_group = max(np.int64(1), n_requests * G // n_threads)  # leaves an item for each thread
    # The first pass, with head -1, only sums the cost, from which the quantum follows.  Heads of a
    # request follow each other, as they do in the pages.
    for first_head, end_head in ((-1, 0), (0, G)):
        next_request = np.int64(0)
        for b in range(n_requests):
            if b < next_request:
                continue
            for head in range(first_head, end_head):
                row, kv_len = read_i32(rows_at + 4 * b), read_i32(lens_at + 4 * b)
                n, shared = group_requests(
                    prefix_keys, rows_at, b, n_requests, tile_rows, max_group
                )
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
                    max_vectors = max(max_vectors, rows * group)
                    if head < 0:
                        total += cost
                        continue
                    if n_items < read_word(header, at.ITEM_CAPACITY):
                        position = kv_len - (read_i32(rows_at + 4 * b + 4) - row)
                        write_row(
                            items + at.ITEM_BYTES * n_items,
                            (b, row, rows, head, position, nothing, end, whole, cost, shared),
                        )
                    n_items += 1
                    continue
                end_row = read_i32(rows_at + 4 * b + 4)
                position = kv_len - (end_row - row)
                while row < end_row:
                    rows = min(tile_rows, end_row - row)
                    begin, end = np.int64(0), kv_len
                    if window >= 0:
                        begin = max(begin, position - window)
                    if chunk > 0:
                        begin = max(begin, max(0, position) // chunk * chunk)
                        end = min(end, (max(0, position + rows - 1) // chunk + 1) * chunk)
                    if causal != 0:
                        end = min(end, position + rows)
                    end = max(begin, end)
                    each = rows * group + KEY_COST
                    max_vectors = max(max_vectors, rows * group)
                    n_splits = (end + split - 1) // split - begin // split
                    if not may_split or (end - begin) * each <= quantum:
                        n_splits = min(n_splits, 1)
                    if head < 0:
                        total += (end - begin) * each + ITEM_COST
                        pairs += (end - begin) * rows * group
                        n_splits = np.int64(0)
                    elif n_splits < 1:
                        n_splits = np.int64(1)
                    first, partial = begin, np.int64(-1)
                    for i in range(n_splits):
                        stop = end
                        if n_splits > 1:
                            stop = min(end, (first // split + 1) * split)
                            partial = n_partials + i * rows * group
                        if n_items < read_word(header, at.ITEM_CAPACITY):
                            cost = (stop - first) * each + ITEM_COST
                            write_row(
                                items + at.ITEM_BYTES * n_items,
                                (
                                    b,
                                    row,
                                    rows,
                                    head,
                                    position,
                                    first,
                                    stop,
                                    partial,
                                    cost,
                                    nothing,
                                ),
                            )
                        n_items += 1
                        first = stop
                    if n_splits > 1:
                        if n_merges < read_word(header, at.MERGE_CAPACITY):
                            write_row(
                                merges + at.MERGE_BYTES * n_merges,
                                (row, rows, head, n_partials, n_splits),
                            )
                        n_merges += 1
                        n_partials += n_splits * rows * group
                    row += rows
                    position += rows
        if first_head < 0:
            total *= G
            quantum = total // (SPLITS_PER_THREAD * n_threads)
    release(prefix_keys)
    n_shares = max(min(n_threads, n_items), 1)
    if n_items <= read_word(header, at.ITEM_CAPACITY):
        assign_shares(items, n_items, read_word(header, at.SHARES), n_shares)
    write_i64(header + 8 * at.N_MERGES, n_merges)
    write_i64(header + 8 * at.MAX_VECTORS, max_vectors)
    write_i64(header + 8 * at.QO_INDPTR, rows_at)
    write_i64(header + 8 * at.KV_INDPTR, simd.address(kv_indptr))
    write_i64(header + 8 * at.KV_INDICES, simd.address(kv_indices))
    write_i64(header + 8 * at.KV_LENS, lens_at)
    dims = read_word(header, at.DIM_QK) + read_word(header, at.DIM_VO)
    return n_items, n_merges, n_shares, n_partials, np.float64(pairs) * G * dims

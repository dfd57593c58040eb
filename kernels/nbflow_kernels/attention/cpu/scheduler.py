"""Schedule of a step's attention for CPU threads: work items, shares and split-KV merges.

Compiled, because it runs every step.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit
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


@jit.kernel(unroll=False, vectorize=False)
def schedule(header, rows_at, kv_indptr, kv_indices, lens_at, n_requests, n_threads):
    """Fill the tables; return the numbers of items, merges, shares, partial rows and multiply-adds.

    All arguments are integers, which compile in half the time of arrays: addresses of the plan's
    header and of the int32 arrays of a step (rows, pages, page numbers, keys).  Rows beyond the
    capacity of a table are counted but not written: the caller grows the table and calls again.
    """
    G = read_word(header, at.KV_HEADS)
    group = read_word(header, at.QO_HEADS) // G
    window, causal = read_word(header, at.WINDOW), read_word(header, at.CAUSAL)
    split, chunk = read_word(header, at.SPLIT_KEYS), read_word(header, at.ATTENTION_CHUNK)
    may_split = read_word(header, at.MAY_SPLIT) != 0 and n_threads > 1
    per_request = read_word(header, at.MASK) | read_word(header, at.SLOPES)  # tables
    per_request |= read_word(header, at.BIAS) | read_word(header, at.ROPE)
    may_share = read_word(header, at.MAY_SHARE) != 0 and window < 0 and chunk == 0
    tile_rows = max(1, at.TILE_VECTORS // group)
    n_items, n_merges, n_partials = np.int64(0), np.int64(0), np.int64(0)
    total, pairs, max_vectors, quantum = np.int64(0), np.int64(0), np.int64(1), np.int64(0)
    # With fewer heads than threads, long sequences are split, which shared items cannot be.
    max_own = split if may_split and n_threads > G else np.int64(1) << 62
    prefix_keys = allocate(8 * n_requests + 8)
    for b in range(n_requests):
        keys = np.int64(0)
        if b > 0 and may_share and per_request == 0:
            keys = shared_prefix_keys(header, rows_at, kv_indptr, kv_indices, lens_at, b, max_own)
        write_i64(prefix_keys + 8 * b, keys)
    max_group = max(np.int64(1), n_requests * G // n_threads)  # leaves an item for each thread
    # The first pass, with head -1, only sums the cost, from which the quantum follows.  Heads of a
    # request follow each other, as they do in the pages.
    for first_head in range(-1, 1):
        end_head, b = G * (first_head + 1), np.int64(0)
        while b < n_requests:
            n, shared = group_requests(prefix_keys, rows_at, b, n_requests, tile_rows, max_group)
            first_row, end_row = read_i32(rows_at + 4 * b), read_i32(rows_at + 4 * b + 4)
            kv_len = read_i32(lens_at + 4 * b)
            rows, cost, end = np.int64(0), shared * KEY_COST + ITEM_COST, np.int64(0)
            products, n_splits, first, each = np.int64(0), np.int64(1), np.int64(0), np.int64(0)
            for i in range(b, b + n if n > 1 else b):
                own, keys = read_i32(rows_at + 4 * i + 4), read_i32(lens_at + 4 * i)
                own -= read_i32(rows_at + 4 * i)
                rows, end, products = rows + own, max(end, keys), products + keys * own * group
                cost += keys * own * group + (keys - shared) * KEY_COST
            for head in range(first_head, end_head):
                row, position = first_row, kv_len - (end_row - first_row)
                while row < end_row:
                    if n == 1:
                        rows, first, end, shared = min(tile_rows, end_row - row), 0, kv_len, 0
                        if window >= 0:
                            first = max(first, position - window)
                        if chunk > 0:
                            first = max(first, max(0, position) // chunk * chunk)
                            end = min(end, (max(0, position + rows - 1) // chunk + 1) * chunk)
                        if causal != 0:
                            end = min(end, position + rows)
                        end = max(first, end)
                        each, products = rows * group + KEY_COST, (end - first) * rows * group
                        cost = (end - first) * each + ITEM_COST
                        n_splits = np.int64(1)
                        if may_split and cost - ITEM_COST > quantum:
                            n_splits = max(n_splits, (end + split - 1) // split - first // split)
                    max_vectors = max(max_vectors, rows * group)
                    if head < 0:
                        total, pairs, n_splits = total + cost, pairs + products, np.int64(0)
                    elif n_splits > 1:
                        if n_merges < read_word(header, at.MERGE_CAPACITY):
                            to = read_word(header, at.MERGES) + at.MERGE_BYTES * n_merges
                            write_i64(to + 8 * at.MERGE_ROW, row)
                            write_i64(to + 8 * at.MERGE_N_ROWS, rows)
                            write_i64(to + 8 * at.MERGE_HEAD, head)
                            write_i64(to + 8 * at.MERGE_PARTIAL, n_partials)
                            write_i64(to + 8 * at.MERGE_N_SPLITS, n_splits)
                        n_merges += 1
                    begin = first
                    for _ in range(n_splits):
                        stop, partial = end, np.int64(-1)
                        if n_splits > 1:
                            stop, partial = min(end, (begin // split + 1) * split), n_partials
                            cost = (stop - begin) * each + ITEM_COST
                            n_partials += rows * group
                        if n_items < read_word(header, at.ITEM_CAPACITY):
                            to = read_word(header, at.ITEMS) + at.ITEM_BYTES * n_items
                            write_i64(to + 8 * at.ITEM_REQUEST, b)
                            write_i64(to + 8 * at.ITEM_ROW, row)
                            write_i64(to + 8 * at.ITEM_N_ROWS, rows)
                            write_i64(to + 8 * at.ITEM_HEAD, head)
                            write_i64(to + 8 * at.ITEM_POSITION, position)
                            write_i64(to + 8 * at.ITEM_FIRST_KEY, begin)
                            write_i64(to + 8 * at.ITEM_END_KEY, stop)
                            write_i64(to + 8 * at.ITEM_PARTIAL, partial)
                            write_i64(to + 8 * at.ITEM_COST, cost)
                            write_i64(to + 8 * at.ITEM_SHARED, shared)
                        n_items += 1
                        begin = stop
                    row, position = row + rows, position + rows
            b += n
        if first_head < 0:
            total *= G
            quantum = total // (SPLITS_PER_THREAD * n_threads)
    release(prefix_keys)
    n_shares = max(min(n_threads, n_items), 1)
    if n_items <= read_word(header, at.ITEM_CAPACITY):
        assign_shares(
            read_word(header, at.ITEMS), n_items, read_word(header, at.SHARES), n_shares
        )  # fmt: skip
    write_i64(header + 8 * at.N_MERGES, n_merges)
    write_i64(header + 8 * at.MAX_VECTORS, max_vectors)
    write_i64(header + 8 * at.QO_INDPTR, rows_at)
    write_i64(header + 8 * at.KV_INDPTR, kv_indptr)
    write_i64(header + 8 * at.KV_INDICES, kv_indices)
    write_i64(header + 8 * at.KV_LENS, lens_at)
    dims = read_word(header, at.DIM_QK) + read_word(header, at.DIM_VO)
    return n_items, n_merges, n_shares, n_partials, np.float64(pairs) * G * dims

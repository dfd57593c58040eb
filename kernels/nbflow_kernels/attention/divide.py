"""The division of a step's attention into work items; compiled, because it runs every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import njit, part
from nbflow_kernels.attention import layout as at

# Reading a key and its value costs about what the sums of four query vectors cost; starting an
# item costs as much as a chunk of keys for one vector.
KEY_COST = 4
ITEM_COST = 64
PIECES_PER_THREAD = 4
"""A tile that is more than a piece is divided along its keys, where it has several splits."""


@part
def tile_keys(header: Any, kv_len: Any, position: Any, n_rows: Any) -> Any:
    """Return the range of keys that some row of a tile sees."""
    begin, end = np.int64(0), np.int64(kv_len)
    if header[at.WINDOW] >= 0:
        begin = max(begin, position - header[at.WINDOW])
    if header[at.CAUSAL]:
        end = max(min(end, position + n_rows), np.int64(0))
    return begin, max(begin, end)


@part
def count_work(header: Any, qo_indptr: Any, kv_lens: Any, tile_rows: Any) -> Any:
    """Return the cost of all tiles of one head, and the (vector, key) pairs in them."""
    group = header[at.QO_HEADS] // header[at.KV_HEADS]
    cost, pairs = np.int64(0), np.int64(0)
    for b in range(len(kv_lens)):
        n = np.int64(qo_indptr[b + 1] - qo_indptr[b])
        for first in range(0, n, tile_rows):
            rows = min(tile_rows, n - first)
            begin, end = tile_keys(header, kv_lens[b], kv_lens[b] - n + first, rows)
            cost += (end - begin) * (rows * group + KEY_COST) + ITEM_COST
            pairs += (end - begin) * rows * group
    return cost, pairs


@part
def share_out(items: Any, n_items: Any, shares: Any, n_shares: Any) -> None:
    """Write the first item of each share: contiguous, and as equal in cost as that allows."""
    total = np.int64(0)
    for i in range(n_items):
        total += items[i, 8]
    done, item = np.int64(0), np.int64(0)
    for share in range(n_shares):
        shares[share] = item
        target = total * (share + 1) / n_shares
        while item < n_items and (done + items[item, 8] // 2 < target or share == n_shares - 1):
            done += items[item, 8]
            item += 1
    shares[n_shares] = n_items


@njit
def divide(
    header: Any, items: Any, merges: Any, shares: Any, qo_indptr: Any, kv_indptr: Any,
    kv_indices: Any, kv_lens: Any, n_threads: Any,
) -> Any:  # fmt: skip
    """Fill the tables; return numbers of items, merges, shares, partial rows and multiply-adds.

    Nothing is written beyond the tables' ends: where a number is larger than its table, the
    caller makes the table larger and calls again.
    """
    G, group = header[at.KV_HEADS], header[at.QO_HEADS] // header[at.KV_HEADS]
    tile_rows = max(1, at.TILE_VECTORS // group)
    cost, pairs = count_work(header, qo_indptr, kv_lens, tile_rows)
    piece = cost * G // (PIECES_PER_THREAD * n_threads)
    may_split = header[at.MAY_SPLIT] and n_threads > 1
    split = header[at.SPLIT_KEYS]
    n_items, n_merges, n_partials = np.int64(0), np.int64(0), np.int64(0)
    most = np.int64(1)
    for head in range(G):
        for b in range(len(kv_lens)):
            n = np.int64(qo_indptr[b + 1] - qo_indptr[b])
            for first in range(0, n, tile_rows):
                rows = min(tile_rows, n - first)
                row, position = qo_indptr[b] + first, kv_lens[b] - n + first
                begin, end = tile_keys(header, kv_lens[b], position, rows)
                each = rows * group + KEY_COST
                most = max(most, rows * group)
                first_split, end_split = begin // split, (end + split - 1) // split
                pieces = end_split - first_split
                if not (may_split and pieces > 1 and (end - begin) * each > piece):
                    pieces = 1
                for i in range(pieces):
                    if n_items < len(items):
                        a, z = begin, end
                        if pieces > 1:
                            a = max(begin, (first_split + i) * split)
                            z = min(end, (first_split + i + 1) * split)
                        items[n_items, 0] = b
                        items[n_items, 1] = row
                        items[n_items, 2] = rows
                        items[n_items, 3] = head
                        items[n_items, 4] = position
                        items[n_items, 5] = a
                        items[n_items, 6] = z
                        items[n_items, 7] = n_partials + i * rows * group if pieces > 1 else -1
                        items[n_items, 8] = (z - a) * each + ITEM_COST
                    n_items += 1
                if pieces > 1:
                    if n_merges < len(merges):
                        merges[n_merges, 0] = row
                        merges[n_merges, 1] = rows
                        merges[n_merges, 2] = head
                        merges[n_merges, 3] = n_partials
                        merges[n_merges, 4] = pieces
                    n_merges += 1
                    n_partials += pieces * rows * group
    n_shares = max(min(n_threads, n_items), 1)
    if n_items <= len(items):
        share_out(items, n_items, shares, n_shares)
    header[at.N_ITEMS], header[at.N_MERGES], header[at.MOST] = n_items, n_merges, most
    header[at.ITEMS], header[at.MERGES] = simd.address(items), simd.address(merges)
    header[at.SHARES], header[at.QO_INDPTR] = simd.address(shares), simd.address(qo_indptr)
    header[at.KV_INDPTR], header[at.KV_INDICES] = simd.address(kv_indptr), simd.address(kv_indices)
    header[at.KV_LENS] = simd.address(kv_lens)
    work = np.float64(pairs) * G * (header[at.DIM_QK] + header[at.DIM_VO])
    return n_items, n_merges, n_shares, n_partials, work

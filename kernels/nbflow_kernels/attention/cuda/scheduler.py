"""Schedule of a plan's work for CUDA thread blocks: tiles of query vectors, split-KV ranges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.scheduler import ITEM_COST, KEY_COST
from nbflow_kernels.attention.plan import AttentionPlan

COLUMNS = (
    "request", "row", "n_rows", "position", "first_key", "end_key", "partial", "merge",
)  # fmt: skip
MERGE_COLUMNS = ("row", "n_rows", "partial", "n_splits")
DECODE_VECTORS, PREFILL_VECTORS = 16, 64
"""Query vectors per thread block of the decode and the prefill kernel."""
MAX_SPLIT_KEYS = 512
"""Largest split size on a device; split boundaries determine the order of additions."""
SPLITS_PER_SM = 4
"""Work quanta per multiprocessor; a tile above one quantum is split along its keys."""


class Tiling(NamedTuple):
    """Requests that a kernel processes, and its tile size."""

    tile_vectors: int
    """Query vectors per tile (rows x heads of a group); at least one row."""
    more_than: int = 0
    """Process requests with more query vectors than this."""
    at_most: int = 1 << 62
    """Process requests with at most this many query vectors."""


@dataclass(frozen=True)
class CudaWorkItems:
    """Work items: tiles of query vectors with a key range, each for all KV heads."""

    items: np.ndarray
    """int32 (n, 8), see `COLUMNS`, most keys first; `partial` is -1 for a final result, `merge` the
    row of `merges` of a partial one."""
    merges: np.ndarray
    """int32 (n, 4), see `MERGE_COLUMNS`: split tiles, merged in order."""
    n_partials: int
    """Partial results per KV head."""
    most: int
    """Largest number of query vectors of an item."""
    any_multi_split: bool
    """True if an unsplit item covers more than one split."""

    @cached_property
    def n(self) -> int:
        """Number of items."""
        return len(self.items)


def split_keys(plan: AttentionPlan) -> int:
    """Return the split size in keys."""
    return min(int(plan.header[at.SPLIT_KEYS]), MAX_SPLIT_KEYS)


def schedule(
    plan: AttentionPlan,
    tiling: Tiling,
    n_sms: int,
    *,
    max_items: int | None = None,
    max_partials: int | None = None,
) -> CudaWorkItems:
    """Return the work items of the plan's step for a kernel.

    The choice of tiles to split depends on batch and device; the bits do not, as accumulators are
    merged at every multiple of `split_keys` in any case.  Limits on items or partial results leave
    only the most expensive tiles split.
    """
    H, G, _, _ = plan.heads
    group = H // G
    split = split_keys(plan)
    tile_rows = max(1, tiling.tile_vectors // group)
    n_rows = np.diff(plan.qo_indptr).astype(np.int64)
    selected = (n_rows * group > tiling.more_than) & (n_rows * group <= tiling.at_most)
    kv_lens = plan.kv_lens.astype(np.int64)
    tiles = np.where(selected, -(-n_rows // tile_rows), 0)
    request = np.repeat(np.arange(len(tiles)), tiles)
    first_row = (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    rows = np.minimum(tile_rows, n_rows[request] - first_row)
    row = plan.qo_indptr[request] + first_row
    position = kv_lens[request] - n_rows[request] + first_row

    begin, end = np.zeros(len(request), np.int64), kv_lens[request]
    if plan.window_left >= 0:
        begin = np.maximum(position - plan.window_left, 0)
    if plan.attention_chunk:
        chunk = plan.attention_chunk
        begin = np.maximum(begin, np.maximum(position, 0) // chunk * chunk)
        end = np.minimum(end, (np.maximum(position + rows - 1, 0) // chunk + 1) * chunk)
    if plan.causal:
        end = np.minimum(end, position + rows)
    end = np.maximum(begin, end)
    n_splits = np.maximum(-(-end // split) - begin // split, 1)
    multi_split = n_splits > 1
    cost = (end - begin) * (rows * group + KEY_COST) + ITEM_COST
    if plan.header[at.MAY_SPLIT]:
        n_splits[cost * SPLITS_PER_SM * n_sms <= cost.sum()] = 1
    else:
        n_splits[:] = 1

    vectors = rows * group
    for limit, needs in (
        (None if max_items is None else max_items - len(n_splits), n_splits - 1),
        (max_partials, np.where(n_splits > 1, n_splits * vectors, 0)),
    ):
        if limit is not None and needs.sum() > limit:
            order = np.argsort(-cost, kind="stable")
            n_splits[order[np.cumsum(needs[order]) > limit]] = 1
    divided = n_splits > 1
    n_partials = np.where(divided, n_splits * vectors, 0)
    first_partial = np.cumsum(n_partials) - n_partials
    tile = np.repeat(np.arange(len(request)), n_splits)
    split_index = np.arange(len(tile)) - np.repeat(np.cumsum(n_splits) - n_splits, n_splits)
    edge = (begin // split)[tile] + split_index
    first_key = np.where(split_index == 0, begin[tile], edge * split)
    end_key = np.where(divided[tile], np.minimum(end[tile], (edge + 1) * split), end[tile])
    partial = np.where(divided[tile], first_partial[tile] + split_index * vectors[tile], -1)
    columns = (
        request[tile], row[tile], rows[tile], position[tile], first_key, end_key, partial,
        np.where(divided, np.cumsum(divided) - 1, 0)[tile],
    )  # fmt: skip
    merges = (row[divided], rows[divided], first_partial[divided], n_splits[divided])
    items = np.stack(columns, axis=1).astype(np.int32)
    # Longest first: blocks start in this order, which balances the tail.
    order = np.argsort(first_key - end_key, kind="stable")
    return CudaWorkItems(
        items[order],
        np.stack(merges, axis=1).astype(np.int32),
        int(n_partials.sum()),
        int(vectors.max(initial=1)),
        bool((multi_split & ~divided).any()),
    )

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
    split, group = split_keys(plan), plan.heads[0] // plan.heads[1]
    request, row, rows, position, begin, end = _tiles(plan, tiling, group)
    vectors = rows * group
    possible = np.maximum(-(-end // split) - begin // split, 1)
    n_splits = np.ones_like(possible)
    if plan.header[at.MAY_SPLIT]:
        cost = (end - begin) * (vectors + KEY_COST) + ITEM_COST
        n_splits = np.where(cost * SPLITS_PER_SM * n_sms > cost.sum(), possible, 1)
        added, partials = n_splits - 1, np.where(n_splits > 1, n_splits * vectors, 0)
        _limit(n_splits, cost, added, None if max_items is None else max_items - len(added))
        _limit(n_splits, cost, partials, max_partials)
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
        bool(((possible > 1) & ~divided).any()),
    )


def _tiles(plan: AttentionPlan, tiling: Tiling, group: int) -> tuple[np.ndarray, ...]:
    """Return the tiles of a step: request, first row, rows, position, first key and end of keys."""
    tile_rows = max(1, tiling.tile_vectors // group)
    n_rows = np.diff(plan.qo_indptr).astype(np.int64)
    selected = (n_rows * group > tiling.more_than) & (n_rows * group <= tiling.at_most)
    kv_lens = plan.kv_lens.astype(np.int64)
    tiles = np.where(selected, -(-n_rows // tile_rows), 0)
    request = np.repeat(np.arange(len(tiles)), tiles)
    first_row = (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    rows = np.minimum(tile_rows, n_rows[request] - first_row)
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
    row = plan.qo_indptr[request] + first_row
    return request, row, rows, position, begin, np.maximum(begin, end)


def _limit(n_splits: np.ndarray, cost: np.ndarray, needs: np.ndarray, limit: int | None) -> None:
    """Leave only the most expensive tiles split, if all `needs` of the splits exceed the limit."""
    if limit is not None and needs.sum() > limit:
        order = np.argsort(-cost, kind="stable")
        n_splits[order[np.cumsum(needs[order]) > limit]] = 1

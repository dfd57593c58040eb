"""The division of a step's attention into the work of thread blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.scheduler import ITEM_COST, KEY_COST
from nbflow_kernels.attention.plan import AttentionPlan

COLUMNS = (
    "request", "row", "n_rows", "position", "first_key", "end_key", "partial", "merge",
)  # fmt: skip
MERGE_COLUMNS = ("row", "n_rows", "partial", "n_splits")
FEW_VECTORS, MANY_VECTORS = 16, 64
"""Query vectors of a thread block of the two kernels on tensor cores."""
MOST_SPLIT_KEYS = 512
"""Keys per partial result on a device, unless the plan has fewer: part of the results' bits."""
PIECES_PER_SM = 4
"""A tile that is more than a piece of the step's work is divided along its keys."""


class Tiling(NamedTuple):
    """Which requests a kernel takes, and in what tiles."""

    tile_vectors: int
    """Query vectors of a tile (rows x heads of a group); one row where a group is more."""
    more_than: int = 0
    """Requests with that many query vectors or fewer are left to another kernel."""
    at_most: int = 1 << 62
    """Those with more are, too."""


@dataclass(frozen=True)
class CudaWorkItems:
    """Tiles of query vectors with a range of keys; every one stands for all key/value heads."""

    items: np.ndarray
    """int32 (n, 8), see `COLUMNS`, those with most keys first; `partial` is -1 for a final result,
    `merge` the row of `merges` that partial ones belong to."""
    merges: np.ndarray
    """int32 (n, 4), see `MERGE_COLUMNS`: whose partial results are added, in order."""
    n_partials: int
    """Partial results of each key/value head."""
    most: int
    """Most query vectors of an item."""
    any_several: bool
    """Whether an item with a final result has more keys than a partial result may."""


def split_keys(plan: AttentionPlan) -> int:
    """Return the keys of a partial result."""
    return min(int(plan.header[at.SPLIT_KEYS]), MOST_SPLIT_KEYS)


def divide_for_device(
    plan: AttentionPlan,
    tiling: Tiling,
    n_sms: int,
    *,
    most_items: int | None = None,
    most_partials: int | None = None,
) -> CudaWorkItems:
    """Divide the plan's step, or the part of it that a kernel takes.

    Which tiles are divided along their keys depends on the batch and on the device, the results'
    bits do not: sums start again after every `split_keys` keys in any case.  With a limit on the
    items or on the partial results, only the most expensive tiles are divided.
    """
    H, G, _, _ = plan.heads
    group = H // G
    split = split_keys(plan)
    tile_rows = max(1, tiling.tile_vectors // group)
    n_rows = np.diff(plan.qo_indptr).astype(np.int64)
    taken = (n_rows * group > tiling.more_than) & (n_rows * group <= tiling.at_most)
    kv_lens = plan.kv_lens.astype(np.int64)
    tiles = np.where(taken, -(-n_rows // tile_rows), 0)
    request = np.repeat(np.arange(len(tiles)), tiles)
    first_row = (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    rows = np.minimum(tile_rows, n_rows[request] - first_row)
    row = plan.qo_indptr[request] + first_row
    position = kv_lens[request] - n_rows[request] + first_row

    begin, end = np.zeros(len(request), np.int64), kv_lens[request]
    if plan.window_left >= 0:
        begin = np.maximum(position - plan.window_left, 0)
    if plan.causal:
        end = np.minimum(end, position + rows)
    end = np.maximum(begin, end)
    pieces = np.maximum(-(-end // split) - begin // split, 1)
    several = pieces > 1
    cost = (end - begin) * (rows * group + KEY_COST) + ITEM_COST
    if plan.header[at.MAY_SPLIT]:
        pieces[cost * PIECES_PER_SM * n_sms <= cost.sum()] = 1
    else:
        pieces[:] = 1

    vectors = rows * group
    for limit, needs in (
        (None if most_items is None else most_items - len(pieces), pieces - 1),
        (most_partials, np.where(pieces > 1, pieces * vectors, 0)),
    ):
        if limit is not None and needs.sum() > limit:
            order = np.argsort(-cost, kind="stable")
            pieces[order[np.cumsum(needs[order]) > limit]] = 1
    divided = pieces > 1
    n_partials = np.where(divided, pieces * vectors, 0)
    first_partial = np.cumsum(n_partials) - n_partials
    tile = np.repeat(np.arange(len(request)), pieces)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    edge = (begin // split)[tile] + piece
    first_key = np.where(piece == 0, begin[tile], edge * split)
    end_key = np.where(divided[tile], np.minimum(end[tile], (edge + 1) * split), end[tile])
    partial = np.where(divided[tile], first_partial[tile] + piece * vectors[tile], -1)
    columns = (
        request[tile], row[tile], rows[tile], position[tile], first_key, end_key, partial,
        np.where(divided, np.cumsum(divided) - 1, 0)[tile],
    )  # fmt: skip
    merges = (row[divided], rows[divided], first_partial[divided], pieces[divided])
    items = np.stack(columns, axis=1).astype(np.int32)
    # those with most keys first: thread blocks begin in this order, and the last ones end together
    order = np.argsort(first_key - end_key, kind="stable")
    return CudaWorkItems(
        items[order],
        np.stack(merges, axis=1).astype(np.int32),
        int(n_partials.sum()),
        int(vectors.max(initial=1)),
        bool((several & ~divided).any()),
    )

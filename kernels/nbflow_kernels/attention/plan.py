"""Who does what in one step of batch attention: requests, tiles of query rows, heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from nbflow_kernels._dispatch import check_array
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.kvcache.pages import check_page_table, count_tokens

LAYOUTS = ("NHD", "HND")
TILE_VECTORS = 32
"""Query vectors (rows x heads of a group) per work item; they share loads of keys and values."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The work of one step, the same for every layer; all NumPy, meant to be looked at.

    ``pandas.DataFrame(plan.items, columns=plan.COLUMNS)`` is a readable table of it.
    """

    COLUMNS = ("request", "row", "n_rows", "kv_head", "position")

    items: np.ndarray = field(repr=False)
    """int32 (n_items, 5): request, first query row, number of rows, key/value head, and the
    position of the first row in its sequence.  A range of items is one thread's share."""
    qo_indptr: np.ndarray
    """int32 (B + 1): query rows of each request."""
    kv_indptr: np.ndarray
    """int32 (B + 1): entries of `kv_indices` of each request."""
    kv_indices: np.ndarray = field(repr=False)
    """int32 (n_pages): pages of each request, in order."""
    kv_lens: np.ndarray
    """int32 (B): keys of each request."""
    sizes: tuple[int, int, int, int, int, bool, int]
    """Query heads, key/value heads, head size, page size, window_left, causal, rows per tile."""
    kv_layout: str
    """``"NHD"`` or ``"HND"``."""
    sm_scale: float
    """Factor of the dot products."""
    logits_soft_cap: float
    """Bound of the scores; 0 for none."""
    work: float
    """Multiply-adds of one layer."""

    @property
    def n_rows(self) -> int:
        """Return the number of query rows of the step."""
        return int(self.qo_indptr[-1])


def check_layout(kv_layout: str) -> None:
    """Raise unless `kv_layout` is one of the two names."""
    if kv_layout not in LAYOUTS:
        raise unknown_name("kv_layout", kv_layout, LAYOUTS)


def check_scalars(
    head_dim: int, sm_scale: float | None, logits_soft_cap: float | None
) -> tuple[float, float]:
    """Return the scale and the soft cap (0 for none) with defaults filled in."""
    if logits_soft_cap is not None and not 0.0 <= logits_soft_cap < float("inf"):
        raise UsageError(
            f"logits_soft_cap must be positive, or None for none, got {logits_soft_cap}"
        )
    return 1.0 / sqrt(head_dim) if sm_scale is None else float(sm_scale), float(
        logits_soft_cap or 0.0
    )


def check_heads(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise unless the heads can be grouped."""
    if min(num_qo_heads, num_kv_heads, head_dim) < 1:
        raise UsageError(
            "num_qo_heads, num_kv_heads and head_dim must be positive, got "
            f"{num_qo_heads}, {num_kv_heads}, {head_dim}"
        )
    if num_qo_heads % num_kv_heads:
        raise UsageError(
            f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_qo_heads}"
        )


def make_plan(
    qo_indptr: np.ndarray,
    paged_kv_indptr: np.ndarray,
    paged_kv_indices: np.ndarray,
    paged_kv_last_page_len: np.ndarray,
    heads: tuple[int, int, int],
    page_size: int,
    *,
    kv_layout: str,
    causal: bool,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
) -> AttentionPlan:
    """Check the step's tables and cut the work into items; `heads` is (H, G, D)."""
    H, G, D = heads
    check_heads(H, G, D)
    scale, cap = check_scalars(D, sm_scale, logits_soft_cap)
    check_page_table(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
    check_array("qo_indptr", qo_indptr, paged_kv_indptr.shape, np.int32)
    kv_lens = count_tokens(paged_kv_indptr, paged_kv_last_page_len, page_size)
    qo_lens = qo_indptr[1:] - qo_indptr[:-1]
    if qo_indptr[0] != 0 or (len(qo_lens) and qo_lens.min() < 0):
        raise UsageError("qo_indptr must start at 0 and never fall")
    return build_plan(
        qo_indptr, paged_kv_indptr, paged_kv_indices, kv_lens, heads, page_size,
        kv_layout=kv_layout, causal=causal, window_left=window_left, logits_soft_cap=cap,
        sm_scale=scale,
    )  # fmt: skip


def build_plan(
    qo_indptr: np.ndarray,
    paged_kv_indptr: np.ndarray,
    paged_kv_indices: np.ndarray,
    kv_lens: np.ndarray,
    heads: tuple[int, int, int],
    page_size: int,
    *,
    kv_layout: str,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
) -> AttentionPlan:
    """Cut the work into items; for callers whose tables are right by construction.

    `kv_lens` int32 (B,) are the keys of each request; `logits_soft_cap` is 0 for none.
    """
    H, G, D = heads
    qo_lens = qo_indptr[1:] - qo_indptr[:-1]
    window = window_left if window_left >= 0 else -1
    tile_rows = max(1, TILE_VECTORS // (H // G))
    return AttentionPlan(
        items=_make_items(qo_indptr, qo_lens, kv_lens, G, tile_rows),
        qo_indptr=qo_indptr,
        kv_indptr=paged_kv_indptr,
        kv_indices=paged_kv_indices,
        kv_lens=kv_lens,
        sizes=(int(H), int(G), int(D), int(page_size), int(window), bool(causal), tile_rows),
        kv_layout=kv_layout,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        work=2.0 * H * D * _visible_keys(qo_lens, kv_lens, causal, window),
    )


def _make_items(
    qo_indptr: np.ndarray, qo_lens: np.ndarray, kv_lens: np.ndarray, G: int, tile_rows: int
) -> np.ndarray:
    """Return the table of items: heads outermost, so that a thread's share is close in memory."""
    B = len(qo_lens)
    if B and int(qo_lens.min()) == 1 == int(qo_lens.max()):
        items = np.empty((G, B, 5), np.int32)
        items[..., 0] = items[..., 1] = np.arange(B)
        items[..., 2] = 1
        items[..., 4] = kv_lens - 1
    else:
        tiles = -(-qo_lens // tile_rows)
        request = np.repeat(np.arange(B), tiles)
        n_tiles = tiles[request]
        tile = np.arange(len(request)) - (np.cumsum(tiles) - tiles)[request]
        # First, last, second, last but one...: under a causal mask later tiles cost more, and
        # this makes every contiguous half of the list cost about the same.
        tile = np.where(tile % 2, n_tiles - 1 - tile // 2, tile // 2)
        first = tile * tile_rows
        items = np.empty((G, len(request), 5), np.int32)
        items[..., 0] = request
        items[..., 1] = qo_indptr[request] + first
        items[..., 2] = np.minimum(tile_rows, qo_lens[request] - first)
        items[..., 4] = (kv_lens - qo_lens)[request] + first
    items[..., 3] = np.arange(G)[:, None]
    return items.reshape(-1, 5)


def _visible_keys(qo_lens: np.ndarray, kv_lens: np.ndarray, causal: bool, window: int) -> float:
    """Return about how many (row, key) pairs are seen, for the decision to share the work."""
    keys = kv_lens - 0.5 * (qo_lens - 1) if causal else kv_lens
    if window >= 0:
        keys = np.minimum(keys, window + 1)
    return float(np.dot(qo_lens, keys))

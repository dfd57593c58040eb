"""Where a plan's numbers lie in the arrays that kernels read; shared by plans and kernels.

A plan's `header` is an int64 array: sizes, counts and addresses of the plan's tables.  Kernels get
everything about a step from it, so that a compiled call that was made for one step can be made
again for the next one with the same arguments.
"""

from __future__ import annotations

CHUNK = 64
"""Keys per step of the online softmax; part of the result's bits, not only of its speed."""
SPLIT = 2048
"""Keys per partial result unless told otherwise; part of the result's bits too."""
TILE_VECTORS = 32
"""Query vectors (rows x heads of a group) per work item; they share loads of keys and values."""

# ---- places in the header -----------------------------------------------------------------------
QO_HEADS = 0
KV_HEADS = 1
DIM_QK = 2
DIM_VO = 3
PAGE_SIZE = 4
WINDOW = 5
"""Keys to the left a row sees, -1 for all."""
CAUSAL = 6
SPLIT_KEYS = 7
MOST = 8
"""Most query vectors of one item."""
N_MERGES = 9
ITEM_ROOM = 10
"""Rows of the table of items."""
MERGE_ROOM = 11
ITEMS = 12
"""Addresses from here on."""
MERGES = 13
SHARES = 14
QO_INDPTR = 15
KV_INDPTR = 16
KV_INDICES = 17
KV_LENS = 18
PARTIALS = 19
MASK = 20
"""Visible keys, row after row: bytes or bits; 0 for none."""
MASK_BITS = 21
"""Whether MASK holds bits, the lowest of a byte first."""
MASK_STARTS = 22
"""int64 (B): each request's first element (byte or bit) of MASK."""
SCORE_FACTORS = 23
"""float32 (H): factor of each head's dot products."""
OUT_FACTORS = 24
"""float32 (H): factor of each head's results, or 0 for one."""
SLOPES = 25
"""float32 (H): ALiBi slopes, or 0."""
SINKS = 26
"""float32 (H): attention sinks, or 0."""
ROPE = 27
"""float32 (positions, DIM_QK): cosines and sines for fused rotation, or 0."""
LSE_NATURAL = 28
"""Whether the LSE is a natural logarithm."""
MAY_SPLIT = 29
"""Whether the keys of a row may be divided among items."""
LATENT = 30
"""Whether a key is a row of `k` and one of `v` together, and the value is its first part."""
BIAS = 31
"""float32 (H, ...): what is added to the scores for each distance from query to key, at distance 0
of the first head; 0 for none."""
BIAS_BYTES = 32
"""Bytes of BIAS from head to head."""
ARRIVED = 33
"""int32, zeros between launches: how many splits of a divided tile are finished.  Devices only."""
MAY_SHARE = 34
"""Whether pages that requests have in common may be read once for all of them."""
HEADER_SIZE = 40

# ---- columns of the table of items and of the table of merges -----------------------------------
ITEM_COLUMNS = (
    "request", "row", "n_rows", "kv_head", "position", "first_key", "end_key", "partial", "cost",
    "shared",
)  # fmt: skip
MERGE_COLUMNS = ("row", "n_rows", "kv_head", "partial", "n_splits")
ITEM_BYTES = 8 * len(ITEM_COLUMNS)
MERGE_BYTES = 8 * len(MERGE_COLUMNS)
PARTIAL_TAIL = 16
"""float32 behind a partial result's accumulator: its top, its sum of weights, padding."""

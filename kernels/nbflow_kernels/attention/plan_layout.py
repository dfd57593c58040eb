"""Layout of a plan's header and tables, shared by plans and kernels (`cuda/plan.cuh`).

The header is an int64 array with sizes, counts and addresses of the plan's tables.  Kernels read a
step only through it, so a captured call can be replayed for the next step with the same arguments.
"""

from __future__ import annotations

CHUNK = 64
"""Keys per step of the online softmax; determines the bits of results."""
SPLIT = 2048
"""Default split size in keys; determines the bits of results."""
TILE_VECTORS = 32
"""Query vectors (rows x heads of a group) per work item, which share loads of keys and values."""

# ---- header fields ------------------------------------------------------------------------------
QO_HEADS = 0
KV_HEADS = 1
DIM_QK = 2
DIM_VO = 3
PAGE_SIZE = 4
WINDOW = 5
"""Window: visible keys to the left of a row, -1 for all."""
CAUSAL = 6
SPLIT_KEYS = 7
MAX_VECTORS = 8
"""Largest number of query vectors of an item."""
N_MERGES = 9
ITEM_CAPACITY = 10
"""Capacity of the item table."""
MERGE_CAPACITY = 11
ITEMS = 12
"""Fields from here to BIAS are addresses where not noted otherwise."""
MERGES = 13
SHARES = 14
QO_INDPTR = 15
KV_INDPTR = 16
KV_INDICES = 17
KV_LENS = 18
PARTIALS = 19
MASK = 20
"""Custom mask, row after row: bytes or bits; 0 for none."""
MASK_BITS = 21
"""1 if MASK is packed, lowest bit first."""
MASK_STARTS = 22
"""int64 (B): offset of each request in MASK, in bytes or bits."""
SCORE_FACTORS = 23
"""float32 (H): factor of the dot products per head."""
OUT_FACTORS = 24
"""float32 (H): factor of the results per head; 0 for none."""
SLOPES = 25
"""float32 (H): ALiBi slopes, or 0."""
SINKS = 26
"""float32 (H): attention sinks, or 0."""
ROPE = 27
"""float32 (positions, DIM_QK): cosines and sines of fused RoPE, or 0."""
LSE_NATURAL = 28
"""1 if the LSE is a natural logarithm."""
MAY_SPLIT = 29
"""1 if the keys of a row may be split among items."""
LATENT = 30
"""1 for latent attention: a key is a row of `k` and one of `v`, its value the row of `k`."""
BIAS = 31
"""float32 (H, ...): bias per distance from query to key; address of distance 0 of head 0, or 0."""
BIAS_BYTES = 32
"""Head stride of BIAS in bytes."""
ARRIVED = 33
"""int32: arrival counters of split tiles, 0 between launches; devices only."""
ATTENTION_CHUNK = 34
"""Size of the chunks of positions within which a row sees keys; 0 for none."""
MAY_SHARE = 35
"""1 if a common prefix of pages may be loaded once for several requests."""
SCORES_HOOK = 36
"""Compiled function of a variant that changes the scores of a chunk, or 0; CPU only, as follows."""
OUTPUT_HOOK = 37
"""Compiled function of a variant that changes a result, or 0."""
HOOK_PARAMS = 38
"""Address of the variant's parameters."""
NO_SOFTMAX = 39
"""1 if scores are the weights."""
RANGE_HOOK = 40
"""Compiled function of a variant that narrows the range of visible keys of a chunk, or 0."""
KEY_ROPE = 41
"""float32 (positions, KEY_ROPE_DIM): cosines and sines of RoPE of keys as they are read, or 0."""
KEY_ROPE_DIM = 42
"""Columns of a key that are rotated."""
KEY_ROPE_NEOX = 43
"""1 to rotate the pairs (j, j + KEY_ROPE_DIM / 2), 0 for neighbours."""
KEY_BIAS = 44
"""float32 (G, DIM_QK in multiples of 16): added to the keys as they are read, or 0."""
SCALES = 45
"""Scales of NVFP4 caches, eight fields: address of the keys' (0: another format), bytes between
pages, tokens and heads; the same of the values'.  CPU only."""
HEADER_SIZE = 53

# ---- columns of the item table and the merge table ----------------------------------------------
ITEM_COLUMNS = (
    "request", "row", "n_rows", "kv_head", "position", "first_key", "end_key", "partial", "cost",
    "shared",
)  # fmt: skip
MERGE_COLUMNS = ("row", "n_rows", "kv_head", "partial", "n_splits")
ITEM_BYTES = 8 * len(ITEM_COLUMNS)
MERGE_BYTES = 8 * len(MERGE_COLUMNS)
ITEM_REQUEST, ITEM_ROW, ITEM_N_ROWS, ITEM_HEAD, ITEM_POSITION = range(5)
ITEM_FIRST_KEY, ITEM_END_KEY, ITEM_PARTIAL, ITEM_COST, ITEM_SHARED = range(5, 10)
MERGE_ROW, MERGE_N_ROWS, MERGE_HEAD, MERGE_PARTIAL, MERGE_N_SPLITS = range(5)
PARTIAL_TAIL = 16
"""float32 after the accumulator of a partial result: row maximum, softmax sum, padding."""

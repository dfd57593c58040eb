"""Work schedule of one batch-attention step: requests, tiles of query rows, heads, key ranges.

The tables of a plan can be inspected: ``print(plan)``, ``plan.items``,
``pandas.DataFrame(plan.items, columns=plan.COLUMNS)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_indptr, empty, is_cuda
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.scheduler import schedule
from nbflow_kernels.attention.options import (
    Options,
    PlanInputs,
    check_heads,
    check_key_rope,
    mask_table,
    rope_table_for,
)
from nbflow_kernels.attention.plan_layout import (
    CHUNK,
    HEADER_SIZE,
    ITEM_COLUMNS,
    MERGE_COLUMNS,
    SPLIT,
)
from nbflow_kernels.cpu.parallel_for import get_num_threads
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.position import alibi_slopes

MAX_THREADS = 1024

Tables = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""`qo_indptr`, `kv_indptr`, `kv_indices` and `kv_lens` of a step."""


class AttentionPlan:
    """Work schedule of one step, shared by all layers, in NumPy tables.

    A plan is made once for a model's sizes and refilled for every step with `plan_into`.  Kernels
    read it through `header`, so a captured call can be replayed for later steps.

    Parameters
    ----------
    heads : tuple of int
        Query heads, KV heads, head size of queries and keys, head size of values.
    page_size : int
        Tokens per page.
    causal : bool
        Causal mask: row t of n sees keys 0..kv_len - n + t.
    **options
        Further fields of `Options`.
    """

    COLUMNS = ITEM_COLUMNS
    MERGE_COLUMNS = MERGE_COLUMNS

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        page_size: int,
        *,
        causal: bool = True,
        **options: Any,
    ) -> None:
        chosen = Options(causal=causal, **options)
        self.heads, self.page_size = heads, page_size
        self.kv_layout, self.causal = chosen.kv_layout, causal
        self.window_left, self.attention_chunk = chosen.window_left, chosen.attention_chunk
        self.logits_soft_cap = float(chosen.logits_soft_cap or 0.0)
        self.sm_scale = chosen.scale(heads[2])
        self.split_keys = chosen.split_keys or SPLIT
        self.n_items = self.n_merges = self.n_shares = 0
        self.work = 0.0
        """Multiply-adds of one layer."""
        self.n_steps = 0
        """Number of fills; device copies are updated when it changes."""
        self.hooks: Any = None
        """Compiled functions of a variant on the CPU, which the header refers to."""
        self.on_devices: dict[Any, Any] = {}
        """Device plans (`nbflow_kernels.attention.cuda.plan`) by device and stream."""
        self.workspace: Any = None
        """Split-KV workspace of the caller; None to allocate one."""
        self.fixed_rows: int | None = None
        """Number of query rows of every call, including padding; None without CUDA graphs."""
        self.shares_per_thread = 1
        """Shares that each thread's work is divided into, for launches of several plans."""
        self.waits_for_copies = False
        """Synchronize after uploading tables to a device."""
        self.header = np.zeros(HEADER_SIZE, np.int64)
        """Sizes and addresses for the kernels; see `nbflow_kernels.attention.plan_layout`."""
        self.tables: dict[int, Any] = {}
        """Arrays of the header's address fields that are set."""
        self._shares = np.zeros(MAX_THREADS + 1, np.int64)
        self._partials = np.zeros(0, np.float32)
        self.set_table(at.SHARES, self._shares)
        self._items = np.zeros((0, len(ITEM_COLUMNS)), np.int64)
        self._merges = np.zeros((0, len(MERGE_COLUMNS)), np.int64)
        self.reserve(64, 16, 0)
        self.qo_indptr = self.kv_indptr = self.kv_indices = self.kv_lens = np.zeros(1, np.int32)
        self._factors = np.full(heads[0], self.sm_scale, np.float32)
        self.set_table(at.SCORE_FACTORS, self._factors)
        self._write_options(chosen)

    def _write_options(self, options: Options) -> None:
        """Write the sizes and options to the header."""
        head = self.header
        head[at.QO_HEADS], head[at.KV_HEADS], head[at.DIM_QK], head[at.DIM_VO] = self.heads
        head[at.PAGE_SIZE], head[at.CAUSAL] = self.page_size, options.causal
        head[at.WINDOW], head[at.ATTENTION_CHUNK] = options.window_left, options.attention_chunk
        head[at.SPLIT_KEYS] = self.split_keys
        head[at.MAY_SPLIT] = not options.disable_split_kv
        head[at.MAY_SHARE] = not options.disable_page_sharing

    @property
    def items(self) -> np.ndarray:
        """Return the work items, int64 (n_items, 10); `COLUMNS` names the columns.

        `request`; `row`, the first query row; `n_rows`; `kv_head`; `position` of the first row in
        its sequence; the keys `first_key` to `end_key`; `partial`, index of the partial result, -1
        for a final one; `cost`, in products of one query vector and one key; `shared`, length of
        the common prefix of the rows' requests, 0 where all rows are of one request.
        """
        return self._items[: self.n_items]

    @property
    def merges(self) -> np.ndarray:
        """Return the split tiles to merge, int64 (n_merges, 5); see `MERGE_COLUMNS`."""
        return self._merges[: self.n_merges]

    @property
    def shares(self) -> np.ndarray:
        """Return the item offsets of the threads' shares, with the end."""
        return self._shares[: self.n_shares + 1]

    @property
    def n_rows(self) -> int:
        """Return the number of query rows of the step."""
        return int(self.qo_indptr[-1])

    @property
    def n_query_rows(self) -> int:
        """Return the number of query rows of a call, including padding."""
        return self.n_rows if self.fixed_rows is None else self.fixed_rows

    def reserve(self, n_items: int, n_merges: int, n_partials: int) -> None:
        """Grow the tables to these numbers of items, merges and partial results."""
        if len(self._items) < n_items:
            self._items = np.zeros((n_items, len(ITEM_COLUMNS)), np.int64)
            self.set_table(at.ITEMS, self._items)
            self.header[at.ITEM_CAPACITY] = n_items
        if len(self._merges) < n_merges:
            self._merges = np.zeros((n_merges, len(MERGE_COLUMNS)), np.int64)
            self.set_table(at.MERGES, self._merges)
            self.header[at.MERGE_CAPACITY] = n_merges
        size = n_partials * self._partial_floats
        if size and isinstance(self.workspace, np.ndarray):
            self._partials = _floats_of(self.workspace)
            self.set_table(at.PARTIALS, self._partials)
        if len(self._partials) < size:
            self._partials = np.empty(size, np.float32)
            self.set_table(at.PARTIALS, self._partials)

    @property
    def _partial_floats(self) -> int:
        """Return the size of a partial result in floats."""
        return -(-self.heads[3] // 16) * 16 + at.PARTIAL_TAIL

    def workspace_holds(self, n_partials: int) -> bool:
        """Return whether the workspace of the caller, if any, holds these partial results."""
        if not isinstance(self.workspace, np.ndarray):
            return True
        return n_partials * self._partial_floats <= len(_floats_of(self.workspace))

    def set_bias(self, table: np.ndarray, longest: int) -> None:
        """Set a relative position bias (T5), added to the scores.

        `table`, float32 (H, 2 * longest - 1), is the bias per head for distances 1 - longest ..
        longest - 1 from query to key; `longest` is the largest number of keys of a request.
        """
        padded = np.zeros((len(table), 2 * longest - 1 + 2 * CHUNK), np.float32)
        padded[:, CHUNK:-CHUNK] = table  # chunks of keys may exceed a request
        self.set_table(at.BIAS, padded)
        self.header[at.BIAS] += 4 * (CHUNK + longest - 1)
        self.header[at.BIAS_BYTES] = padded.strides[0]

    def set_key_rope(self, cos_sin: Any, interleave: bool) -> None:
        """Set the RoPE of keys that are stored before it; each is rotated by its index.

        `cos_sin`, float32 (n_positions, rotary_dim), is a table of `rope_cos_sin_cache` with a row
        for every key; `interleave` rotates pairs of neighbours.
        """
        self.set_table(at.KEY_ROPE, cos_sin)
        self.header[at.KEY_ROPE_DIM] = cos_sin.shape[1]
        self.header[at.KEY_ROPE_NEOX] = not interleave

    def set_window(self, window_left: int) -> None:
        """Set the window for later fills; -1 for none."""
        self.window_left = max(int(window_left), -1)
        self.header[at.WINDOW] = self.window_left

    def set_factors(self, scores: np.ndarray | None, outputs: np.ndarray | None) -> None:
        """Set factors of scores and results per query head, float32 (H,); None for 1."""
        base = self.tables[at.SCORE_FACTORS]
        if scores is not None or base is not self._factors:
            factors = self._factors
            self.set_table(at.SCORE_FACTORS, factors if scores is None else factors * scores)
        if outputs is not None or self.header[at.OUT_FACTORS]:
            self.set_table(at.OUT_FACTORS, outputs)

    def set_hooks(self, hooks: Any, addresses: Sequence[int], *, no_softmax: bool) -> None:
        """Set the compiled functions of a variant; `hooks` is what the addresses refer to.

        `addresses` are those of the functions for scores, outputs and ranges, and of parameters.

        Without a softmax, partial results of splits are not means, so keys are not split.
        """
        self.hooks, head = hooks, self.header
        fields = (at.SCORES_HOOK, at.OUTPUT_HOOK, at.RANGE_HOOK, at.HOOK_PARAMS)
        for field, address in zip(fields, addresses, strict=True):
            head[field] = address
        head[at.NO_SOFTMAX] = no_softmax
        head[at.SPLIT_KEYS] = 1 << 40 if no_softmax else self.split_keys

    def set_table(self, field: int, array: Any) -> None:
        """Set an address field of the header to an array, or to none.

        The address of a device array is set by `device_plan`.
        """
        if array is None:
            self.tables.pop(field, None)
        else:
            self.tables[field] = array
        self.header[field] = 0 if array is None or is_cuda(array) else address_of(array)

    def table(self, field: int) -> Any:
        """Return the array of an address field of the header, or None."""
        return self.tables.get(field)

    def __str__(self) -> str:
        """Return the items as a table."""
        owners = np.repeat(np.arange(len(self.shares) - 1), np.diff(self.shares))
        rows: list[tuple[str, ...]] = [("share", *self.COLUMNS)]
        rows += [tuple(map(str, (s, *item))) for s, item in zip(owners, self.items, strict=True)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([repr(self), *lines])

    def __repr__(self) -> str:
        H, G, D_qk, D_vo = self.heads
        return (
            f"<AttentionPlan of {len(self.kv_lens)} requests, {self.n_rows} query rows, "
            f"{int(self.kv_lens.sum())} keys, {H}/{G} heads of {D_qk}/{D_vo}: {self.n_items} items "
            f"in {len(self.shares) - 1} shares, {self.n_merges} merges>"
        )


def _floats_of(workspace: np.ndarray) -> np.ndarray:
    """Return a workspace as float32, aligned to a cache line."""
    flat = workspace.reshape(-1).view(np.uint8)
    flat = flat[-address_of(flat) % 64 :]
    return flat[: len(flat) // 4 * 4].view(np.float32)


def plan_into(
    plan: AttentionPlan,
    qo_indptr: np.ndarray,
    kv_indptr: np.ndarray,
    kv_indices: np.ndarray,
    kv_lens: np.ndarray,
) -> int:
    """Fill a plan with a step and return the number of work items.

    The arrays (int32, as for the wrappers; `kv_lens` are the keys of each request) are neither
    checked nor copied.
    """
    n_threads = min(get_num_threads() * plan.shares_per_thread, MAX_THREADS)
    step = tuple(map(address_of, (qo_indptr, kv_indptr, kv_indices, kv_lens)))
    may_split = plan.header[at.MAY_SPLIT]
    while True:
        n_items, n_merges, n_shares, n_partials, work = schedule(
            address_of(plan.header), *step, len(kv_lens), n_threads
        )
        if not plan.workspace_holds(n_partials):
            plan.header[at.MAY_SPLIT] = 0  # the bits are the same
        elif n_items <= len(plan._items) and n_merges <= len(plan._merges):
            break
        plan.reserve(2 * n_items, 2 * n_merges + 1, 0)
    plan.header[at.MAY_SPLIT] = may_split
    plan.reserve(0, 0, n_partials)
    plan.n_items, plan.n_merges, plan.n_shares, plan.work = n_items, n_merges, n_shares, work
    plan.qo_indptr, plan.kv_indptr = qo_indptr, kv_indptr
    plan.kv_indices, plan.kv_lens = kv_indices, kv_lens
    plan.n_steps += 1
    return int(n_items)


def make_plan(
    tables: Tables,
    heads: tuple[int, int, int, int],
    page_size: int,
    options: Options,
    inputs: PlanInputs,
    workspace: Any = None,
) -> AttentionPlan:
    """Make and fill a plan for any options; the page table is already checked."""
    qo_indptr, kv_indptr, _, kv_lens = tables
    check_heads(*heads)
    check_indptr("qo_indptr", qo_indptr, len(kv_indptr))
    chosen = {**vars(options), "causal": options.causal and not inputs.masked}
    if inputs.variant is not None:
        chosen |= {"disable_split_kv": True, "disable_page_sharing": True}
    plan = AttentionPlan(heads, page_size, **chosen)
    plan.workspace, plan.waits_for_copies = workspace, not inputs.non_blocking
    if inputs.masked:
        masks = inputs.custom_mask, inputs.packed_custom_mask
        mask, starts, bits = mask_table(*masks, qo_indptr[1:] - qo_indptr[:-1], kv_lens)
        plan.set_table(at.MASK, mask)
        plan.set_table(at.MASK_STARTS, starts)
        plan.header[at.MASK_BITS] = bits
    if options.pos_encoding_mode == "ALIBI":
        plan.set_table(at.SLOPES, alibi_slopes(heads[0]))
    elif options.pos_encoding_mode == "ROPE_LLAMA":
        set_rotation(plan, options, kv_lens)
    if inputs.key_cos_sin is not None:
        check_key_rope(inputs.key_cos_sin, heads[2], kv_lens)
        plan.set_key_rope(inputs.key_cos_sin, inputs.key_interleave)
    plan_into(plan, *tables)
    return plan


def padded_key_bias(bias: Any) -> Any:
    """Return a key bias (G, D) with zeros up to a multiple of 16 columns, as kernels read it."""
    G, D = bias.shape
    wide = -(-D // 16) * 16
    if wide == D:
        return bias
    padded = empty(bias, (G, wide))
    padded[...] = 0.0
    padded[:, :D] = bias
    return padded


def set_rotation(plan: AttentionPlan, options: Options, kv_lens: np.ndarray) -> None:
    """Set the RoPE table for the longest request of a plan."""
    longest = int(kv_lens.max()) if len(kv_lens) else 0
    plan.set_table(at.ROPE, rope_table_for(options, longest, plan.heads[2]))

"""Device side of an attention plan: its tables, header, and split-KV workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cuda.scheduler import (
    DECODE_VECTORS,
    PREFILL_VECTORS,
    CudaWorkItems,
    Tiling,
    schedule,
    split_keys,
)
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cuda import KernelDevice, address
from nbflow_kernels.errors import UsageError

MAX_HEADERS = 1024
"""Headers kept per stream: one for each set of sinks and factors."""
# Header fields with addresses of tables set by `AttentionPlan.set_table`.
_TABLES = (at.MASK, at.MASK_STARTS, at.SLOPES, at.ROPE, at.BIAS, at.KEY_ROPE)
# Tables that each call may set.
_LAYERS = (at.SCORE_FACTORS, at.OUT_FACTORS, at.SINKS, at.KEY_BIAS)

_OPTIONS = frozenset((at.MASK, at.SLOPES, at.BIAS))
PARAMETERS = (
    "i64* header, any* queries, i64 q_row_bytes, i32 q_kind, any* k, any* v, "
    + ", ".join(f"i64 {which}_{step}" for which in "kv" for step in ("page", "token", "head"))
    + ", f32 cap, any* out, i32 out_kind, f32*? lse"
)
"""Parameters of every attention kernel."""


def is_plain(plan: AttentionPlan) -> bool:
    """Return whether the plan has no soft cap, mask and bias."""
    return plan.logits_soft_cap == 0 and _OPTIONS.isdisjoint(plan.tables)


@dataclass(frozen=True)
class StaticCapacity:
    """Sizes of `StaticPlanBuffers`."""

    vectors: int
    """Query vectors of a request, which select the kernel (`Tiling`)."""
    tile_vectors: int
    n_tiles: int
    n_items: int
    most: int
    """Largest number of query vectors of an item."""
    n_partials: int
    """Partial results per KV head."""

    @classmethod
    def of(
        cls, group: int, n_rows: int, rows_each: int, n_requests: int, n_keys: int, split: int, *,
        max_splits: int | None = None, max_partials: int | None = None, prefill: bool = False,
    ) -> StaticCapacity:  # fmt: skip
        """Return the sizes; for the parameters see `StaticPlanBuffers`."""
        vectors = max(PREFILL_VECTORS if prefill else 1, group)
        tile_vectors = DECODE_VECTORS if vectors <= DECODE_VECTORS else PREFILL_VECTORS
        tile_rows = max(1, tile_vectors // group)
        n_tiles = min(n_rows, n_rows // tile_rows + n_requests)
        # A tile has at most two splits more than its keys fill; the worst case is one request with
        # all keys.
        n_items = 2 * n_tiles + -(-rows_each // tile_rows) * (n_keys // split)
        if max_splits is not None:
            n_items = min(n_items, n_tiles + max_splits)
        most = min(tile_rows, rows_each) * group
        n_partials = n_items * most
        if max_partials is not None:
            n_partials = min(n_partials, max_partials)
        return cls(vectors, tile_vectors, n_tiles, n_items, most, n_partials)


class StaticPlanBuffers:
    """Plan tables of fixed size at fixed addresses, for launches captured into CUDA graphs.

    For each step the host schedules the work again (`fill`) and copies `host` to `device_buffer`
    before the graph is launched.  Thread blocks without a work item exit at once.  There is one
    workspace for partial results, so launches of a plan must be serialized.

    Parameters
    ----------
    plan : AttentionPlan
        Plan of the largest step: same number of requests, and no fewer `kv_indices`.
    device : KernelDevice
        Device of the tables.
    n_rows : int
        Largest number of query rows of a step.
    rows_each : int
        Largest number of query rows of a request.
    n_keys : int, optional
        Largest number of keys of a step; by default the capacity of the pages in `kv_indices`.
    device_tables : sequence of arrays or None
        Device arrays, int32, that the caller fills with `qo_indptr`, `kv_indptr`, `kv_indices` and
        `kv_lens`; None for tables that are part of `host`.
    max_splits, max_partials : int, optional
        Limits on work items of split tiles, and on partial results per KV head.
    prefill : bool
        Use the tiles of prompts for all requests.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        device: KernelDevice,
        n_rows: int,
        rows_each: int,
        *,
        n_keys: int | None = None,
        device_tables: Sequence[Any] = (None,) * 4,
        max_splits: int | None = None,
        max_partials: int | None = None,
        prefill: bool = False,
    ) -> None:
        self._plan, self._device, self._device_tables = plan, device, device_tables
        n_keys = len(plan.kv_indices) * plan.page_size if n_keys is None else n_keys
        self.capacity = StaticCapacity.of(
            self.group, n_rows, rows_each, len(plan.kv_lens), n_keys, split_keys(plan),
            max_splits=max_splits, max_partials=max_partials, prefill=prefill,
        )  # fmt: skip
        self._tiling = Tiling(self.capacity.tile_vectors)
        self.n_items = self.capacity.n_items
        sizes = [
            0 if array is not None else len(table)
            for array, table in zip(device_tables, _step_tables(plan), strict=True)
        ]
        sizes += [8 * self.n_items, 4 * self.capacity.n_tiles]
        self._ends = np.cumsum(sizes).tolist()
        self.host = np.zeros(self._ends[-1], np.int32)
        """int32: tables, work items and merges of the step, concatenated."""
        self.device_buffer: Any = None
        """Device copy of `host` (int32), assigned by the code that uploads it."""
        self.padded = self._full_capacity()
        self.max_partials = self.padded.n_partials
        """Capacity of the workspace, in partial results per KV head."""

    @property
    def group(self) -> int:
        """Return the query heads per KV head."""
        return self._plan.heads[0] // self._plan.heads[1]

    def fill(self) -> None:
        """Schedule the plan's current step into `host`."""
        starts = [0, *self._ends]
        for table, array, start in zip(
            _step_tables(self._plan), self._device_tables, starts, strict=False
        ):
            if array is None:
                self.host[start : start + len(table)] = table
        items = schedule(
            self._plan, self._tiling, self._device.n_sms, max_items=self.n_items,
            max_partials=self.max_partials,
        )  # fmt: skip
        assert len(items.items) <= self.n_items
        for rows, start, end in zip(
            (items.items, items.merges), self._ends[3:], self._ends[4:], strict=False
        ):
            self.host[start : start + rows.size] = rows.ravel()
            self.host[start + rows.size : end] = 0  # empty items

    def table_address(self, part: int) -> int:
        """Return the device address of a table: 0..3 the page tables, 4 items, 5 merges."""
        if part < len(self._device_tables) and self._device_tables[part] is not None:
            return address(self._device_tables[part])
        return address(self.device_buffer) + 4 * int([0, *self._ends][part])

    def _full_capacity(self) -> CudaWorkItems:
        """Return work items at full capacity, which define the captured grid."""
        return CudaWorkItems(
            np.zeros((self.n_items, 8), np.int32),
            np.zeros((self.capacity.n_tiles, 4), np.int32),
            self.capacity.n_partials,
            self.capacity.most,
            True,
        )


NO_ITEMS = CudaWorkItems(np.zeros((0, 8), np.int32), np.zeros((0, 4), np.int32), 0, 1, False)


def _step_tables(plan: AttentionPlan) -> tuple[np.ndarray, ...]:
    return plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens


def partial_floats(heads: tuple[int, int, int, int]) -> int:
    """Return the size of a partial result of all KV heads, in floats."""
    return heads[1] * (-(-heads[3] // 4) * 4 + 4)


def floats_in(workspace: Any) -> tuple[int, int]:
    """Return the 16-byte-aligned address of a workspace and its floats from there."""
    start = -(-address(workspace) // 16) * 16
    return start, max(address(workspace) + int(workspace.nbytes) - start, 0) // 4


class CudaPlan:
    """Device buffers of a plan for one stream, updated with the plan; made by `device_plan`.

    Streams share no buffer: their copies and partial results are not ordered.

    Parameters
    ----------
    plan : AttentionPlan
        Plan to upload.
    device : KernelDevice
        Target device.
    """

    def __init__(self, plan: AttentionPlan, device: KernelDevice) -> None:
        self._plan, self._device = plan, device
        self._step = -1
        self._copies: dict[Any, tuple[Any, Any]] = {}
        self._vectors = (0, 0)  # smallest and largest number of query vectors of a request
        self._schedules: dict[Tiling, tuple[CudaWorkItems, Any]] = {}
        self._step_tables: tuple[Any, list[int]] = (None, [])
        self._partials: Any = None
        self._arrived = device.asarray(np.zeros(64, np.int32))
        self._headers: dict[tuple[Any, ...], tuple[np.ndarray, Any]] = {}
        self._current: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        """Headers of the step by `_header_state`, to find them without filling them again."""
        self._fixed: StaticPlanBuffers | None = None
        self._uploaded = False

    def fix(self, tables: StaticPlanBuffers) -> None:
        """Use static buffers from now on, on any stream."""
        self._fixed = tables
        self._plan.on_devices.clear()
        self._plan.on_devices[self._device.key] = self
        self._current.clear()
        self._reserve(tables.padded)

    def refresh(self) -> None:
        """Update the headers in use to the current step, in field."""
        self._reserve(self._fixed.padded if self._fixed is not None else NO_ITEMS)
        for host, copy in self._headers.values():
            before = host.copy()
            self._fill_step_fields(host)
            if not np.array_equal(before, host):
                copy[...] = self._device.asarray(host)

    @property
    def n_bytes(self) -> int:
        """Return the device memory in bytes, without `StaticPlanBuffers`."""
        arrays = [self._partials, self._arrived, self._step_tables[0]]
        arrays += [packed for _, packed in self._schedules.values()]
        arrays += [header for _, header in self._headers.values()]
        arrays += [copy for _, copy in self._copies.values()]
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def items(self, tiling: Tiling) -> CudaWorkItems:
        """Return the work items of a kernel."""
        if self._fixed is None:
            return self._scheduled(tiling)[0]
        selected = tiling.more_than < self._fixed.capacity.vectors <= tiling.at_most
        return self._fixed.padded if selected else NO_ITEMS

    def max_vectors(self) -> int:
        """Return the largest number of query vectors of a request."""
        if self._fixed is not None:
            return self._fixed.capacity.vectors
        self._start_step()
        return self._vectors[1]

    def header(self, tiling: Tiling) -> Any:
        """Return the plan header for a kernel, int64 on the device.

        Unchanged headers are not copied again, so a repeated call can be captured into a graph.
        Each combination of sinks, factors, key bias and LSE base has its own header.
        """
        state = self._header_state(tiling)
        known = self._current.get(state)
        if known is not None and not self._uploaded:
            return known[0]
        header = self._updated_header(tiling)
        if self._uploaded and self._plan.waits_for_copies:
            self._device.synchronize()
        self._uploaded = False
        if self._fixed is None:
            if len(self._current) >= MAX_HEADERS:
                self._current.clear()
            # its tables are kept, because their ids are part of the key
            self._current[state] = header, list(self._plan.tables.values())
        return header

    def _header_state(self, tiling: Tiling) -> tuple[Any, ...]:
        """Return all that determines the header within a step, as a key.

        Tables of layers count by contents if they are in host memory (see `_table`).
        """
        plan = self._plan
        tables = [
            array.tobytes() if field in _LAYERS and isinstance(array, np.ndarray) else id(array)
            for field, array in plan.tables.items()
        ]
        return (
            tiling, plan.n_steps, plan.header.tobytes(), id(plan.workspace), *plan.tables, *tables
        )  # fmt: skip

    def _updated_header(self, tiling: Tiling) -> Any:
        """Return the header of the plan's state, uploaded if it has changed."""
        plan, fixed = self._plan, self._fixed
        self._evict_headers()
        host = plan.header.copy()
        host[at.SPLIT_KEYS] = split_keys(plan)
        fields = (at.QO_INDPTR, at.KV_INDPTR, at.KV_INDICES, at.KV_LENS, at.ITEMS, at.MERGES)
        if fixed is None:
            items, packed = self._scheduled(tiling)
            start = address(packed)
            addresses = [*self._step_tables[1], start, start + items.items.nbytes]
        else:
            items, addresses = fixed.padded, [fixed.table_address(i) for i in range(6)]
        host[at.MAX_VECTORS], host[at.N_MERGES] = items.most, len(items.merges)
        for field, found in zip(fields, addresses, strict=True):
            host[field] = found
        for field in _LAYERS:
            host[field] = self._table(field)
        self._fill_step_fields(host)
        host[[at.SHARES, at.ITEM_CAPACITY, at.MERGE_CAPACITY]] = 0  # host only
        key = (tiling, *host[[*_LAYERS, at.LSE_NATURAL]].tolist())
        cached = self._headers.get(key)
        if cached is None or not np.array_equal(cached[0], host):
            copy = self._device.asarray(host)
            if cached is not None and fixed is not None:  # captured graphs may read it
                cached[1][...] = copy
                copy = cached[1]
            cached = self._headers[key] = (host, copy)
            self._uploaded = True
        return cached[1]

    def _evict_headers(self) -> None:
        """Drop all headers and tables at the limit, unless captured graphs may read them."""
        if max(len(self._headers), len(self._copies)) < MAX_HEADERS:
            return
        if self._fixed is not None:
            raise UsageError(
                f"a captured plan supports at most {MAX_HEADERS} different factors or sinks; use "
                "another wrapper or plan"
            )
        self._headers.clear()
        self._current.clear()
        self._copies.clear()

    def _fill_step_fields(self, host: np.ndarray) -> None:
        """Write the addresses shared by all layers of a step."""
        host[at.PARTIALS], host[at.ARRIVED] = self._partials_buffer()[0], address(self._arrived)
        for field in _TABLES:
            host[field] = self._table(field)

    def _scheduled(self, tiling: Tiling) -> tuple[CudaWorkItems, Any]:
        """Return the work items and their device copy, None without items."""
        plan = self._plan
        self._start_step()
        fewest, most = self._vectors
        if most <= tiling.more_than or fewest > tiling.at_most:
            return NO_ITEMS, None
        if tiling not in self._schedules:
            limit = None
            if plan.workspace is not None:
                limit = floats_in(plan.workspace)[1] // partial_floats(plan.heads)
            items = schedule(plan, tiling, self._device.n_sms, max_partials=limit)
            both = np.concatenate(
                [items.items.ravel(), items.merges.ravel(), np.zeros(4, np.int32)]
            )
            self._schedules[tiling] = (items, self._device.asarray(both))
            self._reserve(items)
            self._uploaded = True
        return self._schedules[tiling]

    def _start_step(self) -> None:
        """Upload the page tables if the plan has a new step."""
        plan = self._plan
        if self._step != plan.n_steps:
            tables = _step_tables(plan)
            packed = self._device.asarray(np.concatenate(tables))
            offsets = np.cumsum([0, *(table.nbytes for table in tables[:-1])])
            self._step_tables = (packed, [address(packed) + int(n) for n in offsets])
            vectors = np.diff(plan.qo_indptr) * (plan.heads[0] // plan.heads[1])
            self._vectors = (int(vectors.min()), int(vectors.max())) if len(vectors) else (0, 0)
            self._schedules, self._step = {}, plan.n_steps
            self._current.clear()

    def _partials_buffer(self) -> tuple[int, int]:
        """Return the address of the split-KV workspace and its size in floats."""
        if self._plan.workspace is not None:
            return floats_in(self._plan.workspace)
        return (0, 0) if self._partials is None else (address(self._partials), self._partials.size)

    def _reserve(self, items: CudaWorkItems) -> None:
        """Grow the buffer of partial results and the arrival counters."""
        floats = items.n_partials * partial_floats(self._plan.heads)
        if self._plan.workspace is None and self._partials_buffer()[1] < floats:
            self._partials = self._device.empty(floats, np.float32)
            self._current.clear()
        tiles = len(items.merges) * self._plan.heads[1] * items.most  # upper bound: 1 vector each
        if self._arrived.size < tiles:
            self._arrived = self._device.asarray(np.zeros(tiles, np.int32))
            self._current.clear()

    def _table(self, field: int) -> int:
        """Return the device address of a table, 0 if unset."""
        array = self._plan.table(field)
        if array is None:
            return 0
        # Layers may pass new arrays with equal numbers at every call: one copy serves them all.
        small = field in _LAYERS and isinstance(array, np.ndarray)
        key = (field, array.tobytes()) if small else field
        known = self._copies.get(key)
        if known is None or not (small or known[0] is array):
            copy = array if hasattr(array, "__cuda_array_interface__") else None
            known = (array, self._device.asarray(array) if copy is None else copy)
            self._copies[key] = known
        inside = 0
        if field == at.BIAS:  # the header points at distance 0, inside the table
            inside = int(self._plan.header[field]) - int(array.ctypes.data)
        return address(known[1]) + inside


def device_plan(plan: AttentionPlan, device: KernelDevice) -> CudaPlan:
    """Return the device plan for the current stream of a device."""
    found: CudaPlan | None = plan.on_devices.get(device.key)  # with `StaticPlanBuffers`
    if found is None:
        key = device.key, device.stream
        found = plan.on_devices.get(key)
        if found is None:
            found = plan.on_devices[key] = CudaPlan(plan, device)
    return found

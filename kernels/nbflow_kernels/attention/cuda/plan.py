"""A plan's tables in the memory of a device: what its kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cuda.scheduler import (
    FEW_VECTORS,
    MANY_VECTORS,
    CudaWorkItems,
    Tiling,
    divide_for_device,
    split_keys,
)
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cuda import KernelDevice, address, device_of
from nbflow_kernels.errors import UsageError

MOST_HEADERS = 1024
"""Headers that are kept: of some hundred layers, or as many arrays of sinks."""
# Places of the header that are addresses of tables which `AttentionPlan.set_table` sets.
_TABLES = (at.MASK, at.MASK_STARTS, at.SLOPES, at.ROPE, at.BIAS)
# Those that each call may set for itself.
_LAYERS = (at.SCORE_FACTORS, at.OUT_FACTORS, at.SINKS)

_OPTIONS = (at.MASK, at.SLOPES, at.BIAS)
PARAMETERS = (
    "i64* header, any* queries, i64 q_row_bytes, i32 q_kind, any* k, any* v, "
    + ", ".join(f"i64 {which}_{step}" for which in "kv" for step in ("page", "token", "head"))
    + ", f32 cap, any* out, i32 out_kind, f32*? lse"
)
"""What every kernel of attention takes."""


def is_plain(plan: AttentionPlan) -> bool:
    """Return whether scores stay what dot products make them, and a row sees a range of keys."""
    return plan.logits_soft_cap == 0 and all(plan.table(place) is None for place in _OPTIONS)


class StaticPlanBuffers:
    """A plan's tables of fixed sizes at fixed addresses: launches that read them can be captured.

    For a further step the host divides the work again (`fill`), and `host` is copied to `there`
    before the graph is launched.  Thread blocks that have no item leave at once.  There is one set
    of partial results, so the launches of a plan must follow each other, on whatever stream.

    Parameters
    ----------
    plan : AttentionPlan
        Filled with a step of the size that all will have: as many requests, and no more entries of
        `kv_indices`.
    device : KernelDevice
        Where.
    n_rows : int
        Most query rows of a step.
    rows_each : int
        Most query rows of a request.
    n_keys : int, optional
        Most keys of a step; as many as the entries of `kv_indices` hold by default.
    placed : sequence of arrays or None
        For `qo_indptr`, `kv_indptr`, `kv_indices` and `kv_lens` an int32 array on the device that
        the caller fills, if there is one; then it is not part of `host`.
    most_pieces, most_partials : int, optional
        Limits on the items that divided tiles become, and on their partial results for each
        key/value head.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        device: KernelDevice,
        n_rows: int,
        rows_each: int,
        *,
        n_keys: int | None = None,
        placed: Sequence[Any] = (None,) * 4,
        most_pieces: int | None = None,
        most_partials: int | None = None,
    ) -> None:
        self._plan, self._device, self._placed = plan, device, placed
        self._tiling = Tiling(FEW_VECTORS if self.group <= FEW_VECTORS else MANY_VECTORS)
        self._n_rows, self._rows_each = n_rows, rows_each
        self._tile_rows = max(1, self._tiling.tile_vectors // self.group)
        n_keys = len(plan.kv_indices) * plan.page_size if n_keys is None else n_keys
        n_tiles = -(-rows_each // self._tile_rows)
        # a tile has up to two parts more than keys for whole ones, and there is one for each row or
        # fewer; most parts have those of a request that has all keys
        self.n_items = 2 * n_rows + n_tiles * (n_keys // split_keys(plan))
        if most_pieces is not None:
            self.n_items = min(self.n_items, n_rows + most_pieces)
        sizes = [
            0 if array is not None else len(table)
            for array, table in zip(placed, _step_tables(plan), strict=True)
        ]
        sizes += [8 * self.n_items, 4 * n_rows]
        self._ends = np.cumsum(sizes).tolist()
        self.host = np.zeros(self._ends[-1], np.int32)
        """int32: the step's tables, items and merges, one behind the other."""
        self.there: Any = None
        """Where the kernels read them, int32 on the device; set by who copies."""
        self.padded = self._divide(most_partials)
        self.most_partials = self.padded.n_partials
        """Partial results of each key/value head that there is memory for."""

    @property
    def group(self) -> int:
        """Return the query vectors of a row for each key/value head."""
        return self._plan.heads[0] // self._plan.heads[1]

    def fill(self) -> None:
        """Divide the work of the step that the plan is filled with."""
        starts = [0, *self._ends]
        for table, array, start in zip(
            _step_tables(self._plan), self._placed, starts, strict=False
        ):
            if array is None:
                self.host[start : start + len(table)] = table
        items = divide_for_device(
            self._plan, self._tiling, self._device.n_sms, most_items=self.n_items,
            most_partials=self.most_partials,
        )  # fmt: skip
        assert len(items.items) <= self.n_items
        for rows, start, end in zip(
            (items.items, items.merges), self._ends[3:], self._ends[4:], strict=False
        ):
            self.host[start : start + rows.size] = rows.ravel()
            self.host[start + rows.size : end] = 0  # items without rows

    def address_of_part(self, part: int) -> int:
        """Return where on the device a part of a step lies: four tables, items, merges."""
        if part < len(self._placed) and self._placed[part] is not None:
            return address(self._placed[part])
        return address(self.there) + 4 * int([0, *self._ends][part])

    def _divide(self, most_partials: int | None) -> CudaWorkItems:
        """Return what a launch is made for: all items that there is room for."""
        most = min(self._tile_rows, self._rows_each) * self.group
        n_partials = self.n_items * most
        return CudaWorkItems(
            np.zeros((self.n_items, 8), np.int32),
            np.zeros((self._n_rows, 4), np.int32),
            n_partials if most_partials is None else min(n_partials, most_partials),
            most,
            True,
        )


NO_ITEMS = CudaWorkItems(np.zeros((0, 8), np.int32), np.zeros((0, 4), np.int32), 0, 1, False)


def _step_tables(plan: AttentionPlan) -> tuple[np.ndarray, ...]:
    return plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens


def partial_floats(heads: tuple[int, int, int, int]) -> int:
    """Return the floats of a partial result of all key/value heads."""
    return heads[1] * (-(-heads[3] // 4) * 4 + 4)


def floats_in(workspace: Any) -> tuple[int, int]:
    """Return where on the device a caller's workspace begins, and its floats from there on."""
    start = -(-address(workspace) // 16) * 16
    return start, max(address(workspace) + int(workspace.nbytes) - start, 0) // 4


class CudaPlan:
    """Buffers of a plan on one stream of a device; made by `device_plan`, renewed with the plan.

    Streams share nothing, as nothing orders a copy or a partial result of one of them before the
    launches of another.

    Parameters
    ----------
    plan : AttentionPlan
        The plan.
    device : KernelDevice
        The device.
    """

    def __init__(self, plan: AttentionPlan, device: KernelDevice) -> None:
        self._plan, self._device = plan, device
        self._step = -1
        self._copies: dict[Any, tuple[Any, Any]] = {}
        self._divisions: dict[Tiling, tuple[CudaWorkItems, Any]] = {}
        self._step_tables: tuple[Any, list[int]] = (None, [])
        self._partials: Any = None
        self._arrived = device.asarray(np.zeros(64, np.int32))
        self._headers: dict[tuple[Any, ...], tuple[np.ndarray, Any]] = {}
        self._fixed: StaticPlanBuffers | None = None
        self._sent = False

    def fix(self, tables: StaticPlanBuffers) -> None:
        """Read everything about a step from these tables from now on, on any stream."""
        self._fixed = tables
        self._plan.on_devices.clear()
        self._plan.on_devices[self._device.key] = self
        self._make_room(tables.padded)

    def refresh(self) -> None:
        """Bring the headers in use up to the plan's present step, in the memory they have."""
        self._make_room(self._fixed.padded if self._fixed is not None else NO_ITEMS)
        for host, there in self._headers.values():
            before = host.copy()
            self._fill_shared(host)
            if not np.array_equal(before, host):
                there[...] = self._device.asarray(host)

    @property
    def n_bytes(self) -> int:
        """Return the bytes on the device, without `StaticPlanBuffers`."""
        arrays = [self._partials, self._arrived, self._step_tables[0]]
        arrays += [packed for _, packed in self._divisions.values()]
        arrays += [header for _, header in self._headers.values()]
        arrays += [copy for _, copy in self._copies.values()]
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def items(self, tiling: Tiling) -> CudaWorkItems:
        """Return the work of a kernel's thread blocks."""
        if self._fixed is None:
            return self._division(tiling)[0]
        takes = tiling.more_than < self._fixed.group <= tiling.at_most
        return self._fixed.padded if takes else NO_ITEMS

    def header(self, tiling: Tiling) -> Any:
        """Return the header for these thread blocks, int64 on the device.

        What did not change since the last call is not copied again, so that a call made before in
        the same way can be captured into a graph.  What each layer may have of its own, sinks,
        factors and the LSE's base, has headers of its own.
        """
        plan, fixed = self._plan, self._fixed
        self._forget_headers()
        host = plan.header.copy()
        host[at.SPLIT_KEYS] = split_keys(plan)
        places = (at.QO_INDPTR, at.KV_INDPTR, at.KV_INDICES, at.KV_LENS, at.ITEMS, at.MERGES)
        if fixed is None:
            items, packed = self._division(tiling)
            there = address(packed)
            addresses = [*self._step_tables[1], there, there + items.items.nbytes]
        else:
            items, addresses = fixed.padded, [fixed.address_of_part(i) for i in range(6)]
        host[at.MOST], host[at.N_MERGES] = items.most, len(items.merges)
        for place, found in zip(places, addresses, strict=True):
            host[place] = found
        for place in _LAYERS:
            host[place] = self._table(place)
        self._fill_shared(host)
        host[[at.SHARES, at.ITEM_ROOM, at.MERGE_ROOM]] = 0  # the host's
        key = (tiling, *host[[*_LAYERS, at.LSE_NATURAL]].tolist())
        known = self._headers.get(key)
        if known is None or not np.array_equal(known[0], host):
            there = self._device.asarray(host)
            if known is not None and fixed is not None:  # a graph may read it
                known[1][...] = there
                there = known[1]
            known = self._headers[key] = (host, there)
            self._sent = True
        if self._sent and plan.waits_for_copies:
            self._device.synchronize()
        self._sent = False
        return known[1]

    def _forget_headers(self) -> None:
        """Make room for headers and tables; a graph may read those of `StaticPlanBuffers`."""
        if max(len(self._headers), len(self._copies)) < MOST_HEADERS:
            return
        if self._fixed is not None:
            raise UsageError(
                f"run was called with {MOST_HEADERS} different factors or sinks, whose tables a "
                "captured graph may read; make another wrapper or plan"
            )
        self._headers.clear()
        self._copies.clear()

    def _fill_shared(self, host: np.ndarray) -> None:
        """Write the addresses that all layers of a step have in common."""
        host[at.PARTIALS], host[at.ARRIVED] = self._room()[0], address(self._arrived)
        for place in _TABLES:
            host[place] = self._table(place)

    def _division(self, tiling: Tiling) -> tuple[CudaWorkItems, Any]:
        """Return the items and their copy on the device."""
        plan = self._plan
        if self._step != plan.n_steps:
            tables = _step_tables(plan)
            together = self._device.asarray(np.concatenate(tables))
            offsets = np.cumsum([0, *(table.nbytes for table in tables[:-1])])
            self._step_tables = (together, [address(together) + int(n) for n in offsets])
            self._divisions, self._step = {}, plan.n_steps
        if tiling not in self._divisions:
            most = None
            if plan.workspace is not None:
                most = floats_in(plan.workspace)[1] // partial_floats(plan.heads)
            items = divide_for_device(plan, tiling, self._device.n_sms, most_partials=most)
            both = np.concatenate(
                [items.items.ravel(), items.merges.ravel(), np.zeros(4, np.int32)]
            )
            self._divisions[tiling] = (items, self._device.asarray(both))
            self._make_room(items)
            self._sent = True
        return self._divisions[tiling]

    def _room(self) -> tuple[int, int]:
        """Return where partial results go, and how many floats have room there."""
        if self._plan.workspace is not None:
            return floats_in(self._plan.workspace)
        return (0, 0) if self._partials is None else (address(self._partials), self._partials.size)

    def _make_room(self, items: CudaWorkItems) -> None:
        """Grow the buffer of partial results and the arrival counters."""
        floats = items.n_partials * partial_floats(self._plan.heads)
        if self._plan.workspace is None and self._room()[1] < floats:
            self._partials = self._device.empty(floats, np.float32)
        tiles = len(items.merges) * self._plan.heads[1] * items.most  # at most, of one vector each
        if self._arrived.size < tiles:
            self._arrived = self._device.asarray(np.zeros(tiles, np.int32))

    def _table(self, place: int) -> int:
        """Return the address of a table's copy, 0 for none."""
        array = self._plan.table(place)
        if array is None:
            return 0
        # a layer's small table may be a new array at every call: the same numbers are one copy
        small = place in _LAYERS and isinstance(array, np.ndarray)
        key = (place, array.tobytes()) if small else place
        known = self._copies.get(key)
        if known is None or not (small or known[0] is array):
            copy = array if hasattr(array, "__cuda_array_interface__") else None
            known = (array, self._device.asarray(array) if copy is None else copy)
            self._copies[key] = known
        inside = 0
        if place == at.BIAS:  # the header points into the table, at distance 0
            inside = int(self._plan.header[place]) - int(array.ctypes.data)
        return address(known[1]) + inside


def device_plan(plan: AttentionPlan, like: Any) -> CudaPlan:
    """Return what the current stream of the device of the array `like` has of a plan."""
    device = device_of(like)
    found: CudaPlan | None = plan.on_devices.get(device.key)  # with `StaticPlanBuffers`
    if found is None:
        key = device.key, device.stream
        found = plan.on_devices.get(key)
        if found is None:
            found = plan.on_devices[key] = CudaPlan(plan, device)
    return found

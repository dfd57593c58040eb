"""A plan's tables in the memory of a device: what its kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.attention import layout as at
from nbflow_kernels.attention.device_items import (
    FEW_VECTORS,
    MANY_VECTORS,
    DeviceItems,
    Tiling,
    divide_for_device,
    split_keys,
)
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cuda import KernelDevice, address, device_of

MOST_HEADERS = 1024
"""Headers that are kept: of some hundred layers, or as many arrays of sinks."""
# Places of the header that are addresses of tables which `AttentionPlan.set_table` sets.
_TABLES = (
    at.MASK, at.MASK_STARTS, at.SCORE_FACTORS, at.OUT_FACTORS, at.SLOPES, at.SINKS, at.ROPE,
    at.BIAS,
)  # fmt: skip

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


class FixedTables:
    """A plan's tables of fixed sizes at fixed addresses, for steps of few new tokens.

    Launches that read them can be captured into a graph: for a further step the host divides the
    work anew (`fill`), and `host` is copied to `there` before the graph is launched.  Thread blocks
    that have no item leave at once.

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
    """

    def __init__(
        self, plan: AttentionPlan, device: KernelDevice, n_rows: int, rows_each: int
    ) -> None:
        self._plan, self._device = plan, device
        self._tiling = Tiling(FEW_VECTORS if self.group <= FEW_VECTORS else MANY_VECTORS)
        self._n_rows, self._rows_each = n_rows, rows_each
        self._tile_rows = max(1, self._tiling.tile_vectors // self.group)
        n_keys, n_tiles = len(plan.kv_indices) * plan.page_size, -(-rows_each // self._tile_rows)
        # a tile has up to two parts more than keys for whole ones, and there is one for each row or
        # fewer; most parts have those of a request that has all keys
        self.n_items = 2 * n_rows + n_tiles * (n_keys // split_keys(plan))
        sizes = [len(table) for table in _step_tables(plan)]
        sizes += [8 * self.n_items, 4 * n_rows]
        self._ends = np.cumsum(sizes).tolist()
        self.host = np.zeros(self._ends[-1], np.int32)
        """int32: the step's tables, items and merges, one behind the other."""
        self.there: Any = None
        """Where the kernels read them, int32 on the device; set by who copies."""
        self.padded = self._divide()

    @property
    def group(self) -> int:
        """Return the query vectors of a row for each key/value head."""
        return self._plan.heads[0] // self._plan.heads[1]

    def fill(self) -> None:
        """Divide the work of the step that the plan is filled with."""
        for table, start in zip(_step_tables(self._plan), [0, *self._ends], strict=False):
            self.host[start : start + len(table)] = table
        items = divide_for_device(self._plan, self._tiling, self._device.n_sms)
        assert len(items.items) <= self.n_items
        for rows, start, end in zip(
            (items.items, items.merges), self._ends[3:], self._ends[4:], strict=False
        ):
            self.host[start : start + rows.size] = rows.ravel()
            self.host[start + rows.size : end] = 0  # items without rows

    def address_of_part(self, part: int) -> int:
        """Return where on the device a part of `host` lies: four tables, items, merges."""
        return address(self.there) + 4 * int([0, *self._ends][part])

    def _divide(self) -> DeviceItems:
        """Return what a launch is made for: all items that there is room for."""
        most = min(self._tile_rows, self._rows_each) * self.group
        return DeviceItems(
            np.zeros((self.n_items, 8), np.int32),
            np.zeros((self._n_rows, 4), np.int32),
            self.n_items * most,
            most,
            True,
        )


NO_ITEMS = DeviceItems(np.zeros((0, 8), np.int32), np.zeros((0, 4), np.int32), 0, 1, False)


def _step_tables(plan: AttentionPlan) -> tuple[np.ndarray, ...]:
    return plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens


class DevicePlan:
    """What one device has of a plan; made by `device_plan`, renewed when the plan is filled.

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
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._divisions: dict[Tiling, tuple[DeviceItems, Any]] = {}
        self._step_tables: tuple[Any, list[int]] = (None, [])
        self._partials = device.empty(4, np.float32)
        self._arrived = device.asarray(np.zeros(64, np.int32))
        self._headers: dict[tuple[Tiling, int], tuple[np.ndarray, Any]] = {}
        self._fixed: FixedTables | None = None

    def fix(self, tables: FixedTables) -> None:
        """Read everything about a step from these tables from now on."""
        self._fixed = tables
        self._make_room(tables.padded)

    @property
    def n_bytes(self) -> int:
        """Return the bytes on the device, without `FixedTables`."""
        arrays = [self._partials, self._arrived, self._step_tables[0]]
        arrays += [packed for _, packed in self._divisions.values()]
        arrays += [header for _, header in self._headers.values()]
        arrays += [copy for _, copy in self._copies.values()]
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def items(self, tiling: Tiling) -> DeviceItems:
        """Return the work of a kernel's thread blocks."""
        if self._fixed is None:
            return self._division(tiling)[0]
        takes = tiling.more_than < self._fixed.group <= tiling.at_most
        return self._fixed.padded if takes else NO_ITEMS

    def header(self, tiling: Tiling) -> Any:
        """Return the header for these thread blocks, int64 on the device.

        What did not change since the last call is not copied again, so that a call made before in
        the same way can be captured into a graph.  Sinks, which each layer has of its own, have
        headers of their own.
        """
        plan, fixed = self._plan, self._fixed
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
        host[at.PARTIALS], host[at.ARRIVED] = address(self._partials), address(self._arrived)
        for place in _TABLES:
            host[place] = self._table(place)
        host[[at.SHARES, at.ITEM_ROOM, at.MERGE_ROOM]] = 0  # the host's
        key = tiling, int(host[at.SINKS])
        known = self._headers.get(key)
        if known is None or not np.array_equal(known[0], host):
            if fixed is None and len(self._headers) >= MOST_HEADERS:
                self._headers.clear()
            known = (host, self._device.asarray(host))
            self._headers[key] = known
        return known[1]

    def _division(self, tiling: Tiling) -> tuple[DeviceItems, Any]:
        """Return the items and their copy on the device."""
        plan = self._plan
        if self._step != plan.n_steps:
            tables = _step_tables(plan)
            together = self._device.asarray(np.concatenate(tables))
            offsets = np.cumsum([0, *(table.nbytes for table in tables[:-1])])
            self._step_tables = (together, [address(together) + int(n) for n in offsets])
            self._divisions, self._step = {}, plan.n_steps
        if tiling not in self._divisions:
            items = divide_for_device(plan, tiling, self._device.n_sms)
            both = np.concatenate(
                [items.items.ravel(), items.merges.ravel(), np.zeros(4, np.int32)]
            )
            self._divisions[tiling] = (items, self._device.asarray(both))
            self._make_room(items)
        return self._divisions[tiling]

    def _make_room(self, items: DeviceItems) -> None:
        """Have memory for partial results and for who has made them."""
        heads = self._plan.heads
        floats = items.n_partials * heads[1] * (-(-heads[3] // 4) * 4 + 4)
        if self._partials.size < floats:
            self._partials = self._device.empty(floats, np.float32)
        tiles = len(items.merges) * heads[1] * items.most  # at most, of one vector each
        if self._arrived.size < tiles:
            self._arrived = self._device.asarray(np.zeros(tiles, np.int32))

    def _table(self, place: int) -> int:
        """Return the address of a table's copy, 0 for none."""
        array = self._plan.table(place)
        if array is None:
            return 0
        known = self._copies.get(place)
        if known is None or known[0] is not array:
            copy = array if hasattr(array, "__cuda_array_interface__") else None
            known = (array, self._device.asarray(array) if copy is None else copy)
            self._copies[place] = known
        inside = 0
        if place == at.BIAS:  # the header points into the table, at distance 0
            inside = int(self._plan.header[place]) - int(array.ctypes.data)
        return address(known[1]) + inside


def device_plan(plan: AttentionPlan, like: Any) -> DevicePlan:
    """Return what the device of the array `like` has of a plan."""
    device = device_of(like)
    if device.key not in plan.on_devices:
        plan.on_devices[device.key] = DevicePlan(plan, device)
    found: DevicePlan = plan.on_devices[device.key]
    return found

"""A plan's tables in the memory of a device: what its kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.attention import layout as at
from nbflow_kernels.attention.device_items import DeviceItems, Tiling, divide_for_device, split_keys
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cuda import KernelDevice, address, device_of

# Places of the header that are addresses of tables which `AttentionPlan.set_table` sets.
_TABLES = (
    at.MASK, at.MASK_STARTS, at.SCORE_FACTORS, at.OUT_FACTORS, at.SLOPES, at.SINKS, at.ROPE,
    at.BIAS,
)  # fmt: skip


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
        self._headers: dict[Tiling, tuple[np.ndarray, Any]] = {}

    def items(self, tiling: Tiling) -> DeviceItems:
        """Return the work of a kernel's thread blocks."""
        return self._division(tiling)[0]

    def header(self, tiling: Tiling) -> Any:
        """Return the header for these thread blocks, int64 on the device.

        What did not change since the last call is not copied again, so that a call made before in
        the same way can be captured into a graph.
        """
        items, packed = self._division(tiling)
        plan = self._plan
        host = plan.header.copy()
        host[at.SPLIT_KEYS] = split_keys(plan)
        host[at.MOST], host[at.N_MERGES] = items.most, len(items.merges)
        host[at.ITEMS] = address(packed)
        host[at.MERGES] = address(packed) + items.items.nbytes
        places = (at.QO_INDPTR, at.KV_INDPTR, at.KV_INDICES, at.KV_LENS)
        for place, table in zip(places, self._step_tables[1], strict=True):
            host[place] = table
        host[at.PARTIALS], host[at.ARRIVED] = address(self._partials), address(self._arrived)
        for place in _TABLES:
            host[place] = self._table(place)
        host[at.SHARES] = 0
        known = self._headers.get(tiling)
        if known is None or not np.array_equal(known[0], host):
            known = (host, self._device.asarray(host))
            self._headers[tiling] = known
        return known[1]

    def _division(self, tiling: Tiling) -> tuple[DeviceItems, Any]:
        """Return the items and their copy on the device."""
        plan = self._plan
        if self._step != plan.n_steps:
            tables = (plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens)
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
            floats = items.n_partials * plan.heads[1] * (-(-plan.heads[3] // 4) * 4 + 4)
            if self._partials.size < floats:
                self._partials = self._device.empty(floats, np.float32)
            tiles = (
                len(items.merges) * plan.heads[1] * items.most
            )  # at most: thread blocks take more
            if self._arrived.size < tiles:
                self._arrived = self._device.asarray(np.zeros(tiles, np.int32))
        return self._divisions[tiling]

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

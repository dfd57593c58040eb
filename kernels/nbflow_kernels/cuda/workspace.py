"""Scratch buffers of kernels, one per stream and purpose.

A buffer keeps its address between calls, as captured graphs require, and only grows: run a shape
once before capturing it, and keep the result of `buffers` as long as the graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cuda.devices import KernelDevice

MIN_ITEMS = 1024
_buffers: dict[tuple[Any, ...], Any] = {}


def workspace(device: KernelDevice, name: str, n_items: int, dtype: Any, zero: bool = False) -> Any:
    """Return an array of at least `n_items`, the same at every call on a stream.

    Parameters
    ----------
    device : KernelDevice
        The device.
    name : str
        Its purpose; each name has its own buffer.
    n_items : int
        Minimum number of items.
    dtype : dtype
        Type of the items.
    zero : bool
        Zeros at first; kernels must leave it so.
    """
    key = (device.key, device.stream, name)
    found = _buffers.get(key)
    if found is None or found.size < n_items:
        size = max(n_items, MIN_ITEMS)
        found = device.asarray(np.zeros(size, dtype)) if zero else device.empty((size,), dtype)
        _buffers[key] = found
    return found


def allocated_bytes(n_items: int, item_bytes: int) -> int:
    """Return the size of a buffer that was asked for `n_items`."""
    return item_bytes * max(n_items, MIN_ITEMS)


def buffers(device: KernelDevice) -> list[Any]:
    """Return the buffers of the current stream."""
    return [
        buffer for (key, stream, _), buffer in _buffers.items()
        if (key, stream) == (device.key, device.stream)
    ]  # fmt: skip


def release(device_key: tuple[Any, ...], stream: Any) -> None:
    """Free the buffers of a stream that is no longer used."""
    for key in [key for key in _buffers if key[:2] == (device_key, stream)]:
        del _buffers[key]

"""Memory that kernels share while they run, one piece for each stream and purpose.

It stays where it is between calls, as graphs that were captured expect, and only grows: run a shape
once before capturing it, and keep what `pieces` returns then as long as the graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cuda.devices import KernelDevice

_pieces: dict[tuple[Any, ...], Any] = {}


def workspace(device: KernelDevice, name: str, n_items: int, dtype: Any, zero: bool = False) -> Any:
    """Return an array of at least `n_items`, the same at every call on a stream.

    Parameters
    ----------
    device : KernelDevice
        Where.
    name : str
        Its purpose: what uses another name has memory of its own.
    n_items : int
        Least number of items.
    dtype : dtype
        Their type.
    zero : bool
        Whether it is zeros at first; kernels leave it so.
    """
    key = (device.key, device.stream, name)
    found = _pieces.get(key)
    if found is None or found.size < n_items:
        size = max(n_items, 1024)
        found = device.asarray(np.zeros(size, dtype)) if zero else device.empty((size,), dtype)
        _pieces[key] = found
    return found


def pieces(device: KernelDevice) -> list[Any]:
    """Return the present pieces of the current stream."""
    return [
        piece for (key, stream, _), piece in _pieces.items()
        if (key, stream) == (device.key, device.stream)
    ]  # fmt: skip


def release(device_key: tuple[Any, ...], stream: Any) -> None:
    """Let go of the pieces of a stream that is used no more."""
    for key in [key for key in _pieces if key[:2] == (device_key, stream)]:
        del _pieces[key]

"""Reading and writing memory by its address."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 16
_FIRST_PAGE = 4096  # never mapped: an address below is an index or an offset gone astray


def _checked(addr):
    if isinstance(addr, float | np.floating) or addr < _FIRST_PAGE:
        raise IndexError(f"a kernel used {addr!r} as an address")
    return int(addr)


def read(addr: Any, dtype: Any, count: int) -> NDArray[Any]:
    """Return a copy of `count` numbers at an address; it cannot be written to."""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(_checked(addr), count * size), dtype)


def write(addr: Any, values: NDArray[Any]) -> None:
    """Write the numbers of an array to an address."""
    ctypes.memmove(_checked(addr), values.tobytes(), values.nbytes)


def read_at_steps(addr: Any, step: Any, n: int, dtype: Any, count: int) -> NDArray[Any]:
    """Return `count` numbers at each of `n` addresses, `step` bytes apart, as (n, count)."""
    return np.stack([read(addr + i * step, dtype, count) for i in range(n)])


def bf16_to_f32(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Widen the bits of bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the bits of bfloat16, halves to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    near = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, near).astype(np.uint16)

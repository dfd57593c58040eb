"""NumPy fallbacks of `nbflow_kernels.cpu.simd_memory`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter import simd
from nbflow_kernels.cpu.interpreter.memory import LANES, bf16_to_f32, read, write

Vector = NDArray[Any]


def _make_read(dtype: Any, convert: Callable[..., Any]) -> Callable[[Any], Any]:

    def load(addr):
        """Return one element as float32 or int."""
        return convert(read(addr, dtype, 1)[0])

    return load


read_f32, read_f16 = (_make_read(dtype, np.float32) for dtype in (np.float32, np.float16))
read_bf16 = _make_read(np.uint16, bf16_to_f32)
read_i32, read_i64 = (_make_read(dtype, int) for dtype in (np.int32, np.int64))
read_u8, read_u16 = (_make_read(dtype, int) for dtype in (np.uint8, np.uint16))


def write_i64(addr, x):
    """Write one int64."""
    write(addr, np.array([x], np.int64))


def store_quarters(addr: Any, step: Any, v: Vector) -> None:
    """Write lanes 4i..4i+3 to the address ``addr + i * step``."""
    for i in range(4):
        write(addr + i * step, v[4 * i : 4 * i + 4])


def read_word(addr, i):
    """Return the i-th int64 from an address on."""
    return read_i64(addr + 8 * int(i))


def write_f32(addr, x):
    """Write one float32."""
    write(addr, np.array([x], np.float32))


def write_f16(addr, x):
    """Write one float32 rounded to float16."""
    write(addr, np.array([x], np.float32).astype(np.float16))


def store_f16(addr: Any, v: Vector) -> None:
    """Write 16 float32 rounded to float16."""
    write(addr, v.astype(np.float16))


def _first(n):
    return max(0, min(int(n), LANES))


def _load_first(addr: Any, n: Any, rest: Any, dtype: Any, widen: Callable[..., Any]) -> Vector:
    v = np.full(LANES, rest, np.float32)
    if _first(n):
        v[: _first(n)] = widen(read(addr, dtype, _first(n)))
    return v


def load_first(addr: Any, n: Any, rest: Any) -> Vector:
    """Return 16 float32 of which the first `n` are read, and the others are `rest`."""
    return _load_first(addr, n, rest, np.float32, np.float32)


def load_first_f16(addr: Any, n: Any) -> Vector:
    """Return 16 float16 of which the first `n` are read, and the others are 0, widened."""
    return _load_first(addr, n, 0, np.float16, np.float32)


def load_first_bf16(addr: Any, n: Any) -> Vector:
    """Return 16 bfloat16 of which the first `n` are read, and the others are 0, widened."""
    return _load_first(addr, n, 0, np.uint16, bf16_to_f32)


def store_first(addr: Any, n: Any, v: Vector) -> None:
    """Write the first `n` lanes of 16 float32."""
    if _first(n):
        write(addr, v[: _first(n)])


_allocated: dict[int, NDArray[Any]] = {}


def allocate(n_bytes):
    """Return the address of scratch memory that lives until `release`."""
    memory = np.full(max(1, int(n_bytes)), 0xFF, np.uint8)  # NaN
    _allocated[memory.ctypes.data] = memory
    return memory.ctypes.data


def release(addr):
    """Free memory from `allocate`."""
    del _allocated[int(addr)]


def prefetch(addr):
    """Do nothing."""


def prefetch_write(addr):
    """Do nothing."""


def prefetch_lines(addr: Any, n: int) -> None:
    """Do nothing."""


def sum16(*vectors: Vector) -> Vector:
    """Return the vector whose lane i is the sum of the lanes of argument i."""
    return np.array([simd.sum(v) for v in vectors], np.float32)

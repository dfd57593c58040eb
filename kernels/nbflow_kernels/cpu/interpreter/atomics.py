"""NumPy fallbacks of `nbflow_kernels.cpu.atomics`; interpreted kernels run in one thread."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from nbflow_kernels.cpu.interpreter.memory import write
from nbflow_kernels.cpu.interpreter.simd_memory import read_i64

_RowRange = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_Int = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
Hook = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)
"""C type of the functions that `call_hook` calls."""


def exchange(addr, x):
    """Store an int64 and return the old one."""
    before = read_i64(addr)
    store(addr, x)
    return before


def add(addr, x):
    """Add to an int64 and return the old one."""
    before = read_i64(addr)
    store(addr, before + int(x))
    return before


def load(addr):
    """Return the int64 at an address."""
    return read_i64(addr)


def load_in_order(addr):
    """Return the int64 at an address."""
    return read_i64(addr)


def store(addr, x):
    """Write an int64."""
    write(addr, np.array([x], np.int64))


def pause() -> None:
    """Do nothing."""


def cycles() -> int:
    """Return nanoseconds."""
    return time.perf_counter_ns()


def call_row_range(function, args_at, start, stop):
    """Call a trampoline for rows [start, stop)."""
    return int(_RowRange(int(function))(int(args_at), int(start), int(stop)))


def call_int(function, x):
    """Call the C function ``int f(int)`` at an address."""
    return int(_Int(int(function))(int(x)))


def call_hook(function, *arguments):
    """Call a function of nine int64 without a result at an address."""
    Hook(int(function))(*map(int, arguments))

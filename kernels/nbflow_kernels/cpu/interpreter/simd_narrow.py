"""NumPy fallbacks of `nbflow_kernels.cpu.simd_narrow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter.memory import LANES, f32_to_bf16, read, write

Vector = NDArray[Any]


def _make_fields(width: int, per_value: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the load and the store of a plane's values that fill 16 lanes."""
    n_values = LANES // per_value
    n_bytes = n_values * width // 8
    shifts = np.arange(n_values, dtype=np.uint64) * np.uint64(width)

    def load(addr: Any) -> Vector:
        """Return 16 lanes of values."""
        word = np.uint64(int.from_bytes(read(addr, np.uint8, n_bytes).tobytes(), "little"))
        values = (word >> shifts) & np.uint64(2**width - 1)
        return values.astype(np.int32).repeat(per_value)

    def store(addr: Any, v: Vector) -> None:
        """Write the values of 16 lanes."""
        values = v[::per_value].view(np.uint32) if per_value == 1 else v[::per_value].copy()
        words = values.astype(np.uint32).astype(np.uint64) << shifts
        word = int(np.bitwise_or.reduce(words)) & (2 ** (8 * n_bytes) - 1)
        write(addr, np.frombuffer(word.to_bytes(n_bytes, "little"), np.uint8))

    return load, store


load_fields4, store_fields4 = _make_fields(4, 1)
load_fields2, store_fields2 = _make_fields(2, 1)
load_fields1, store_fields1 = _make_fields(1, 1)
load_pairs4, store_pairs4 = _make_fields(4, 2)
load_pairs2, store_pairs2 = _make_fields(2, 2)
load_pairs1, store_pairs1 = _make_fields(1, 2)


def choose_odd(even: Vector, odd: Vector) -> Vector:
    """Return the even lanes of the one and the odd lanes of the other."""
    return np.where(np.arange(LANES) % 2 == 0, even, odd)


def store_bf16(addr: Any, v: Vector) -> None:
    """Write 16 float32 as bfloat16."""
    write(addr, f32_to_bf16(v))


def half_bits(v: Vector) -> Vector:
    """Return the bits of float32 rounded to float16."""
    with np.errstate(over="ignore"):
        return v.astype(np.float16).view(np.uint16).astype(np.int32)


def from_half_bits(bits: Vector) -> Vector:
    """Return the low 16 bits as float16, widened."""
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def write_u16(addr, value):
    """Write the low 16 bits of an integer."""
    write(addr, np.array([int(value) & 0xFFFF], np.uint16))


def write_u8(addr, value):
    """Write the low 8 bits of an integer."""
    write(addr, np.array([int(value) & 0xFF], np.uint8))


def keep(v: Vector, count: Any) -> Vector:
    """Return the vector with zeros in the lanes from `count` on."""
    return np.where(np.arange(LANES) < count, v, np.float32(0))

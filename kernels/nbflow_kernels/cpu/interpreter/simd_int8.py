"""NumPy fallbacks of `nbflow_kernels.cpu.simd_int8`: 64 bytes are an array of uint8."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter.memory import LANES, read, write

Vector = NDArray[Any]

BYTES = 4 * LANES


# ---- loads, stores, broadcasts --------------------------------------------------------------


def load_bytes(addr: Any) -> Vector:
    """Return 64 bytes."""
    return read(addr, np.uint8, BYTES)


def store_bytes(addr: Any, v: Vector) -> None:
    """Write 64 bytes."""
    write(addr, _bytes(v))


def _bytes(v: Vector) -> Vector:
    if v.dtype != np.uint8 or v.shape != (BYTES,):
        raise TypeError(f"wanted 64 bytes, got {v.shape} of {v.dtype}")
    return v


def splat_bytes(n: Any) -> Vector:
    """Return the low byte of an integer in all places."""
    return np.full(BYTES, int(n) & 0xFF, np.uint8)


def broadcast4(addr: Any) -> Vector:
    """Return 4 bytes in all lanes."""
    return np.tile(read(addr, np.uint8, 4), LANES)


def broadcast_f32(addr: Any) -> Vector:
    """Return a float32 in all lanes."""
    return read(addr, np.float32, 1).repeat(LANES)


def as_bytes(v: Vector) -> Vector:
    """Return int32 lanes as bytes."""
    return v.view(np.uint8)


def store_narrow(addr: Any, v: Vector) -> None:
    """Write the low bytes of 16 int32."""
    write(addr, v.astype(np.uint8))


def store_halves(addr: Any, v: Vector) -> None:
    """Write the low 16 bits of 16 int32."""
    write(addr, v.astype(np.uint16))


# ---- parts of bytes -------------------------------------------------------------------------


def move(v: Vector, source: int, target: int, width: int) -> Vector:
    """Return `width` bits of each byte moved from bit `source` to bit `target`."""
    bits = (_bytes(v) >> np.uint8(source)) & np.uint8((1 << width) - 1)
    return bits << np.uint8(target)


def pair_first(c: Vector) -> Vector:
    """Return x of c = x + 11 * y."""
    return (_bytes(c) & np.uint8(127)) - np.uint8(11) * pair_second(c)


def pair_second(c: Vector) -> Vector:
    """Return y of c = x + 11 * y: c * 373 >> 12, as the machine code has it above 120 too."""
    return ((_bytes(c) & np.uint8(127)).astype(np.int32) * 373 >> 12).astype(np.uint8)


# ---- dot products ---------------------------------------------------------------------------


def dot_u8_i8(acc: Vector, u: Vector, s: Vector) -> Vector:
    """Return acc plus the sums of 4 products, u unsigned and s signed."""
    products = _bytes(u).astype(np.int32) * _bytes(s).view(np.int8)
    sums: Vector = products.reshape(LANES, 4).sum(1, dtype=np.int32)
    return acc + sums


def dot_u7_i8(acc: Vector, u: Vector, s: Vector) -> Vector:
    """Return `dot_u8_i8` of u below 128."""
    if u.max() > 127:
        raise ValueError(f"dot_u7_i8 wants bytes below 128, got {u.max()}")
    return dot_u8_i8(acc, u, s)

"""Small integers in bytes: the planes all block formats are made of.

A plane of width `w` (1, 2, 4 or 8 bits) holds ``8 // w`` values per byte, the first in the lowest
bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._jit import inline
from nbflow_kernels.formats.registry import Bytes


def pack_fields(values: Bytes, width: int) -> Bytes:
    """Return values (n, count), each below ``2 ** width``, as bytes (n, count * width / 8)."""
    per_byte = 8 // width
    parts = values.reshape(len(values), -1, per_byte)
    result = np.zeros(parts.shape[:2], np.uint8)
    for i in range(per_byte):
        result |= parts[:, :, i] << np.uint8(width * i)
    return result


def unpack_fields(data: Bytes, width: int) -> Bytes:
    """Return the values (n, count) of a plane of bytes (n, count * width / 8)."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return ((data[:, :, None] >> shifts) & np.uint8(2**width - 1)).reshape(len(data), -1)


def pack_halves(values: Bytes) -> Bytes:
    """Return values (n, 2m), each below 16, as (n, m): the first m in the low nibbles."""
    half = values.shape[1] // 2
    data: Bytes = values[:, :half] | (values[:, half:] << np.uint8(4))
    return data


def unpack_halves(data: Bytes) -> Bytes:
    """Return the values (n, 2m) of bytes (n, m): the low nibbles first, then the high ones."""
    return np.hstack([data & np.uint8(15), data >> np.uint8(4)])


@inline
def half_nibble(row: Any, at: Any, i: Any) -> Any:
    """Return value `i` of 32 in 16 bytes at `at`: the low nibbles first, then the high ones."""
    return (row[at + (i & 15)] >> (i >> 4 << 2)) & 15


@inline
def nibble(row: Any, at: Any, i: Any) -> Any:
    """Return value `i` of the 4-bit plane that starts at byte `at`."""
    return (row[at + (i >> 1)] >> (4 * (i & 1))) & 15


@inline
def crumb(row: Any, at: Any, i: Any) -> Any:
    """Return value `i` of the 2-bit plane that starts at byte `at`."""
    return (row[at + (i >> 2)] >> (2 * (i & 3))) & 3


@inline
def bit(row: Any, at: Any, i: Any) -> Any:
    """Return value `i` of the 1-bit plane that starts at byte `at`."""
    return (row[at + (i >> 3)] >> (i & 7)) & 1

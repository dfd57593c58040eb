"""The layout weights are computed from: 16 rows side by side, a lane of a vector per row.

A *row group* is 16 rows (rows past the last are zero).  Its blocks follow each other; each is

========================  =========================================================================
parameters                `F16_PAIR`: 16 scales, 16 bases (float16, 64 bytes)
                          `F16_SCALE`: 16 scales (float16, 32 bytes); base = -zero * scale
                          `U8_PAIR`: 16 scales u/1000, 16 bases u/100 - 1 (uint8, 32 bytes)
codes                     units of `CodeLayout.columns` columns, `CodeLayout.words` vectors each
========================  =========================================================================

A vector is 16 int32, one per row.  A unit of a plane layout holds a *low* plane, ``32 / low_bits``
columns per vector from the lowest bits up, and then at most one vector of a *high* plane with
``high_bits`` for each column.  The layout `PAIRS` holds 64 columns as 32 pair codes
``c = x + 11 * y`` of 7 bits: 28 in the low 7 bits of the bytes of 7 vectors, and the last four in
the 28 top bits (bit i of pair ``28 + b`` is the top bit of byte b of vector i).

Either way a packed weight takes as many bits as a stored one; only rows are padded to 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels._jit import njit
from nbflow_kernels.threads import split_rows

ROWS = 16  # rows of a group: the lanes of a simd vector

F16_PAIR, F16_SCALE, U8_PAIR = 0, 1, 2
PARAMETER_BYTES = {F16_PAIR: 64, F16_SCALE: 32, U8_PAIR: 32}  # of the 16 rows of a group
CHUNK = 1 << 22  # weights packed at once: bounds the temporary array of codes


@dataclass(frozen=True)
class CodeLayout:
    """How the codes of `columns` columns and 16 rows lie in `words` vectors of 64 bytes."""

    name: str
    low_bits: int
    high_bits: int

    @property
    def columns(self) -> int:
        """Columns of a unit."""
        return 64 if self.name == "pairs" else 32 // (self.high_bits or self.low_bits)

    @property
    def words(self) -> int:
        """Vectors of a unit."""
        if self.name == "pairs":
            return 7
        return self.columns * self.low_bits // 32 + (1 if self.high_bits else 0)


BITS8 = CodeLayout("bits8", 8, 0)
BITS6 = CodeLayout("bits6", 4, 2)
BITS5 = CodeLayout("bits5", 4, 1)
BITS4 = CodeLayout("bits4", 4, 0)
BITS3 = CodeLayout("bits3", 2, 1)
BITS2 = CodeLayout("bits2", 2, 0)
PAIRS = CodeLayout("pairs", 7, 0)


@dataclass(frozen=True, eq=False)
class Packed:
    """Weights in the layout of this module."""

    layout: CodeLayout
    parameters: int
    """F16_PAIR, F16_SCALE or U8_PAIR."""
    zero: int
    """With F16_SCALE: the code of weight 0."""
    block_size: int
    n_rows: int
    n_blocks: int
    """Blocks of a row."""
    data: NDArray[np.uint8]
    """Flat bytes, ``n_groups * n_blocks * block_bytes``."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, rows padded to a multiple of 16."""
        return self.data.nbytes

    @property
    def n_groups(self) -> int:
        """Groups of 16 rows."""
        return -(-self.n_rows // ROWS)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 rows."""
        units = self.block_size // self.layout.columns
        return PARAMETER_BYTES[self.parameters] + units * self.layout.words * 64


def pack(
    layout: CodeLayout,
    parameters: int,
    zero: int,
    block_size: int,
    codes_of_rows: Callable[[NDArray[np.uint8]], NDArray[np.uint8]],
    data: NDArray[np.uint8],
    stored: NDArray[np.uint16],
) -> Packed:
    """Return rows of storage bytes in the layout for computing.

    Parameters
    ----------
    layout : CodeLayout
        Where the codes go.
    parameters : int
        F16_PAIR, F16_SCALE or U8_PAIR.
    zero : int
        The code of weight 0 with F16_SCALE, else 0.
    block_size : int
        Weights in a block; a multiple of the layout's columns.
    codes_of_rows : callable
        Storage bytes of rows to their codes, uint8 (rows, columns).
    data : array of uint8, shape (rows, row bytes)
        The storage bytes.
    stored : array of uint16, shape (rows, blocks, 2)
        Stored base and scale of each block.
    """
    n_rows, n_blocks = stored.shape[:2]
    empty = np.zeros(0, np.uint8)
    shape = Packed(layout, parameters, zero, block_size, n_rows, n_blocks, empty)
    group_bytes = n_blocks * shape.block_bytes
    result = np.zeros((shape.n_groups, group_bytes), np.uint8)
    step = ROWS * max(1, CHUNK // max(1, ROWS * n_blocks * block_size))
    for row in range(0, n_rows, step):
        part = stored[row : row + step]
        groups = result[row // ROWS : (row + len(part) + ROWS - 1) // ROWS]
        codes = codes_of_rows(data[row : row + step])
        split_rows(
            _pack_groups, len(groups), 8.0 * codes.size, codes, part, groups, parameters,
            layout.low_bits, layout.high_bits, layout.columns, layout.words,
        )  # fmt: skip
    return Packed(layout, parameters, zero, block_size, n_rows, n_blocks, result.reshape(-1))


@njit
def _pack_groups(
    codes: Any, stored: Any, out: Any, parameters: Any, low_bits: Any, high_bits: Any,
    columns: Any, words: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Write row groups [start, stop)."""
    n_rows, n_blocks = stored.shape[0], stored.shape[1]
    block = codes.shape[1] // n_blocks
    parameter_bytes = 64 if parameters == F16_PAIR else 32
    block_bytes = parameter_bytes + block // columns * words * 64
    for group in range(start, stop):
        for lane in range(min(ROWS, n_rows - group * ROWS)):
            row = group * ROWS + lane
            for b in range(n_blocks):
                at = b * block_bytes
                base, scale = np.int64(stored[row, b, 0]), np.int64(stored[row, b, 1])
                if parameters == U8_PAIR:
                    out[group, at + lane], out[group, at + 16 + lane] = scale, base
                else:
                    out[group, at + 2 * lane] = scale & 255
                    out[group, at + 2 * lane + 1] = scale >> 8
                if parameters == F16_PAIR:
                    out[group, at + 32 + 2 * lane] = base & 255
                    out[group, at + 32 + 2 * lane + 1] = base >> 8
                at += parameter_bytes + 4 * lane
                for column in range(b * block, (b + 1) * block, columns):
                    if low_bits == 7:
                        _pack_pairs(codes[row, column : column + columns], out[group], at)
                    else:
                        unit = codes[row, column : column + columns]
                        _pack_planes(unit, out[group], at, low_bits, high_bits)
                    at += words * 64


@njit
def _pack_planes(codes: Any, out: Any, at: Any, low_bits: Any, high_bits: Any) -> None:
    """Write the codes of one row and unit; `at` is the row's lane of the first vector."""
    per_word = 32 // low_bits
    high_at = at + len(codes) // per_word * 64
    for i in range(len(codes)):
        code = np.int64(codes[i])
        shift = low_bits * (i % per_word)
        byte = at + i // per_word * 64 + shift // 8
        out[byte] |= (code & ((1 << low_bits) - 1)) << (shift % 8)
        if high_bits:
            shift = high_bits * i
            out[high_at + shift // 8] |= (code >> low_bits) << (shift % 8)


@njit
def _pack_pairs(codes: Any, out: Any, at: Any) -> None:
    """Write 64 codes 0..10 of one row as 32 pair codes."""
    for pair in range(32):
        code = np.int64(codes[2 * pair]) + 11 * np.int64(codes[2 * pair + 1])
        if pair < 28:
            out[at + pair // 4 * 64 + pair % 4] |= code
        else:
            for i in range(7):
                out[at + i * 64 + pair - 28] |= ((code >> i) & 1) << 7

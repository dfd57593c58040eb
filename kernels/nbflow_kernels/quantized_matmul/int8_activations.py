"""Int8 quantization of activations: 32 columns share a scale.

For 32 columns of a row, in float32: ``d = max|x| / 127``, and ``q = rint(x * (127 / max|x|))``,
halves to even, so that x is about d * q.  Where the largest magnitude is below 2 ** -100, d and all
q are 0; where a column is not finite, d is NaN, and so are the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.int8_blocks import quantize_block
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import allocate, release, write_f32, write_i64

COLUMNS = 32  # columns that share a scale
PADDING = 256  # columns are padded to a multiple: of the block of every format
ROWS = 8  # rows are padded to the longest register tile, which then needs no masks


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """Buffers of quantized activations with the sums that products need; K is padded."""

    n_rows: int
    """Rows in use; the arrays are padded to a multiple of `ROWS`."""
    codes: NDArray[np.int8]
    """(rows, K), 0 in padded columns."""
    scales: NDArray[np.float32]
    """(rows, K / 32)."""
    sums: NDArray[np.int32]
    """(rows, K / 32): sums of codes."""
    half_sums: NDArray[np.int32]
    """(rows, K / 16): sums of codes."""

    @classmethod
    def empty(cls, n_rows: int, n_columns: int) -> Int8Rows:
        """Return buffers of zeros for rows of `n_columns` columns.

        Examples
        --------
        >>> Int8Rows.empty(5, 100).codes.shape
        (8, 256)
        """
        rows, columns = -(-n_rows // ROWS) * ROWS, -(-n_columns // PADDING) * PADDING
        return cls(
            n_rows,
            np.zeros((rows, columns), np.int8),
            np.zeros((rows, columns // COLUMNS), np.float32),
            np.zeros((rows, columns // COLUMNS), np.int32),
            np.zeros((rows, columns // 16), np.int32),
        )

    @staticmethod
    def size(n_rows: int, n_columns: int) -> int:
        """Return the bytes that `empty` allocates.

        Examples
        --------
        >>> Int8Rows.size(5, 100) == Int8Rows.empty(5, 100).nbytes
        True
        """
        rows, columns = -(-n_rows // ROWS) * ROWS, -(-n_columns // PADDING) * PADDING
        return rows * (columns + 4 * (2 * columns // COLUMNS + columns // 16))

    def first(self, n_rows: int) -> Int8Rows:
        """Return a view of the first rows."""
        rows = -(-n_rows // ROWS) * ROWS
        return Int8Rows(
            n_rows, self.codes[:rows], self.scales[:rows], self.sums[:rows], self.half_sums[:rows]
        )

    def part(self, start: int, stop: int) -> Int8Rows:
        """Return a view of rows [start, stop).

        The arrays must have `ROWS` more rows than are in use: a register tile may read, and ignore,
        those behind the part.
        """
        return Int8Rows(
            stop - start, self.codes[start:], self.scales[start:], self.sums[start:],
            self.half_sums[start:],
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.codes, self.scales, self.sums, self.half_sums)
        return sum(array.nbytes for array in arrays)


def quantize_activations(x: NDArray[np.float32], out: Int8Rows) -> None:
    """Quantize rows of activations (T, K) into `out`, which has the same rows and columns."""
    parallel_for(_quantize, len(x), 4.0 * x.size, x, out.codes, out.scales, out.sums, out.half_sums)


@jit.kernel(unroll=False)
def _quantize(x, codes, scales, sums, half_sums, start, stop):
    """Quantize rows [start, stop)."""
    tail = allocate(4 * COLUMNS)
    for i in range(0, 4 * COLUMNS, 8):
        write_i64(tail + i, 0)
    n_columns = x.shape[1]
    for row in range(start, stop):
        to = simd.address(codes) + row * codes.strides[0]
        for b in range((n_columns + COLUMNS - 1) // COLUMNS):
            at = simd.address(x) + row * x.strides[0] + 4 * COLUMNS * b
            if COLUMNS * (b + 1) > n_columns:
                for i in range(n_columns - COLUMNS * b):
                    write_f32(tail + 4 * i, x[row, COLUMNS * b + i])
                at = tail
            scale, first, second = quantize_block(at, to + COLUMNS * b)
            scales[row, b] = scale
            sums[row, b] = first + second
            half_sums[row, 2 * b], half_sums[row, 2 * b + 1] = first, second
    release(tail)

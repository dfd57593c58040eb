"""Dequantization of tensors with separate scale tensors (FP8, MXFP4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.weight_file import Read, Span, TensorEntry

_CHUNK = 1 << 20  # elements whose scales are expanded at once
MXFP4_BLOCK = 32
"""Weights per scale."""


@dataclass(frozen=True)
class Scaled:
    """One tensor stored as two: FP8 or MXFP4 codes, and scales."""

    codes: TensorEntry
    """Codes, a matrix."""
    scales: TensorEntry
    """Scales, a matrix with a row for each row of blocks."""
    block: tuple[int, int]
    """Rows and columns per scale."""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        return self.codes, self.scales

    def values(self, read: Read, rows: Span, columns: Span) -> NDArray[np.float32]:
        """Return a rectangle of FP8 multiplied by its scales."""
        values = read(self.codes, rows, columns)
        per = self.block[0]
        first = rows[0] // per
        scales = read(self.scales, (first, -(-rows[1] // per)), None)
        at = rows[0] - first * per, columns[0]
        multiply_scales(values, scales.astype(np.float32, copy=False), self.block, at)
        return values

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return rows of MXFP4 as the blocks of `format`, columns in whole blocks."""
        codes = read(self.codes, rows, (columns[0] // 2, columns[1] // 2))
        each = columns[0] // format.block_size, columns[1] // format.block_size
        return mxfp4_blocks(codes, read(self.scales, rows, each))


def joined_parts(
    entries: Sequence[TensorEntry],
    join: Callable[[TensorEntry], TensorEntry],
    unused: Sequence[str] = (),
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join tensors with the others of their matrix; return those with values, and the rest.

    `join` returns the matrix whose codes a tensor holds, other tensors as they are; `unused` are
    names of more tensors of a matrix, after that of its module.
    """
    values, used = [], set()
    for entry in entries:
        joined = join(entry)
        values.append(joined)
        if joined.scaled is not None:
            used |= {part.name for part in joined.scaled.parts} - {joined.name}
            used |= {joined.name.removesuffix(".weight") + name for name in unused}
    names = {entry.name for entry in values if entry.scaled is not None}
    rest = [entry for entry in entries if entry.name in used - names]
    return [entry for entry in values if entry.name not in used], rest


def multiply_scales(
    values: NDArray[np.float32],
    scales: NDArray[np.float32],
    block: tuple[int, int],
    first: tuple[int, int],
) -> None:
    """Multiply a rectangle of a matrix by its scales, in place.

    `scales` (n, k) are those of the blocks of its rows, for all columns of the matrix; `block` has
    the rows and columns per scale.  `first` is the first row of the rectangle, relative to its
    first block, and the first column.
    """
    n_rows, n_columns = values.shape
    columns = (np.arange(n_columns) + first[1]) // block[1]
    if block[0] > 1:
        start = 0
        for i, factors in enumerate(scales):
            end = min((i + 1) * block[0] - first[0], n_rows)
            values[start:end] *= factors[columns]
            start = end
        return
    each = max(1, _CHUNK // max(1, n_columns))
    for start in range(0, n_rows, each):
        factors = scales[start : start + each]  # a single column is broadcast
        values[start : start + each] *= factors if scales.shape[1] == 1 else factors[:, columns]


def mxfp4_blocks(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of MXFP4 in blocks of 17 bytes (`nbflow_kernels.formats.ggml.mxfp4_nvfp4`).

    `codes` (N, K / 2) hold weight 2 i in the low nibble of byte i, 2 i + 1 in the high; `scales`
    (N, K / 32) the exponents of 32 weights, plus 127.  A block is a byte of `scales`, then 16 of
    codes: weight r of 32 in a low nibble, r + 16 in the high.

    Examples
    --------
    >>> import numpy as np
    >>> codes = np.arange(16, dtype=np.uint8)[None] * 17  # weights 0 0 1 1 2 2 ... 15 15
    >>> mxfp4_blocks(codes, np.array([[127]], np.uint8))[0, :4].tolist()
    [127, 128, 128, 145]
    """
    n_rows, n_blocks = scales.shape
    pairs = codes.reshape(n_rows, n_blocks, 2, 8)  # the bytes of weights 0..15, of 16..31
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    blocks = np.empty((n_rows, n_blocks, 17), np.uint8)
    blocks[:, :, 0] = scales
    blocks[:, :, 1::2] = (low & 15) | (high << 4)
    blocks[:, :, 2::2] = (low >> 4) | (high & 0xF0)
    return blocks.reshape(n_rows, 17 * n_blocks)

"""Groups of columns in any order (GPTQ's act-order): the order of columns that blocks need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.column_order import order_by_group
from nbflow_kernels.formats.grouped import BLOCK_SIZES, GroupFormat, group_format
from nbflow_kernels.formats.registry import QuantFormat

Span = tuple[int, int]


class StoredColumns(Protocol):
    """Storage of a matrix whose columns are reordered, padded or scaled."""

    def format(self, columns: Span) -> QuantFormat:
        """Return the format of a span of columns, as a rank holds it."""

    def n_stored(self, columns: Span) -> int:
        """Return the stored columns of a span, padding included."""

    def extra_bytes(self, columns: Span) -> int:
        """Return the bytes that a span needs besides its blocks."""


@dataclass(frozen=True)
class ColumnGroups:
    """Group of each column of a matrix; equal ones give equal orders and formats."""

    data: bytes = field(repr=False)
    """The groups, int32 (K,)."""
    n_groups: int
    bits: int
    """Bits per code."""
    scale_type: str
    """Stored type of the scales."""
    has_zeros: bool

    def of(self, columns: Span) -> NDArray[np.int32]:
        """Return the groups of a span of columns."""
        return np.frombuffer(self.data, np.int32)[slice(*columns)]

    @property
    def dtype(self) -> str:
        """Format of the whole matrix; f32 if none holds it."""
        if self.has_zeros and self.scale_type == "f32":  # see `GroupedStorage.format`
            return "f32"
        return self.format((0, len(self.data) // 4)).name

    def format(self, columns: Span) -> GroupFormat:
        """Return the format in which a span of columns takes the fewest bytes.

        A span that a rank holds has a part of each group, which is filled up to whole blocks.
        """
        scale = "f16" if self.scale_type == "f16" else "f32"
        formats = [group_format(self.bits, n, scale, self.has_zeros) for n in BLOCK_SIZES]
        return min(formats, key=lambda f: self._n_blocks(columns, f) * f.block_bytes)

    def n_stored(self, columns: Span) -> int:
        """Return the stored columns of a span, padding included."""
        format = self.format(columns)
        return self._n_blocks(columns, format) * format.block_size

    def extra_bytes(self, columns: Span) -> int:
        """Return the bytes of the order of a span of columns."""
        return 4 * self.n_stored(columns)

    def ordered(self, columns: Span) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the order of a span of columns, and the group of each block."""
        return order_by_group(self.of(columns), self.n_groups, self.format(columns).block_size)

    def _n_blocks(self, columns: Span, format: GroupFormat) -> int:
        counts = np.bincount(self.of(columns), minlength=self.n_groups)
        return int((-(-counts // format.block_size)).sum())

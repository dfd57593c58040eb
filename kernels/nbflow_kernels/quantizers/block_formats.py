"""Quantizers of formats with levels: codebooks and grids, by the published code or by search.

"search" starts from nothing and takes, block by block, the published bytes where they lose less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.block_format import CHUNK
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat

Encoder = Callable[[Floats, Floats | None, Floats], Bytes]
"""A function ``(x, importance, counts)`` to rows of bytes.  `x` is (rows, columns), `importance`
(1 or rows, columns) or None; `counts` (columns,) is 1, and 0 for padding."""


@dataclass(frozen=True)
class BlockQuantizer:
    """The two quantizers of one format; see `nbflow_kernels.quantizers.registry.Quantizer`."""

    reference: Encoder
    """The published one."""
    search: Encoder
    takes_importance: bool = True
    """Whether the published quantizer knows importance weights."""
    needs_importance: bool = False
    """Whether it cannot do without; equal ones are then taken where none are given."""

    def quantize_rows(
        self,
        format: QuantFormat,
        x: Floats,
        n_columns: int,
        encoder: str,
        importance: Floats | None = None,
    ) -> Bytes:
        """Return the bytes of each row of `x`; see `quantizers.registry.quantize_rows`."""
        if encoder == "plain" and importance is not None and not self.takes_importance:
            raise UsageError(
                f"encoder 'plain' of {format.name} is the published one, which knows no "
                "importance; use encoder='best'"
            )
        n_rows, width = x.shape
        counts = (np.arange(width) < n_columns).astype(np.float32)
        weight = None if importance is None else np.atleast_2d(importance) * counts
        if weight is not None and encoder == "best":
            weight = _scaled(weight)
        data = np.empty((n_rows, width // format.block_size * format.block_bytes), np.uint8)
        step = max(1, CHUNK // max(width, 1))
        for row in range(0, n_rows, step):
            part = x[row : row + step]
            own = weight if weight is None or len(weight) == 1 else weight[row : row + step]
            found = self._reference(part, own, counts)
            if encoder == "best":
                searched = self.search(part, own, counts)
                found = _better(format, part, weights(own, counts), searched, found)
            data[row : row + step] = found
        return data

    def _reference(self, x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
        """Return the published quantizer's bytes."""
        given = importance if self.takes_importance else None
        if given is None and self.needs_importance:
            given = counts[None]
        return self.reference(x, given, counts)


def _better(format: QuantFormat, x: Floats, weight: Floats, data: Bytes, other: Bytes) -> Bytes:
    """Return the blocks of `data`, or those of `other` where they lose less."""
    decoded, other_decoded = np.empty_like(x), np.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        format.dequantize_rows(data, decoded)
        format.dequantize_rows(other, other_decoded)
    parallel_for(
        _take_better, len(x), 8.0 * x.size, x, weight, decoded, other_decoded, data, other,
        format.block_size, format.block_bytes,
    )  # fmt: skip
    return data


def weights(importance: Floats | None, counts: Floats) -> Floats:
    """Return the weight of each squared error, (1 or rows, columns)."""
    return counts[None] if importance is None else importance


def _scaled(importance: Floats) -> Floats:
    """Return importance (1 or rows, columns), rows times a power of two that makes them about 1."""
    exponent = np.frexp(importance.max(axis=1, keepdims=True))[1]
    scaled: Floats = np.ldexp(importance, -exponent)
    return scaled


@jit.kernel
def _take_better(x, weight, decoded, other_decoded, data, other, block, block_bytes, start, stop):
    """Copy the blocks of `other` that lose less to `data`."""
    for row in range(start, stop):
        w = weight[min(row, len(weight) - 1)]
        for b in range(data.shape[1] // block_bytes):
            error, other_error = 0.0, 0.0
            for i in range(b * block, (b + 1) * block):
                error += np.float64(w[i]) * (np.float64(decoded[row, i]) - x[row, i]) ** 2
                other_error += (
                    np.float64(w[i]) * (np.float64(other_decoded[row, i]) - x[row, i]) ** 2
                )
            if not error <= other_error and other_error < np.inf:
                for i in range(b * block_bytes, (b + 1) * block_bytes):
                    data[row, i] = other[row, i]

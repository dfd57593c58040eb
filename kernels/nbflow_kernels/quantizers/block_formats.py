"""Quantizers of formats with a codebook or a grid: the published one and a search.

The search does not start from the published codes: of both results it takes, block by block, the
one with the smaller error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat


@dataclass(frozen=True)
class BlockQuantizer:
    """The two quantizers of one format."""

    reference: Callable[[Floats, Floats | None], Bytes]
    """The published quantizer: rows of weights and their importance, (1 or rows, columns)."""
    search: Callable[[Floats, Floats], Bytes]
    """The search: rows of weights and the weights of their squared errors."""
    takes_importance: bool = True
    """True if the published quantizer takes importance weights."""
    needs_importance: bool = False
    """True if the published quantizer requires them; all are 1 where none are given."""

    def quantize_chunk(
        self,
        format: QuantFormat,
        x: Floats,
        counts: Floats,
        quantizer: str,
        importance: Floats | None,
    ) -> Bytes:
        """Return the bytes of rows; `counts` (columns,) is 1, and 0 for padding."""
        if quantizer == "search" and importance is not None:
            importance = _scaled(importance)
        given = importance if self.takes_importance else None
        if given is None and self.needs_importance:
            given = counts[None]
        published = self.reference(x, given)
        if quantizer != "search":
            return published
        weight = counts[None] if importance is None else importance
        return _better(format, x, weight, self.search(x, weight), published)


def _better(format: QuantFormat, x: Floats, weight: Floats, data: Bytes, other: Bytes) -> Bytes:
    """Return the blocks of `data`, or of `other` where its error is smaller."""
    decoded, other_decoded = np.empty_like(x), np.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        format.dequantize_rows(data, decoded)
        format.dequantize_rows(other, other_decoded)
    parallel_for(
        _take_better, len(x), 8.0 * x.size, x, weight, decoded, other_decoded, data, other,
        format.block_size, format.block_bytes,
    )  # fmt: skip
    return data


def _scaled(importance: Floats) -> Floats:
    """Scale each row of importance by a power of two so that its largest is in [0.5, 1)."""
    exponent = np.frexp(importance.max(axis=1, keepdims=True))[1]
    scaled: Floats = np.ldexp(importance, -exponent)
    return scaled


@jit.kernel
def _take_better(x, weight, decoded, other_decoded, data, other, block, block_bytes, start, stop):
    """Copy the blocks of `other` with the smaller error to `data`."""
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

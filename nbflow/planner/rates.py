"""Measured times of kernels: matrix products by format and rows, and attention by cache format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kv_format

SUPER_BLOCK = 256
MAX_POINTS = 64
"""Most points of a measured curve."""


@dataclass(frozen=True)
class Rates:
    """Measured times of matrix products in one weight format and one arithmetic.

    Entry i of each list is the time with ``rows[i]`` rows of activations.  Kernels read ahead, so
    the memory and the arithmetic of a product overlap by an amount that only a measurement tells.
    """

    rows: tuple[float, ...]
    """Numbers of rows, ascending."""
    cached_s: tuple[float, ...]
    """Seconds per weight, read from the caches."""
    streamed_s: tuple[float, ...]
    """Seconds per weight, read from memory while all other ranks read, too."""
    streamed_alone_s: tuple[float, ...]
    """Seconds per weight, read from memory while no other rank reads."""

    def check(self, where: str) -> None:
        """Raise `UsageError` unless the lists belong together."""
        lengths = {len(self.rows), len(self.cached_s), len(self.streamed_s)}
        if lengths != {len(self.streamed_alone_s)} or not 1 <= len(self.rows) <= MAX_POINTS:
            raise UsageError(
                f"{where}: rows, cached_s, streamed_s and streamed_alone_s must have equally many "
                f"entries, 1 to {MAX_POINTS}"
            )
        _check_ascending(self.rows, f"{where}.rows")

    def seconds(self, weights: float, rows: float, cached: float, alone: bool) -> float:
        """Return the time of a product.

        Parameters
        ----------
        weights : float
            Number of weights.
        rows : float
            Rows of activations; between measured numbers the time lies on a straight line, and
            beyond the last one it is proportional to the rows.
        cached : float
            Share of the weights that is read from the caches, 0..1.
        alone : bool
            No other rank reads.
        """
        times = self.streamed_alone_s if alone else self.streamed_s
        mixed = [
            cached * c + (1.0 - cached) * max(c, m)
            for c, m in zip(self.cached_s, times, strict=True)
        ]
        beyond = max(1.0, rows / self.rows[-1])
        return weights * beyond * float(np.interp(rows, self.rows, mixed))

    def with_slower_memory(self, factor: float) -> Rates:
        """Return the times where reading memory takes longer by a factor."""
        together, alone = (
            tuple(s * factor for s in times) for times in (self.streamed_s, self.streamed_alone_s)
        )
        return Rates(self.rows, self.cached_s, together, alone)


@dataclass(frozen=True)
class CacheRates:
    """Measured times of keys, or values, in one cache format.

    A *row* is the key, or value, of one token and one head.
    """

    row_s: float
    """Seconds to read a row, without its elements."""
    element_s: float
    """Seconds to read an element."""
    write_s: float
    """Seconds to write an element of a new token."""

    def read_s(self, rows: float, head_dim: int) -> float:
        """Return the time to read rows of `head_dim` elements for attention."""
        return rows * (self.row_s + head_dim * self.element_s)


def like(format: str, measured: Iterable[str]) -> str:
    """Return the measured format most similar to another one; empty for none.

    Similar formats have blocks of one kind (floats, short blocks, super-blocks of 256); of these,
    the one with the nearest number of bits is chosen.

    Examples
    --------
    >>> like("q5_k", ["f16", "q8_0", "q4_0", "q4_k"])
    'q4_k'
    >>> like("q5_0", ["f16", "q8_0", "q4_0", "q4_k"])
    'q4_0'
    """

    def kind(name: str) -> int:
        size = nk.FORMATS[name].block_size
        return 0 if size == 1 else 1 if size < SUPER_BLOCK else 2

    bits = nk.FORMATS[format].bits_per_weight
    found = [name for name in measured if name in nk.FORMATS and kind(name) == kind(format)]
    return min(found, key=lambda name: abs(nk.FORMATS[name].bits_per_weight - bits), default="")


def cache_rates(format: str, measured: Mapping[str, CacheRates]) -> CacheRates:
    """Return the times of a cache format, of the one with the nearest bits if it is not measured.

    Examples
    --------
    >>> of = {name: CacheRates(n, n, n) for name, n in (("f16", 1.0), ("q4_0", 4.0))}
    >>> cache_rates("q5_0", of).row_s
    4.0
    """

    def distance(name: str) -> float:
        bits, wanted = (kv_format(n).bits_per_value(SUPER_BLOCK) for n in (name, format))
        return abs(bits - wanted)

    return measured[min(measured, key=distance)]


@dataclass(frozen=True)
class CacheCurve:
    """Share of the bytes of a step that the caches hold, by the bytes that the step reads.

    A step reads all its weights, one after the other, and the next step reads them again.  What
    fits into the caches is still there; of more, a part.
    """

    n_bytes: tuple[float, ...]
    """Bytes that each rank reads over and over, ascending."""
    share: tuple[float, ...]
    """Share read from the caches, 0..1, while all ranks read as much."""

    def check(self, where: str) -> None:
        """Raise `UsageError` unless the lists belong together."""
        if len(self.n_bytes) != len(self.share) or not 1 <= len(self.share) <= MAX_POINTS:
            raise UsageError(
                f"{where}: n_bytes and share must have equally many entries, 1 to {MAX_POINTS}"
            )
        if any(not 0 <= s <= 1 for s in self.share):
            raise UsageError(f"{where}.share must be 0..1, got {list(self.share)}")
        _check_ascending(self.n_bytes, f"{where}.n_bytes")

    def of(self, n_bytes: float) -> float:
        """Return the share for a step that reads `n_bytes`."""
        return float(np.interp(n_bytes, self.n_bytes, self.share))


def _check_ascending(numbers: tuple[float, ...], where: str) -> None:
    if any(b <= a for a, b in itertools.pairwise(numbers)):
        raise UsageError(f"{where} must ascend, got {list(numbers)}")

"""How the bytes of a block are put together from the whole numbers an encoder chooses.

CUDA kernels need to know where each bit goes; here that is read off the function that packs whole
arrays, so that a layout is written down once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.registry import Bytes

FIELD_BITS = 16
"""Most bits of a number."""


class Part(NamedTuple):
    """Numbers of one kind in a block, such as its codes."""

    n: int
    bits: int
    """Bits of a number that are stored, at most `FIELD_BITS`."""
    dtype: Any = np.uint8
    """What the function that packs takes."""


class BlockFields(NamedTuple):
    """The numbers of a block, in order, and what makes bytes of them."""

    parts: tuple[Part, ...]
    pack: Callable[..., Bytes]
    """Arrays (blocks, count), one for each part, to bytes (blocks, block bytes).  Each bit of the
    bytes must come from one bit of the numbers, or be constant."""

    @property
    def n_numbers(self) -> int:
        """How many numbers there are."""
        return sum(part.n for part in self.parts)


def bit_sources(fields: BlockFields) -> tuple[NDArray[np.int32], Bytes]:
    """Return where each bit of a block comes from, and the bytes of numbers that are all 0.

    Returns
    -------
    sources : array of int32, shape (block bytes * 8)
        ``16 * number + bit``, counted over all parts, or -1 for a bit that is constant.
    blank : array of uint8, shape (block bytes)
        The bits are those of this, turned around where the source is 1.

    Examples
    --------
    >>> import numpy as np
    >>> two = BlockFields((Part(2, 4),), lambda codes: codes[:, :1] | codes[:, 1:] << 4)
    >>> bit_sources(two)[0].tolist()
    [0, 1, 2, 3, 16, 17, 18, 19]
    """

    def packed(numbers: NDArray[np.int64]) -> Bytes:
        ends = np.cumsum([part.n for part in fields.parts])
        columns = np.split(numbers, ends[:-1], axis=1)
        given = [c.astype(p.dtype) for c, p in zip(columns, fields.parts, strict=True)]
        return fields.pack(*given).reshape(len(numbers), -1)

    blank = packed(np.zeros((1, fields.n_numbers), np.int64))[0]
    sources = np.full(8 * len(blank), -1, np.int32)
    for part, first in zip(fields.parts, _firsts(fields), strict=True):
        for bit in range(part.bits):
            ones = np.zeros((part.n, fields.n_numbers), np.int64)
            ones[np.arange(part.n), first + np.arange(part.n)] = 1 << bit
            turned = np.unpackbits(packed(ones) ^ blank, axis=1, bitorder="little")
            number, place = np.nonzero(turned)
            assert (sources[place] < 0).all(), "a bit of a block has two sources"
            sources[place] = FIELD_BITS * (first + number) + bit
    return sources, blank


def _firsts(fields: BlockFields) -> list[int]:
    counts = [part.n for part in fields.parts]
    return [sum(counts[:k]) for k in range(len(counts))]

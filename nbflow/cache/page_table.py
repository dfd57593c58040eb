"""Which pages of the key/value cache belong to which sequence.  Plain Python and index arrays.

Pages are numbered; every layer of every rank uses the same numbers.  The table grows the number of
pages when none is free: `n_pages` says how many the storage must have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class PageView:
    """The pages of a step's sequences, as FlashInfer's CSR triple and lengths."""

    kv_indptr: np.ndarray
    """int32 (B + 1,): where each sequence's pages begin in `kv_indices`."""
    kv_indices: np.ndarray
    """int32: page numbers, sequence after sequence."""
    kv_last_page_len: np.ndarray
    """int32 (B,): tokens in each sequence's last page, 1..page_size."""
    kv_lens: np.ndarray
    """int32 (B,): tokens of each sequence."""


class PageTable:
    """Pages of `page_size` tokens, given to sequences and taken back."""

    def __init__(self, page_size: int = 16) -> None:
        self.page_size = page_size
        self.n_pages = 0
        self._free: list[int] = []
        self._sequences: dict[int, _Sequence] = {}

    def add(self, sequence: int) -> None:
        """Begin an empty sequence."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is in the page table already")
        self._sequences[sequence] = _Sequence()

    def extend(self, sequence: int, n_tokens: int) -> None:
        """Make room for `n_tokens` more tokens of a sequence and count them in."""
        self.reserve(sequence, n_tokens)
        self._sequences[sequence].length += n_tokens

    def reserve(self, sequence: int, n_tokens: int) -> None:
        """Give a sequence the pages for `n_tokens` more tokens without counting these in."""
        entry = self._sequences[sequence]
        missing = -(-(entry.length + n_tokens) // self.page_size) - len(entry.pages)
        for _ in range(missing):
            if not self._free:
                self._grow()
            entry.pages.append(self._free.pop())

    def drop(self, sequence: int) -> None:
        """End a sequence; its pages become free."""
        self._free += reversed(self._sequences.pop(sequence).pages)

    def length(self, sequence: int) -> int:
        """Return the tokens of a sequence."""
        return self._sequences[sequence].length

    def view(self, sequences: Sequence[int]) -> PageView:
        """Return the pages of these sequences, in this order."""
        entries = [self._sequences[s] for s in sequences]
        indptr = np.zeros(len(entries) + 1, np.int32)
        np.cumsum([len(e.pages) for e in entries], out=indptr[1:])
        indices = np.array([p for e in entries for p in e.pages], np.int32)
        lengths = np.array([e.length for e in entries], np.int32)
        return PageView(indptr, indices, (lengths - 1) % self.page_size + 1, lengths)

    def _grow(self) -> None:
        """Add pages: half as many again, at least 16."""
        more = max(16, self.n_pages // 2)
        self._free += range(self.n_pages + more - 1, self.n_pages - 1, -1)
        self.n_pages += more

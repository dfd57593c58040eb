"""State table: rows of the recurrent states that belong to each sequence.

A model with recurrent layers keeps, per sequence, one row of every state array
(`nbflow.kv_cache.state_storage`), whatever the length of the sequence.  The state after a token
includes all tokens before, so that it cannot be truncated: `save` keeps a copy to return to.
For the prefix cache, `keep` keeps copies at page borders (snapshots), from which other sequences
start; the least recently used one makes room for a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

STATE_CHUNK = 32
"""Tokens that recurrent layers compute at once: prompts cut at multiples have the same results."""
ZEROS = -1
"""Source of a copy that clears a row."""


class StateTable:
    """Allocator of state rows for sequences, with room for `n_rows` at first.

    At most `n_snapshots` rows hold snapshots.
    """

    def __init__(self, n_rows: int = 0, n_snapshots: int = 0) -> None:
        self.n_snapshots = n_snapshots
        self.n_rows = 0
        """Number of rows that the storage must have."""
        self.most_used_rows = 0
        """Largest number of rows that were in use at once."""
        self._rows: dict[int, int] = {}  # by sequence
        self._saved: dict[int, tuple[int, int]] = {}  # by sequence: length and row
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # rows by key, LRU first
        self._free: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self.grow(n_rows)

    def grow(self, n_rows: int) -> None:
        """Grow to at least `n_rows` rows."""
        if n_rows > self.n_rows:
            self._free[:0] = range(n_rows - 1, self.n_rows - 1, -1)
            self.n_rows = n_rows

    def add(self, sequence: int, snapshot: bytes | None = None) -> None:
        """Give a sequence a row: of an empty one, or a copy of the snapshot with this key."""
        self._rows[sequence] = row = self._allocate()
        source = ZEROS
        if snapshot is not None:
            source = self._snapshots[snapshot]
            self._snapshots.move_to_end(snapshot)
        self._copies.append((source, row))

    def keep(self, sequence: int, snapshot: bytes) -> None:
        """Keep a copy of the state of a sequence under a key, unless there is one."""
        if snapshot in self._snapshots or not self.n_snapshots:
            return
        if len(self._snapshots) == self.n_snapshots:
            self._free.append(self._snapshots.popitem(last=False)[1])
        self._snapshots[snapshot] = row = self._allocate()
        self._copies.append((self._rows[sequence], row))

    def has_snapshot(self, snapshot: bytes) -> bool:
        """Return whether there is a snapshot with this key."""
        return snapshot in self._snapshots

    def drop_snapshot(self, snapshot: bytes) -> None:
        """Free the snapshot with this key, if there is one."""
        row = self._snapshots.pop(snapshot, None)
        if row is not None:
            self._free.append(row)

    def fork(self, sequence: int, new: int) -> None:
        """Give a new sequence a copy of the state of another one."""
        self._rows[new] = row = self._allocate()
        self._copies.append((self._rows[sequence], row))

    def drop(self, sequence: int) -> None:
        """Free the rows of a sequence."""
        self._forget(sequence)
        self._free.append(self._rows.pop(sequence))

    def save(self, sequence: int, length: int) -> None:
        """Keep a copy of the state of a sequence, which has `length` tokens, for `restore`."""
        self._forget(sequence)
        self._saved[sequence] = length, (row := self._allocate())
        self._copies.append((self._rows[sequence], row))

    def restore(self, sequence: int, length: int) -> int:
        """Return a sequence to its saved state, or to an empty one, of at most `length` tokens.

        Returns the number of tokens of that state; the tokens after them must be computed again.
        """
        saved, row = self._saved.get(sequence, (0, ZEROS))
        if saved > length:
            saved, row = 0, ZEROS
        self._copies.append((row, self._rows[sequence]))
        return saved

    def rows(self, sequences: Sequence[int]) -> np.ndarray:
        """Return the rows of sequences, int32 (B,)."""
        return np.array([self._rows[s] for s in sequences], np.int32)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (from, to) to make, in order, before the next step."""
        copies, self._copies = self._copies, []
        return copies

    def _forget(self, sequence: int) -> None:
        saved = self._saved.pop(sequence, None)
        if saved is not None:
            self._free.append(saved[1])

    def _allocate(self) -> int:
        if not self._free:
            self.grow(max(1, 2 * self.n_rows))
        row = self._free.pop()
        self.most_used_rows = max(self.most_used_rows, self.n_rows - len(self._free))
        return row

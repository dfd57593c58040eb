"""Storage of recurrent states: an array of rows for each recurrent op of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nbflow.kv_cache.state_table import ZEROS, StateTable
from nbflow.program.cost import FLOAT32_BYTES
from nbflow.program.records import StateKey


class StateStorage:
    """States of sequences, float32 (rows, state) for each recurrent op.

    Parameters
    ----------
    shapes : mapping
        Shape of the state of one sequence by op (`Program.states`).
    xp : module
        Array module: NumPy, or the allocator of a device.
    """

    def __init__(self, shapes: Mapping[StateKey, tuple[int, ...]], xp: Any = np) -> None:
        self._shapes, self._xp = shapes, xp
        self.arrays: dict[StateKey, Any] = {}
        """Array of each op."""
        self.n_rows = 0
        self.version = 0
        """Incremented on each reallocation."""
        self.row_bytes = FLOAT32_BYTES * sum(math.prod(shape) for shape in shapes.values())
        """Bytes of all states of one sequence."""
        self.release()

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_bytes

    def ensure(self, n_rows: int) -> None:
        """Grow to at least `n_rows` rows, keeping their contents."""
        if n_rows <= self.n_rows or not self._shapes:
            return
        self.version += 1
        for key, shape in self._shapes.items():
            new = self._xp.zeros((n_rows, *shape), np.float32)
            new[: self.n_rows] = self.arrays[key]
            self.arrays[key] = new
        self.n_rows = n_rows

    def release(self) -> None:
        """Free all rows."""
        for key, shape in self._shapes.items():
            self.arrays[key] = self._xp.zeros((0, *shape), np.float32)
        self.n_rows = 0
        self.version += 1

    def used_bytes(self, table: StateTable | None) -> int:
        """Return the bytes of the most rows that a table has used at once."""
        return 0 if table is None else table.most_used_rows * self.row_bytes

    def update(self, table: StateTable | None) -> None:
        """Make the rows and copies that the next step needs; nothing without recurrent layers."""
        if table is not None:
            self.ensure(table.n_rows)
            self.copy_rows(table.take_copies())

    def copy_rows(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy rows (from, to) in order; from `ZEROS` clears a row."""
        for source, target in pairs:
            for array in self.arrays.values():
                array[target] = 0.0 if source == ZEROS else array[source]

"""Storage of recurrent states: an array of rows for each recurrent op of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nbflow.kv_cache.state_table import ZEROS, StateTable
from nbflow.program.records import State, StateKey
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.state_format import state_array_shape, state_dtype


def with_state_format(spec: ModelSpec, format: str) -> ModelSpec:
    """Return the specification of a model whose recurrent states are stored in a format.

    Raises `UsageError` if the format is unknown.  Models without recurrent layers stay as they are.
    """
    state_dtype(format)
    return dataclasses.replace(spec, state_format=format) if spec.is_recurrent else spec


class StateStorage:
    """States of sequences, (rows, state) in its format for each recurrent op.

    Parameters
    ----------
    states : mapping
        State of one sequence by op (`Program.states`).
    xp : module
        Array module: NumPy, or the allocator of a device.
    """

    def __init__(self, states: Mapping[StateKey, State], xp: Any = np) -> None:
        self._states, self._xp = states, xp
        self.arrays: dict[StateKey, Any] = {}
        """Array of each op."""
        self.n_rows = 0
        self.version = 0
        """Incremented on each reallocation."""
        self.row_bytes = sum(state.n_bytes for state in states.values())
        """Bytes of all states of one sequence."""
        self.release()

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_bytes

    def ensure(self, n_rows: int) -> None:
        """Grow to at least `n_rows` rows, keeping their contents."""
        if n_rows <= self.n_rows or not self._states:
            return
        self.version += 1
        for key in self._states:
            new = self._zeros(key, n_rows)
            new[: self.n_rows] = self.arrays[key]
            self.arrays[key] = new
        self.n_rows = n_rows

    def release(self) -> None:
        """Free all rows."""
        for key in self._states:
            self.arrays[key] = self._zeros(key, 0)
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
                array[target] = 0 if source == ZEROS else array[source]

    def _zeros(self, key: StateKey, n_rows: int) -> Any:
        state = self._states[key]
        dtype = state_dtype(state.format)
        return self._xp.zeros((n_rows, *state_array_shape(state.shape, dtype)), dtype)

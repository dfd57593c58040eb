"""Check of the sequences of a ragged batch and of their rows in an array of states."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_ids, check_indptr, is_cuda
from nbflow_kernels.errors import UsageError


def check_sequences(indptr: Any, state_indices: Any, n_rows: int, n_states: int) -> None:
    """Raise unless `indptr` divides `n_rows` rows into sequences that have states of their own.

    Values on a device are not checked: it would wait.

    Raises
    ------
    UsageError
        If `indptr` does not rise from 0 to `n_rows`, or a sequence with rows has an index outside
        ``0..n_states - 1`` or that of another one.
    TypeError
        If one of them is not an int32 array.
    """
    check_array("indptr", indptr, (None,), np.int32)
    check_array("state_indices", state_indices, (max(len(indptr) - 1, 0),), np.int32)
    if is_cuda(indptr):
        return
    check_indptr("indptr", indptr, end=("the rows of the batch", n_rows))
    used = state_indices[indptr[1:] > indptr[:-1]]
    check_ids("state_indices", used, n_states, "the rows of state")
    if len(np.unique(used)) < len(used):
        raise UsageError(
            "state_indices must differ: two sequences cannot update one state, got "
            f"{state_indices.tolist()}"
        )

"""Checks of ragged batches with a pool of states."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_indptr, check_range, is_cuda
from nbflow_kernels.errors import UsageError


def check_batch(indptr: Any, state_indices: Any, n_rows: int, n_states: int) -> None:
    """Raise unless `indptr` divides the rows among sequences with different states of the pool.

    Values in device memory are not checked: it would wait for the device.
    """
    check_array("indptr", indptr, (None,), np.int32)
    check_array("state_indices", state_indices, (max(len(indptr) - 1, 0),), np.int32)
    if is_cuda(indptr):
        return
    check_indptr("indptr", indptr, end=("the number of rows of the input", n_rows))
    check_range("state_indices must be in {}, rows of state", state_indices, n_states)
    if len(np.unique(state_indices)) < len(state_indices):
        raise UsageError(
            "state_indices must differ, as each sequence updates its state; "
            f"got {state_indices.tolist()}"
        )


def check_log_decays(name: str, values: Any, sign: int) -> None:
    """Raise if a decay grows: ``sign * values`` above 0; not checked in device memory."""
    if not is_cuda(values) and values.size and (sign * values).max() > 0:
        wanted = "negative or 0" if sign > 0 else "positive or 0"
        worst = values.max() if sign > 0 else values.min()
        raise UsageError(f"{name} must be {wanted}, so that states decay, got {worst}")

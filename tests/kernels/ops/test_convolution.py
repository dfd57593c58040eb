"""Causal convolution: division into calls, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_calls_with_parts_of_a_sequence_give_the_bits_of_one_call(rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((11, 20), np.float32), rng.standard_normal((20, 4), np.float32)
    whole, parts = np.zeros((1, 20, 3), np.float32), np.zeros((2, 20, 3), np.float32)
    expected = nk.causal_conv1d(x, weight, None, whole, _ints(0, 11), _ints(0), "silu")
    for begin, end in ((0, 2), (2, 3), (3, 11)):
        rows = x[begin:end]
        n = end - begin
        found = nk.causal_conv1d(rows, weight, None, parts, _ints(0, 0, n), _ints(0, 1), "silu")
        assert np.array_equal(found, expected[begin:end])
    assert np.array_equal(parts[1], whole[0])
    assert not parts[0].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": np.zeros((4, 9), np.float32)}, "K 2..8"),
        ({"state": np.zeros((2, 4, 3), np.float32)}, "state must have shape"),
        ({"indptr": _ints(0, 2, 4)}, "must end at the rows of the batch, 3"),
        ({"state_indices": _ints(0, 2)}, r"state_indices must be in 0\.\.1"),
        ({"state_indices": _ints(1, 1)}, "two sequences cannot update one state"),
        ({"activation": "gelu"}, "unknown activation 'gelu'"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "x": np.zeros((3, 4), np.float32), "weight": np.zeros((4, 3), np.float32), "bias": None,
        "state": np.zeros((2, 4, 2), np.float32), "indptr": _ints(0, 2, 3),
        "state_indices": _ints(0, 1),
    }  # fmt: skip
    nk.causal_conv1d(**arguments)
    with pytest.raises(UsageError, match=message):
        nk.causal_conv1d(**arguments | changes)


def test_out_that_overlaps_the_input_is_refused() -> None:
    x = np.zeros((3, 4), np.float32)
    state = np.zeros((1, 4, 1), np.float32)
    weight = np.zeros((4, 2), np.float32)
    with pytest.raises(UsageError, match="out must not overlap x"):
        nk.causal_conv1d(x, weight, None, state, _ints(0, 3), _ints(0), out=x)

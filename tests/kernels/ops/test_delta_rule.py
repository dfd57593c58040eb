"""The gated delta rule: the published definition, division into calls, forms, refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.delta_rule import loops, reference
from nbflow_kernels.delta_rule.cpu import CHUNK, divide
from nbflow_kernels.errors import UsageError


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _inputs(rng: np.random.Generator, T: int, per_channel: bool = False) -> dict[str, np.ndarray]:
    """One head of queries and keys, two of values; Dk is 20 and Dv 32."""
    return {
        "q": rng.standard_normal((T, 1, 20), np.float32),
        "k": rng.standard_normal((T, 1, 20), np.float32),
        "v": rng.standard_normal((T, 2, 32), np.float32),
        "g": -rng.random((T, 2, 20) if per_channel else (T, 2), np.float32),
        "beta": rng.random((T, 2), np.float32),
    }


def _in_calls(
    inputs: dict[str, np.ndarray], borders: list[int], dtype: str = "float32", **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of a sequence divided among calls, and its last state."""
    state, outputs = np.zeros((2, 2, 20, 32), dtype), []
    for begin, end in pairwise(borders):
        rows = {name: a[begin:end] for name, a in inputs.items()}
        outputs.append(
            nk.gated_delta_rule(
                **rows, state=state, indptr=_ints(0, 0, end - begin), state_indices=_ints(1, 1),
                start_positions=_ints(0, begin), normalize_qk=True, **options,
            )
        )  # fmt: skip
    assert not state[0].any()
    return np.concatenate(outputs), state[1]


def test_calls_that_end_at_chunk_borders_give_the_bits_of_one_call(
    rng: np.random.Generator,
) -> None:
    inputs = _inputs(rng, 2 * CHUNK + 5)
    whole = _in_calls(inputs, [0, 2 * CHUNK + 5])
    for borders in ([0, CHUNK, 2 * CHUNK + 5], [0, 2 * CHUNK, 2 * CHUNK + 2, 2 * CHUNK + 5]):
        for expected, found in zip(whole, _in_calls(inputs, borders), strict=True):
            assert np.array_equal(expected, found)


def test_steps_give_the_same_bits_for_any_division(rng: np.random.Generator) -> None:
    inputs = _inputs(rng, CHUNK + 3, per_channel=True)
    T = CHUNK + 3
    whole = _in_calls(inputs, [0, T], chunked=False)
    for borders in ([0, 1, 2, 7, T], list(range(T + 1))):
        for expected, found in zip(whole, _in_calls(inputs, borders, chunked=False), strict=True):
            assert np.array_equal(expected, found)
    chunks = _in_calls(inputs, [0, T])
    assert not np.array_equal(whole[0], chunks[0])
    np.testing.assert_allclose(whole[0], chunks[0], atol=1e-5)


def test_a_sequence_has_the_same_bits_in_any_batch(rng: np.random.Generator) -> None:
    inputs = _inputs(rng, 30)
    state = rng.standard_normal((3, 2, 20, 32), np.float32)
    alone, together = state.copy(), state.copy()
    rows = {name: a[4:21] for name, a in inputs.items()}
    expected = nk.gated_delta_rule(**rows, state=alone, indptr=_ints(0, 17), state_indices=_ints(2))
    found = nk.gated_delta_rule(
        **inputs, state=together, indptr=_ints(0, 4, 21, 30), state_indices=_ints(0, 2, 1)
    )
    assert np.array_equal(expected, found[4:21])
    assert np.array_equal(alone[2], together[2])


# Printed by torch_recurrent_gated_delta_rule and torch_chunk_gated_delta_rule of transformers
# (Qwen3-Next), which agree to these digits.
OUTPUT = (
    0.4975, 0.37695, 0.53949, 0.56359, -0.0216, 0.41434, 0.23988, -0.08142, -0.52351, -0.27783,
    0.10693, -0.16893, 0.15195, 0.14927, -0.2107, 0.03368, 0.18539, 0.03301, 0.00163, -0.03056,
    0.1417, -0.10991, -0.07943, 0.0574, -0.08813, -0.14817, -0.12879, 0.1809, -0.28993, 0.16457,
)  # fmt: skip
STATE = (
    0.60929, -0.41115, 0.51865, -0.19189, -0.37624, -0.20352, 0.54505, -0.25285, 0.49058, 0.756,
    -0.6515, 0.50266, 0.59783, -0.62875, 0.85017, 0.24807, -0.9021, 0.51787, -0.10937, 0.3053,
    0.08035, 0.90782, -0.50172, 0.8824,
)  # fmt: skip


def test_definition_is_that_of_qwen3_next() -> None:
    rng = np.random.default_rng(12)

    def sixteenths(*shape: int) -> np.ndarray:
        return (rng.integers(-32, 33, shape) / 16).astype(np.float32)

    q, k, v = sixteenths(5, 1, 4), sixteenths(5, 1, 4), sixteenths(5, 2, 3)
    g, beta = -np.abs(sixteenths(5, 2)) / 2, np.abs(sixteenths(5, 2)) / 2
    state = sixteenths(1, 2, 4, 3)
    for function in (reference.gated_delta_rule, nk.gated_delta_rule):
        updated = state.copy()
        found = function(q, k, v, g, beta, updated, _ints(0, 5), _ints(0), normalize_qk=True)
        np.testing.assert_allclose(found.ravel(), OUTPUT, atol=6e-6)  # printed to 5 digits
        np.testing.assert_allclose(updated.ravel(), STATE, atol=6e-6)


def test_chunked_loops_equal_the_steps_of_the_reference(rng: np.random.Generator) -> None:
    inputs = {name: a.astype(float) for name, a in _inputs(rng, CHUNK, per_channel=True).items()}
    inputs["k"] /= 5.0
    state = rng.standard_normal((1, 2, 20, 32))
    by_chunk = state.copy()
    expected = reference.gated_delta_rule(
        **inputs, state=state, indptr=_ints(0, CHUNK), state_indices=_ints(0), scale=1.0
    )
    for h in range(2):
        found = loops.chunk(
            inputs["q"][:, 0], inputs["k"][:, 0], inputs["v"][:, h], np.exp(inputs["g"][:, h]),
            inputs["beta"][:, h], by_chunk[0, h],
        )  # fmt: skip
        np.testing.assert_allclose(found, expected[:, h], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_chunk, state, rtol=1e-12, atol=1e-12)


def test_infinite_decay_forgets_and_nan_spreads(rng: np.random.Generator) -> None:
    inputs = _inputs(rng, CHUNK)
    inputs["g"][3, 0] = -np.inf
    state = np.full((1, 2, 20, 32), 1e30, np.float32)
    found = nk.gated_delta_rule(
        **inputs, state=state, indptr=_ints(0, CHUNK), state_indices=_ints(0), normalize_qk=True
    )
    assert (np.abs(found[3:, 0]) < 100).all()
    inputs["g"][5, 1] = np.nan
    found = nk.gated_delta_rule(
        **inputs, state=state, indptr=_ints(0, CHUNK), state_indices=_ints(0), normalize_qk=True
    )
    assert np.isnan(found[5:, 1]).all()


@pytest.mark.parametrize(("Hk", "Hv", "Dv"), [(16, 32, 128), (1, 1, 128), (1, 2, 20), (1, 3, 1000)])
def test_parts_cover_heads_and_columns(Hk: int, Hv: int, Dv: int) -> None:
    for share in (False, True):
        heads, n_parts, columns = divide(Hk, Hv, Dv, share)
        assert Hv % heads == 0
        assert heads == 1 or (share and heads == Hv // Hk)
        assert (n_parts - 1) * columns < Dv <= n_parts * columns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": np.zeros((3, 3, 4), np.float32)}, "Hv a multiple of Hk"),
        ({"g": np.zeros((3, 4, 9), np.float32)}, "g must have shape"),
        ({"state": np.zeros((2, 4, 4, 8), np.float32)}, "state must have shape"),
        ({"state": np.zeros((2, 4, 8, 4), np.float64)}, "float32 or float16 or uint16 or uint8"),
        ({"indptr": _ints(0, 2, 4)}, "must end at the rows of the batch, 3"),
        ({"state_indices": _ints(0, 2)}, r"state_indices must be in 0\.\.1"),
        ({"state_indices": _ints(1, 1)}, "two sequences cannot update one state"),
        ({"start_positions": _ints(0, -1)}, "must not be negative, got -1"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "q": np.zeros((3, 2, 8), np.float32), "k": np.zeros((3, 2, 8), np.float32),
        "v": np.zeros((3, 4, 4), np.float32), "g": np.zeros((3, 4), np.float32),
        "beta": np.zeros((3, 4), np.float32), "state": np.zeros((2, 4, 8, 4), np.float32),
        "indptr": _ints(0, 2, 3), "state_indices": _ints(0, 1),
    }  # fmt: skip
    nk.gated_delta_rule(**arguments)
    with pytest.raises((UsageError, TypeError), match=message):
        nk.gated_delta_rule(**arguments | changes)
    with pytest.raises(UsageError, match="out must not overlap v"):
        nk.gated_delta_rule(**arguments, out=arguments["v"])

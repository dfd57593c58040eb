"""State-space layers and linear attention: transformers' results, invariances, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.op_registry import all_cases
from nbflow_kernels.state_space import cpu_chunks, reference
from nbflow_kernels.testing import checks

GOLDEN = Path(__file__).parents[2] / "golden" / "recurrent_ops.npz"
Arrays = dict[str, Any]


def golden(op: str) -> Arrays:
    with np.load(GOLDEN) as stored:
        found = {k.partition(".")[2]: stored[k] for k in stored if k.startswith(op + ".")}
    return {k: np.ascontiguousarray(v) for k, v in found.items()}


def one(T: int) -> Arrays:
    return {"indptr": np.array([0, T], np.int32), "state_indices": np.array([1], np.int32)}


def test_mamba2_gives_what_transformers_gives() -> None:
    g = golden("mamba2")
    y, end, start = g.pop("y"), g.pop("end"), g.pop("start")
    state = np.stack([start, start])
    found = nk.mamba2_scan(**g, state=state, **one(len(y)), dt_limits=(0.05, 0.8))
    # torch's float32 sums over 8 tokens and the states between: 1e-6 each of sums below 20
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(state[1], end, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state[0], start)


def test_mamba1_gives_what_transformers_gives() -> None:
    g = golden("mamba1")
    y, end = g.pop("y"), g.pop("end")
    state = np.zeros((2, *end.shape), np.float32)
    found = nk.mamba1_scan(**g, state=state, **one(len(y)))
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=5e-6)  # 9 steps of a few 1e-7
    np.testing.assert_allclose(state[1], end, rtol=1e-5, atol=5e-6)


def test_lightning_attention_gives_what_transformers_gives() -> None:
    g = golden("lightning")
    y, end = g.pop("y"), g.pop("end")
    state = np.zeros((2, *end.shape), np.float32)
    found = nk.lightning_attention(**g, state=state, **one(len(y)))
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=5e-6)  # 11 steps of a few 1e-7
    np.testing.assert_allclose(state[1], end, rtol=1e-5, atol=5e-6)


def test_gated_norms_and_xielu_give_what_transformers_gives() -> None:
    g = golden("norms")
    x, gate, weight = (g[name] for name in ("x", "gate", "weight"))
    first = nk.gated_rmsnorm(x, gate, weight, 1e-5, group_size=4, gate_first=True)
    np.testing.assert_allclose(first, g["gate_first"], rtol=3e-6, atol=1e-7)  # a few roundings
    last = nk.gated_rmsnorm(x, gate, weight, 1e-5)
    np.testing.assert_allclose(last, g["norm_first"], rtol=3e-6, atol=1e-7)
    over = gate.copy()
    assert nk.gated_rmsnorm(x, over, weight, 1e-5, over) is over
    np.testing.assert_array_equal(over, last)
    g = golden("xielu")
    np.testing.assert_allclose(nk.xielu(g["x"], 0.6, 0.9), g["y"], rtol=1e-6, atol=1e-6)


CHUNKED = ("mamba2_scan-chunks_and_steps", "lightning_attention-chunks_and_steps")
OTHERS = ("mamba2_scan-steps", "mamba1_scan-ragged", "lightning_attention-steps")


def inputs_of(case: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    found = next(c for c in all_cases() if c.id == case)
    return getattr(nk, found.op), checks.make_inputs(found)


def rows(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Return the arguments with rows [start, stop) of those that have a row per token."""
    per_token = ("x", "dt", "b", "c", "q", "k", "v")
    return {k: v[start:stop] if k in per_token else v for k, v in inputs.items()}


@pytest.mark.parametrize("case", [*CHUNKED, *OTHERS])
def test_a_sequence_does_not_depend_on_its_neighbours(case: str) -> None:
    op, inputs = inputs_of(case)
    alone, before = inputs["state"].copy(), inputs["state"].copy()
    y = op(**inputs)
    for s, index in enumerate(inputs["state_indices"]):
        start, stop = inputs["indptr"][s : s + 2]
        given = rows(inputs, start, stop) | {
            "state": alone, "indptr": np.array([0, stop - start], np.int32),
            "state_indices": np.array([index], np.int32),
        }  # fmt: skip
        np.testing.assert_array_equal(op(**given), y[start:stop])
    np.testing.assert_array_equal(alone, inputs["state"])
    untouched = np.setdiff1d(np.arange(len(before)), inputs["state_indices"])
    np.testing.assert_array_equal(inputs["state"][untouched], before[untouched])


def in_pieces(case: str, ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return results and states of the first sequence of a case, cut at `ends`."""
    op, inputs = inputs_of(case)
    y, start = [], 0
    for end in ends:
        given = {"indptr": np.array([0, end - start], np.int32)}
        given["state_indices"] = inputs["state_indices"][:1]
        y.append(op(**(rows(inputs, start, end) | given)))
        start = end
    return np.concatenate(y), inputs["state"]


@pytest.mark.parametrize("case", CHUNKED)
def test_pieces_of_a_prompt_at_multiples_of_a_chunk_have_its_bits(case: str) -> None:
    assert cpu_chunks.CHUNK == 32
    whole = in_pieces(case, [66])
    for ends in ([32, 66], [64, 65, 66]):
        for found, wanted in zip(in_pieces(case, ends), whole, strict=True):
            np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(in_pieces(case, [7, 40, 66]), whole, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=4e-6, atol=2.4e-5)  # twice the cases'


def test_pieces_of_a_prompt_have_its_bits_in_mamba1() -> None:
    for found, wanted in zip(
        in_pieces("mamba1_scan-two_blocks", [2, 3, 7]),
        in_pieces("mamba1_scan-two_blocks", [7]),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)


def test_a_decay_to_nothing_within_a_chunk_costs_no_accuracy() -> None:
    """Log decays are summed over a chunk: a step of 1e4 must not swallow its neighbours."""
    op, inputs = inputs_of("mamba2_scan-whole_chunks")
    inputs["dt"][5] = 1e4
    wanted = reference.mamba2_scan(**inputs | {"state": inputs["state"].astype(np.float64)})
    error = np.abs(op(**inputs) - wanted).max(axis=(1, 2))
    assert (error <= 1e-5 * np.abs(wanted).max(axis=(1, 2))).all()


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: inputs | {name: value(inputs[name])}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("mamba2_scan-steps", changed("a", lambda a: -a), "a must be negative or 0"),
        ("mamba2_scan-steps", changed("indptr", lambda a: a[:-1]), "state_indices must have shape"),
        ("mamba2_scan-steps", changed("indptr", lambda a: a - a), "indptr must end at the rows"),
        ("mamba2_scan-steps", changed("state_indices", lambda a: a * 0), "indices must differ"),
        (
            "mamba2_scan-steps",
            changed("state_indices", lambda a: a + 9),
            r"indices must be in 0\.\.5",
        ),
        ("mamba2_scan-limits", changed("dt_limits", lambda a: a[::-1]), "dt_limits must be"),
        ("mamba2_scan-steps", changed("x", lambda a: a[:, :3].copy()), "the 3 heads, got 2"),
        ("mamba1_scan-ragged", changed("b", lambda a: a[:, 1:]), "c must have shape"),
        ("lightning_attention-steps", changed("slopes", lambda a: -a), "slopes must be positive"),
        ("lightning_attention-steps", lambda i: i | {"out": i["v"]}, "out must not overlap"),
    ],
)
def test_wrong_arguments_are_refused(case: str, change: Any, message: str) -> None:
    op, inputs = inputs_of(case)
    with pytest.raises(UsageError, match=message):
        op(**change(inputs))


def test_other_arguments_are_refused() -> None:
    op, inputs = inputs_of("mamba2_scan-steps")
    with pytest.raises(TypeError, match=r"state must have dtype float32 or .*, got float64"):
        op(**inputs | {"state": inputs["state"].astype(np.float64)})
    with pytest.raises(UsageError, match=r"rows of 22 bytes \(20 numbers in q8_0"):
        op(**inputs | {"state": inputs["state"].astype(np.uint8)})
    x = np.zeros((1, 12), np.float32)
    with pytest.raises(UsageError, match="group_size must divide the 12 columns of x, got 5"):
        nk.gated_rmsnorm(x, x, x[0], group_size=5)
    with pytest.raises(UsageError, match="unknown activation 'tanh'"):
        nk.gated_rmsnorm(x, x, x[0], activation="tanh")

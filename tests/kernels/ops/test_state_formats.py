"""Formats of recurrent states: bytes, and kernels that round where their forms end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.errors import UsageError
from nbflow_kernels.state_format import (
    Q8_0,
    STATE_FORMATS,
    cpu,
    decode_state,
    encode_state,
    round_state,
    state_array_shape,
    state_bytes,
    state_dtype,
)

NARROW = ("f16", "bf16", "q8_0")


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def delta_rule(rng: np.random.Generator, T: int) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    rows = {"q": normal(rng, T, 1, 20), "k": normal(rng, T, 1, 20), "v": normal(rng, T, 2, 72)}
    rows |= {"g": -rng.random((T, 2), np.float32), "beta": rng.random((T, 2), np.float32)}
    return nk.gated_delta_rule, {"rows": rows, "normalize_qk": True}, (2, 20, 72)


def mamba2(rng: np.random.Generator, T: int) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    rows = {"x": normal(rng, T, 2, 20), "dt": normal(rng, T, 2)}
    rows |= {"b": normal(rng, T, 1, 40), "c": normal(rng, T, 1, 40)}
    a = np.array([-0.5, -2.0], np.float32)
    return nk.mamba2_scan, {"rows": rows, "a": a}, (2, 20, 40)


def mamba1(rng: np.random.Generator, T: int) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    rows = {"x": normal(rng, T, 18), "dt": normal(rng, T, 18)}
    rows |= {"b": normal(rng, T, 16), "c": normal(rng, T, 16)}
    return nk.mamba1_scan, {"rows": rows, "a": -rng.random((18, 16), np.float32)}, (18, 16)


def lightning(rng: np.random.Generator, T: int) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    rows = {name: normal(rng, T, 2, 40) for name in "qkv"}
    slopes = np.array([0.1, 1.0], np.float32)
    return nk.lightning_attention, {"rows": rows, "slopes": slopes}, (2, 40, 40)


def convolution(rng: np.random.Generator, T: int) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    taps = {"weight": normal(rng, 20, 4), "bias": None}
    return nk.causal_conv1d, {"rows": {"x": normal(rng, T, 20)}, **taps}, (20, 3)


CASES = [
    (op, format)
    for op in (delta_rule, mamba2, mamba1, lightning, convolution)
    for format in NARROW
    if (op, format) != (convolution, "q8_0")
]
CHUNK = {delta_rule: 8, mamba2: 32, mamba1: 1, lightning: 32, convolution: 1}
"""Tokens of the chunked form."""


def in_calls(
    make: Callable[..., Any], state: Any, borders: list[int], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of a sequence divided among calls, and its last state."""
    op, given, _ = make(np.random.default_rng(5), borders[-1])
    rows, outputs = given.pop("rows"), []
    state = np.stack([state, state])
    for begin, end in pairwise(borders):
        arguments = {name: a[begin:end] for name, a in rows.items()} | given | options
        if make is delta_rule:
            arguments["start_positions"] = np.array([begin], np.int32)
        indptr, index = np.array([0, end - begin], np.int32), np.array([1], np.int32)
        outputs.append(op(**arguments, state=state, indptr=indptr, state_indices=index))
    return np.concatenate(outputs), state[1]


@pytest.mark.parametrize(("make", "format"), CASES)
def test_a_step_and_a_chunk_are_those_of_float32_rounded_once(
    make: Callable[..., Any], format: str, rng: np.random.Generator
) -> None:
    dtype, shape = state_dtype(format), make(rng, 1)[2]
    stored = encode_state(2.0 * normal(rng, *shape), dtype)
    for T in {1, CHUNK[make]}:
        found = in_calls(make, stored, [0, T])
        y, state = in_calls(make, np.array(decode_state(stored, shape[-1]), np.float32), [0, T])
        np.testing.assert_array_equal(found[0], y)
        np.testing.assert_array_equal(found[1], encode_state(state, dtype))


@pytest.mark.parametrize(("make", "format"), CASES)
def test_bits_do_not_depend_on_calls_that_end_with_chunks(
    make: Callable[..., Any], format: str, rng: np.random.Generator
) -> None:
    n = CHUNK[make]
    state = encode_state(normal(rng, *make(rng, 1)[2]), state_dtype(format))
    whole = in_calls(make, state, [0, 2 * n + 3])
    for borders in ([0, n, 2 * n + 3], [0, 2 * n, 2 * n + 1, 2 * n + 2, 2 * n + 3]):
        for found, wanted in zip(in_calls(make, state, borders), whole, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_steps_of_the_delta_rule_round_after_each_token(rng: np.random.Generator) -> None:
    state = encode_state(normal(rng, 2, 20, 72), np.uint8)
    whole = in_calls(delta_rule, state, [0, 11], chunked=False)
    single = in_calls(delta_rule, state, list(range(12)))
    for found, wanted in zip(whole, single, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("format", NARROW)
def test_nan_spreads_and_zeros_stay(format: str) -> None:
    dtype = state_dtype(format)
    zeros = encode_state(np.zeros((2, 20, 72), np.float32), dtype)
    assert not zeros.view(np.uint8).any()
    op, given, _ = delta_rule(np.random.default_rng(1), 1)
    rows = given.pop("rows")
    rows["v"][0, 1, 40] = np.nan
    state, one = zeros[None], np.array([0], np.int32)
    op(**rows, **given, state=state, indptr=np.array([0, 1], np.int32), state_indices=one)
    numbers = decode_state(state[0], 72)
    assert np.isnan(numbers[1, :, 40]).all()  # q8_0: with the other numbers of the block
    assert np.isfinite(numbers[0]).all()
    assert np.isfinite(numbers[1, :, :32]).all()


def test_bytes_of_q8_0() -> None:
    values = np.zeros((1, 40), np.float32)
    values[0, :4] = 127.0, -63.4, 0.5, 1.5  # a scale of 1; halves to even
    values[0, 32:34] = -1e-3, 2e-3
    stored = encode_state(values, np.uint8)
    assert stored.shape == state_array_shape((1, 40), np.uint8) == (1, 44)
    assert stored[0, :6].tolist() == [0x00, 0x3C, 127, 256 - 63, 0, 2]
    scale = np.float16(2e-3 / 127)
    assert stored[0, 34:36].tolist() == list(np.array(scale).tobytes())
    assert decode_state(stored, 40)[0, 33] == np.float32(scale) * 127
    big = encode_state(np.full((1, 3), np.inf, np.float32), np.uint8)
    assert np.isnan(decode_state(big, 3)).all()


@pytest.mark.parametrize("format", STATE_FORMATS)
def test_rounding_twice_is_rounding_once(format: str, rng: np.random.Generator) -> None:
    once = round_state(normal(rng, 3, 70), state_dtype(format))
    np.testing.assert_array_equal(round_state(once, state_dtype(format)), once)


def test_bfloat16_states_are_rounded_to_nearest() -> None:
    values = np.array([1.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8 - 2.0**-20])
    expected = [1.0, 1.0, 1.0 + 2.0**-6, -1.0 - 2.0**-7]
    assert decode_state(encode_state(values, np.uint16), 4).tolist() == expected


def test_names_and_sizes() -> None:
    assert [state_bytes((2, 64), f) for f in STATE_FORMATS] == [512, 256, 256, 136]
    with pytest.raises(UsageError, match=r"unknown state 'q4_0'.*q8_0"):
        state_dtype("q4_0")


@jit.kernel
def _both_stores(x, n, together, one_by_one, scratch, start, stop):  # type: ignore[no-untyped-def]
    """Store the first `n` of 32 columns of 16 rows as blocks of q8_0, in both ways."""
    step, narrow = together.shape[1], simd.address(scratch)
    cpu.store_blocks(simd.address(together), step, 16, n, simd.address(x), narrow)
    for row in range(16):
        at = simd.address(x) + 128 * row
        cpu.store(
            simd.address(one_by_one) + step * row, Q8_0, 0, n, simd.load_f32(at),
            simd.load_f32(at + 64), narrow,
        )  # fmt: skip


@pytest.mark.parametrize("n", [32, 20])
def test_blocks_stored_together_have_the_bits_of_single_ones(n: int) -> None:
    """The quotients are products there: the middles between two codes have to round alike."""
    rng = np.random.default_rng(n)
    x, scratch = np.zeros((16, 32), np.float32), np.zeros(1024, np.uint8)
    found = np.zeros((2, 16, 40), np.uint8)
    for size in (1.0, 1e-30, 3e-8, 1e-5, 1e5, 1e7, 1e30):
        for _ in range(300):
            x[:, :n] = rng.standard_normal((16, n)) * size
            with np.errstate(over="ignore"):  # an infinite scale
                scale = (np.abs(x).max(axis=1) / 127).astype(np.float16).astype(np.float32)
            middles = (rng.integers(-127, 127, (16, 10)) + np.float32(0.5)) * scale[:, None]
            x[:, 5:15] = middles * rng.choice(np.float32([1, 1 - 2**-23, 1 + 2**-23]), (16, 10))
            x[0], x[1, 3], x[2, 4] = 0.0, np.nan, np.inf
            _both_stores(x, n, *found, scratch, 0, 1)
            np.testing.assert_array_equal(found[0], found[1])

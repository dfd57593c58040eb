"""Penalties and masks beyond their cases: independence of rows, edges, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError


def history(*rows: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.cumsum([0, *(len(row) for row in rows)])
    return np.array([t for row in rows for t in row], np.int32), indptr.astype(np.int32)


def logits(B: int = 3, V: int = 8) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((B, V)).astype(np.float32)


@pytest.mark.usefixtures("split_everything")
def test_a_row_depends_on_its_own_history_only() -> None:
    rows = [(1, 2, 1, 2, 1), (), (7, 0, 7, 0)]
    ids, indptr = history(*rows)
    for call in (
        lambda x, i, p: nk.apply_penalties(x, i, p, repetition_penalty=1.5, presence_penalty=1.0),
        lambda x, i, p: nk.apply_no_repeat_ngram(x, i, p, 2),
        lambda x, i, p: nk.apply_dry_penalty(x, i, p, multiplier=1.0, allowed_length=1),
        lambda x, i, p: nk.mask_token_ids(x, i, p, keep=True),
    ):
        whole = call(logits(), ids, indptr)
        for b, row in enumerate(rows):
            alone = call(logits()[b : b + 1], *history(row))
            np.testing.assert_array_equal(alone[0], whole[b])
        np.testing.assert_array_equal(whole[1], logits()[1])  # nothing was said


def test_results_are_written_in_place() -> None:
    x = logits(1)
    assert nk.apply_penalties(x, *history((1,)), presence_penalty=1.0) is x
    assert x[0, 1] == logits(1)[0, 1] - 1


def test_prompt_counts_for_repetition_only() -> None:
    ids, indptr = history((1, 1, 2, 1))
    x = np.full((1, 4), 2.0, np.float32)
    nk.apply_penalties(
        x, ids, indptr, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.125,
        prompt_lens=2,
    )  # fmt: skip
    # 1 is in the prompt twice and once in the answer, 2 once in the answer
    np.testing.assert_array_equal(x, [[2.0, 1 - 0.375, 1 - 0.375, 2.0]])


def test_window_zero_and_neutral_parameters_change_nothing() -> None:
    ids, indptr = history((1, 2), (3,), (4, 4))
    for options in ({"window": 0, "repetition_penalty": 3.0}, {}):
        np.testing.assert_array_equal(
            nk.apply_penalties(logits(), ids, indptr, **options), logits()
        )
    np.testing.assert_array_equal(nk.apply_no_repeat_ngram(logits(), ids, indptr, 0), logits())
    np.testing.assert_array_equal(
        nk.apply_dry_penalty(logits(), ids, indptr, multiplier=0.0), logits()
    )


def test_dry_penalty_stays_finite_for_long_repetitions() -> None:
    ids, indptr = history((1, 2) * 500)
    x = nk.apply_dry_penalty(np.zeros((1, 4), np.float32), ids, indptr, multiplier=1.0)
    # 998 tokens repeat, but 1.75**158 is the largest power below 3.4e38
    np.testing.assert_allclose(x[0, 1], -(1.75**158), rtol=1e-6)
    assert x[0, 2] == 0  # never followed what the text ends with


def test_excluded_tokens_stay_excluded() -> None:
    x = np.full((1, 4), -np.inf, np.float32)
    ids, indptr = history((0, 1, 0, 1, 0))
    nk.apply_penalties(x, ids, indptr, repetition_penalty=0.5, frequency_penalty=-1.0)
    nk.apply_dry_penalty(x, ids, indptr, multiplier=1.0)
    nk.apply_logit_bias(x, ids[:1], np.ones(1, np.float32), np.array([0, 1], np.int32))
    assert (x == -np.inf).all()


def test_bitmask_ignores_bits_past_the_vocabulary() -> None:
    for V in (1, 31, 32, 33):
        words = np.zeros((1, (V + 31) // 32), np.int32)
        words[0, -1] = -(2**31)  # bit 31 of the last word
        got = nk.apply_token_bitmask(np.zeros((1, V), np.float32), words)
        assert np.flatnonzero(got[0] == 0).tolist() == ([31] if V == 32 else [])


IDS, INDPTR = history((1, 2), (), (3,))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nk.mask_token_ids(logits(), IDS + 6, INDPTR), UsageError, r"0\.\.7, .* got 8"),
        (lambda: nk.mask_token_ids(logits(), -IDS, INDPTR), UsageError, "got -1"),
        (lambda: nk.mask_token_ids(logits(2), IDS, INDPTR), UsageError, r"indptr .*\(3\)"),
        (lambda: nk.mask_token_ids(logits(), IDS[:2], INDPTR), UsageError, "number of token_ids"),
        (lambda: nk.mask_token_ids(logits(), IDS, INDPTR[::-1].copy()), UsageError, "rise from 0"),
        (lambda: nk.mask_token_ids(logits(), IDS.astype(float), INDPTR), TypeError, "int32"),
        (
            lambda: nk.apply_penalties(logits(), IDS, INDPTR, repetition_penalty=0.0),
            UsageError,
            "repetition_penalty positive",
        ),
        (
            lambda: nk.apply_penalties(logits(), IDS, INDPTR, presence_penalty=np.nan),
            UsageError,
            "finite",
        ),
        (
            lambda: nk.apply_penalties(logits(), IDS, INDPTR, window=-2),
            UsageError,
            "window must be an integer of at least -1, got -2",
        ),
        (
            lambda: nk.apply_no_repeat_ngram(logits(), IDS, INDPTR, [1.5, 1, 1]),
            UsageError,
            "ngram_size must be an integer",
        ),
        (
            lambda: nk.apply_dry_penalty(logits(), IDS, INDPTR, multiplier=1.0, base=0.5),
            UsageError,
            "base finite and at least 1",
        ),
        (
            lambda: nk.apply_dry_penalty(logits(), IDS, INDPTR, multiplier=1.0, breakers=[()]),
            UsageError,
            "breakers",
        ),
        (
            lambda: nk.apply_logit_bias(logits(), IDS, np.zeros(2, np.float32), INDPTR),
            UsageError,
            r"biases must have shape \(3\)",
        ),
        (
            lambda: nk.apply_token_bitmask(logits(), np.zeros((3, 2), np.int32)),
            UsageError,
            "bitmask",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()

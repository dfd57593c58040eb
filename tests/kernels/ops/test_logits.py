"""Logits ops beyond their cases: special values, invariance, what must hold between them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError

# logarithm of a float32 sum with float64 over blocks; see nbflow_kernels.logits.cases
ATOL = 1e-6


def rows(rng: np.random.Generator, *shape: int) -> Any:
    return 4.0 * rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("V", [1, 15, 16, 300, 1024, 2500])
def test_a_row_does_not_depend_on_its_neighbours(rng: np.random.Generator, V: int) -> None:
    p, q = rows(rng, 5, V), rows(rng, 5, V)
    ids = rng.integers(0, V, (5, 3)).astype(np.int32)
    for function in (
        lambda s: nk.log_softmax(p[s], 0.7, 30.0),
        lambda s: nk.token_log_probs(p[s], ids[s]),
        lambda s: nk.kl_divergence(p[s], q[s]),
        lambda s: nk.masked_softmax(p[s]),
    ):
        whole = function(slice(None))
        for b in range(5):
            np.testing.assert_array_equal(function(slice(b, b + 1)), whole[b : b + 1])


def test_probabilities_of_a_large_vocabulary_sum_to_one(rng: np.random.Generator) -> None:
    logits = rows(rng, 1, 50_001)
    total = np.exp(nk.log_softmax(logits).astype(np.float64)).sum()
    # all terms are off by the same error of the logarithm, and by roundings that average out
    assert abs(total - 1.0) < 2 * ATOL


def test_token_log_probs_are_entries_of_log_softmax(rng: np.random.Generator) -> None:
    logits = rows(rng, 7, 333)
    ids = rng.integers(0, 333, (7, 5)).astype(np.int32)
    temperature = rng.uniform(0.5, 2.0, 7)
    table = nk.log_softmax(logits, temperature, 20.0)
    got = nk.token_log_probs(logits, ids, temperature, 20.0)
    assert got.dtype == np.float64
    # the table is rounded to float32, three times
    np.testing.assert_allclose(got, np.take_along_axis(table, ids, 1), rtol=3 * 2**-24, atol=1e-7)
    one = nk.token_log_probs(logits, np.ascontiguousarray(ids[:, 0]), temperature, 20.0)
    np.testing.assert_array_equal(one, got[:, 0])


def test_the_most_likely_token_keeps_its_digits() -> None:
    """Far from 0, x minus the logarithm of the sum would be off by 2**-24 of 1000, 6e-5."""
    logits = np.full((1, 100), 1000.0, np.float32)
    logits[0, 7] = 1012.0
    want = -math.log1p(99 * math.exp(-12.0))
    assert abs(float(nk.token_log_probs(logits, np.array([7], np.int32))[0]) - want) < ATOL
    assert abs(float(nk.log_softmax(logits)[0, 7]) - want) < ATOL


@pytest.mark.parametrize("V", [16, 100])
def test_log_softmax_may_write_over_its_input(rng: np.random.Generator, V: int) -> None:
    logits = rows(rng, 3, V)
    want = nk.log_softmax(logits, 2.0, 30.0)
    assert nk.log_softmax(logits, 2.0, 30.0, out=logits) is logits
    np.testing.assert_array_equal(logits, want)


@pytest.mark.parametrize("V", [5, 64, 77])
def test_rows_without_a_distribution_become_nan(V: int) -> None:
    logits = np.zeros((6, V), np.float32)
    logits[0] = -np.inf
    logits[1, 0] = logits[2, -1] = np.nan
    logits[3, V // 2] = np.inf
    logits[4] = np.finfo(np.float32).min
    ids = np.zeros(6, np.int32)
    for result in (
        nk.log_softmax(logits)[:, 0],
        nk.token_log_probs(logits, ids),
        nk.kl_divergence(logits, np.zeros_like(logits)),
        nk.kl_divergence(np.zeros_like(logits), logits),
    ):
        np.testing.assert_array_equal(np.isnan(result), [True] * 5 + [False])
    assert np.isnan(nk.log_softmax(logits)[:5]).all()


@pytest.mark.parametrize("V", [20, 77, 2000])
def test_divergence_of_special_rows(rng: np.random.Generator, V: int) -> None:
    p = rows(rng, 3, V)
    np.testing.assert_array_equal(nk.kl_divergence(p, p), 0.0)
    # log-probabilities are logits; each is rounded to 2**-24 of at most 40
    log_p, log_q = nk.log_softmax(p), nk.log_softmax(rows(rng, 3, V))
    direct = nk.kl_divergence(p, log_q)
    np.testing.assert_allclose(nk.kl_divergence(log_p, log_q), direct, atol=4e-6, rtol=0)
    assert (direct > 0.1).all()
    for column in (0, V - 1):
        without = p.copy()
        without[:, column] = -np.inf
        assert np.isposinf(nk.kl_divergence(p, without)).all()
        # what p excludes adds nothing, whatever q says of it: ln of the mass q leaves to the rest
        mass = -np.log1p(-np.exp(nk.log_softmax(p)[:, column].astype(np.float64)))
        np.testing.assert_allclose(nk.kl_divergence(without, p), mass, atol=3 * ATOL, rtol=0)
        np.testing.assert_array_equal(nk.kl_divergence(without, without), 0.0)


def test_small_divergences_are_measured(rng: np.random.Generator) -> None:
    """Noise of size s in the logits makes about s**2 / 2 * (1 - sum p**2): here 5e-5."""
    p = rows(rng, 4, 32_000)
    q = p + np.float32(0.01) * rng.standard_normal(p.shape, dtype=np.float32)
    exact = [np.exp(x.astype(np.float64) - x.max(1, keepdims=True)) for x in (p, q)]
    a, b = (e / e.sum(1, keepdims=True) for e in exact)
    np.testing.assert_allclose(nk.kl_divergence(p, q), (a * np.log(a / b)).sum(1), atol=1e-6)


def test_agreement_counts_the_lowest_index_and_no_nan() -> None:
    p = np.array([[1, 3, 3], [1, 3, 3], [np.nan, 1, 2], [0, 1, 2], [0, 1, -np.inf]], np.float32)
    q = np.array([[0, 2, 2], [0, 1, 2], [np.nan, 1, 2], [0, np.nan, 2], [5, 9, 0]], np.float32)
    np.testing.assert_array_equal(nk.top1_agreement(p, q), [True, False, False, False, True])


@pytest.mark.parametrize("n", [1, 16, 1025])
def test_soft_cap_of_special_values(n: int) -> None:
    for value, want in (
        (np.inf, 5.0),
        (-np.inf, -5.0),
        (1e30, 5.0),
        (np.nan, np.nan),
        (0.0, 0.0),
        (1e-20, 1e-20),
    ):
        got = nk.soft_cap(np.full(n, value, np.float32), 5.0)
        np.testing.assert_allclose(got, np.float32(want), rtol=2e-7, atol=0)
    over = np.arange(n, dtype=np.float32)
    expected = nk.soft_cap(over, 5.0)
    assert nk.soft_cap(over, 5.0, out=over) is over
    np.testing.assert_array_equal(over, expected)


def test_soft_cap_keeps_the_digits_of_small_and_large_values() -> None:
    size = np.geomspace(1e-30, 40.0, 4001)
    x = np.concatenate([-size, size]).astype(np.float32)
    # tanh alone: the cap of 1 divides and multiplies exactly
    np.testing.assert_allclose(nk.soft_cap(x, 1.0), np.tanh(x.astype(np.float64)), rtol=5e-7)


def test_capped_logits_are_logits_that_were_capped(rng: np.random.Generator) -> None:
    x = rows(rng, 3, 100)
    # tanh is off by 5e-7 of a cap of 10, in x and in the top, whichever way it is taken
    np.testing.assert_allclose(
        nk.log_softmax(x, logits_soft_cap=10.0),
        nk.log_softmax(nk.soft_cap(x, 10.0)),
        atol=4 * 5e-7 * 10.0,
        rtol=0,
    )
    for none in (None, 0, 0.0):
        np.testing.assert_array_equal(nk.log_softmax(x, logits_soft_cap=none), nk.log_softmax(x))


# ---- softmax of attention scores -------------------------------------------------------------


def test_softmax_by_hand_is_the_attention_kernel(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((n, 4, 32), dtype=np.float32) for n in (9, 21, 21))
    scores = np.ascontiguousarray(np.einsum("ihd,jhd->hij", q, k))
    options: dict[str, Any] = {"causal": True, "logits_soft_cap": 20.0}
    p = nk.masked_softmax(scores, sm_scale=32**-0.5, **options)
    got = np.einsum("hij,jhd->ihd", p, v)
    want = nk.single_prefill_with_kv_cache(q, k, v, **options)
    # weighted means of numbers up to 4; weights good to 5e-6, sums of 32 and 21 products
    np.testing.assert_allclose(got, want, atol=3e-5, rtol=0)


def test_a_mask_and_a_bias_of_minus_infinity_are_the_same(rng: np.random.Generator) -> None:
    scores = rows(rng, 3, 4, 37)
    mask = rng.random((4, 37)) < 0.5
    mask[:, 5] = True
    want = nk.masked_softmax(scores, mask)
    assert (want[:, ~mask] == 0).all()
    np.testing.assert_allclose(want.sum(-1), 1.0, atol=1e-6)  # sqrt(37) roundings and the sum's
    for hidden in (-np.inf, np.finfo(np.float32).min):
        bias = np.where(mask, 0.0, hidden).astype(np.float32)
        np.testing.assert_array_equal(nk.masked_softmax(scores, bias=bias), want)
    lower = np.tri(4, 37, k=33, dtype=bool)
    np.testing.assert_array_equal(
        nk.masked_softmax(scores, causal=True), nk.masked_softmax(scores, lower)
    )


def test_masks_and_biases_broadcast_without_being_contiguous(rng: np.random.Generator) -> None:
    scores = rows(rng, 2, 3, 5, 37)
    for shape in ((37,), (5, 1), (3, 1, 37), (2, 1, 1, 1), (1, 3, 5, 37)):
        mask = rng.random((*shape[:-1], 2 * shape[-1]))[..., ::2] < 0.8
        bias = rng.standard_normal(shape[::-1], dtype=np.float32).T
        full = [np.ascontiguousarray(np.broadcast_to(x, scores.shape)) for x in (mask, bias)]
        np.testing.assert_array_equal(
            nk.masked_softmax(scores, mask, bias=bias),
            nk.masked_softmax(scores, full[0], bias=full[1]),
        )


@pytest.mark.parametrize("Tk", [5, 16, 77])
def test_blind_rows_are_zero_and_bad_rows_nan(Tk: int) -> None:
    scores = np.zeros((4, Tk), np.float32)
    scores[1, Tk - 1] = np.nan
    scores[2, 0] = np.inf
    mask = np.ones((4, Tk), bool)
    mask[0] = False
    got = nk.masked_softmax(scores, mask)
    np.testing.assert_array_equal(got[0], 0.0)
    assert np.isnan(got[1:3]).all()
    np.testing.assert_allclose(got[3], 1 / Tk, rtol=1e-6)
    mask[1, Tk - 1] = mask[2, 0] = False  # what is not seen does no harm
    assert np.isfinite(nk.masked_softmax(scores, mask)).all()
    over = scores.copy()
    assert nk.masked_softmax(over, mask, out=over) is over
    np.testing.assert_array_equal(over, nk.masked_softmax(scores, mask))


# ---- errors ----------------------------------------------------------------------------------

X = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nk.soft_cap(X, 0.0), r"cap must be positive, got 0\.0"),
        (lambda: nk.log_softmax(X, -1.0), r"temperature must be positive, got -1\.0; for 0 use"),
        (
            lambda: nk.log_softmax(X, np.ones(3)),
            r"temperature must be a number .*got \(3,\)",
        ),
        (lambda: nk.log_softmax(X, logits_soft_cap=-3.0), "logits_soft_cap must be positive"),
        (lambda: nk.log_softmax(X[:, :0]), "logits must have at least one column"),
        (lambda: nk.log_softmax(X, out=X[:1]), r"out must have shape \(2, 4\)"),
        (
            lambda: nk.token_log_probs(X, np.array([0, 4], np.int32)),
            r"ids must be in 0\.\.3, the columns of logits, got 4",
        ),
        (lambda: nk.token_log_probs(X, np.zeros(3, np.int32)), r"ids must have shape \(2\)"),
        (lambda: nk.kl_divergence(X, X[:1]), r"logits_q must have shape \(2, 4\)"),
        (lambda: nk.top1_agreement(X, X[:, :3].copy()), r"logits_q must have shape \(2, 4\)"),
        (lambda: nk.masked_softmax(X[0]), "scores must have shape"),
        (
            lambda: nk.masked_softmax(X, np.ones((3, 4), bool)),
            r"mask must broadcast to shape \(2, 4\), got \(3, 4\)",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="logits must have dtype float32, got float64"):
        nk.log_softmax(X.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mask must be an array of bool, got float32"):
        nk.masked_softmax(X, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bias must be an array of float32, got list"):
        nk.masked_softmax(X, bias=[0.0])  # type: ignore[arg-type]

"""Sampling: random numbers, distributions, batch invariance, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributions import check_frequencies, draws, some_probs

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import reference
from nbflow_kernels.sampling.cpu_philox import uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123 (kat_vectors, philox4x32 with 10 rounds)
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert reference.philox4x32(counter, key) == words


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("offset", [0, 3, 2**40 + 5, 2**64 - 1])
def test_kernel_draws_the_reference_numbers(seed: int, offset: int) -> None:
    for index in (0, 1, 2**33 + 7):
        got = uniform(np.uint64(seed), np.uint64(offset), np.uint64(index))
        assert got == reference.uniform(seed, offset, index)


def test_frequencies_follow_the_probabilities() -> None:
    probs = some_probs()
    check_frequencies(draws(nk.sampling_from_probs, probs), probs[0] / probs[0].sum(dtype=float))


@pytest.mark.parametrize(
    ("op", "filters", "options"),
    [
        ("top_k_sampling_from_probs", (5,), {}),
        ("top_p_sampling_from_probs", (0.6,), {}),
        ("min_p_sampling_from_probs", (0.2,), {}),
        ("top_k_top_p_sampling_from_probs", (6, 0.7), {}),
        ("top_k_top_p_sampling_from_probs", (6, 0.7), {"filter_apply_order": "joint"}),
    ],
)
def test_frequencies_follow_the_filtered_probabilities(
    op: str, filters: Any, options: dict[str, Any]
) -> None:
    probs = some_probs(1)
    row = probs[0].astype(float)
    order = np.argsort(-row, kind="stable")
    n = len(row)
    if "top_k" in op:
        n = filters[0]
    total = row[order[:n]].sum() if op.startswith("top_k") and not options else row.sum()
    if "top_p" in op:
        n = min(n, int(np.searchsorted(np.cumsum(row[order]), filters[-1] * total)) + 1)
    if "min_p" in op:
        n = int((row >= filters[0] * row.max()).sum())
    allowed = np.zeros(len(row))
    allowed[order[:n]] = row[order[:n]]
    assert 2 <= n < (row > 0).sum(), "the case filters something and leaves a choice"
    check_frequencies(draws(getattr(nk, op), probs, *filters, **options), allowed / allowed.sum())


def test_a_draw_depends_on_its_row_seed_and_offset_only() -> None:
    probs = np.concatenate([some_probs(i) for i in range(6)])
    seeds = np.arange(6, dtype=np.uint64) + np.uint64(2**40)
    offsets = np.arange(6, dtype=np.uint64) * np.uint64(3)
    whole = nk.top_p_sampling_from_probs(probs, 0.9, seed=seeds, offset=offsets)
    for i in range(6):
        one = nk.top_p_sampling_from_probs(
            probs[i : i + 1], 0.9, seed=seeds[i : i + 1], offset=offsets[i : i + 1]
        )
        assert one[0] == whole[i]
    again = nk.top_p_sampling_from_probs(probs, 0.9, seed=seeds, offset=offsets)
    np.testing.assert_array_equal(again, whole)


def test_single_numbers_count_the_rows_up() -> None:
    probs = np.repeat(some_probs(), 50, axis=0)
    tokens = nk.sampling_from_probs(probs, seed=9, offset=100)
    later = nk.sampling_from_probs(probs[:20], seed=9, offset=130)
    np.testing.assert_array_equal(later, tokens[30:])
    assert len(set(tokens.tolist())) > 3
    other = nk.sampling_from_probs(probs, seed=10, offset=100)
    assert (other != tokens).any()


def test_ties_go_to_the_lowest_index() -> None:
    probs = np.full((1, 8), 0.125, np.float32)
    for k in (1, 3, 8):
        kept = nk.top_k_renorm_probs(probs, k)[0]
        assert np.flatnonzero(kept).tolist() == list(range(k))
    assert np.flatnonzero(nk.top_p_renorm_probs(probs, 0.5)[0]).tolist() == [0, 1, 2, 3]
    assert nk.argmax(np.array([[1, 5, 2, 5] * 9], np.float32)).tolist() == [1]


def test_edges_of_the_filters() -> None:
    probs = some_probs(2)
    best = int(probs[0].argmax())
    assert set(draws(nk.top_k_sampling_from_probs, probs, 1).tolist()) == {best}
    assert set(draws(nk.top_p_sampling_from_probs, probs, 0.0).tolist()) == {best}
    assert set(draws(nk.min_p_sampling_from_probs, probs, 1.0).tolist()) == {best}
    plain = draws(nk.sampling_from_probs, probs)
    np.testing.assert_array_equal(draws(nk.top_k_sampling_from_probs, probs, 10**6), plain)
    np.testing.assert_array_equal(draws(nk.top_p_sampling_from_probs, probs, 1.0), plain)
    np.testing.assert_array_equal(draws(nk.min_p_sampling_from_probs, probs, 0.0), plain)


def test_tiny_probabilities_and_negative_zero_are_kept_apart() -> None:
    row = np.array([[1e-45, -0.0, 1e-38, 0.0, 3e-45]], np.float32)
    assert np.flatnonzero(nk.top_k_renorm_probs(row, 2)[0]).tolist() == [2, 4]
    alone = np.array([[0.0, -0.0, 1e-45, 0.0]], np.float32)
    assert nk.sampling_from_probs(alone, seed=3).tolist() == [2]


def test_softmax_of_special_rows() -> None:
    logits = np.zeros((5, 20), np.float32)
    logits[0, 3] = np.nan
    logits[1, 19] = np.inf
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf
    logits[4] = [1e38, *[-1e38] * 19]
    got = nk.softmax(logits)
    assert np.isnan(got[:3]).all()
    one = np.eye(1, 20, dtype=np.float32)[0]
    np.testing.assert_array_equal(got[3], one)
    np.testing.assert_allclose(got[4], one, atol=1e-37)  # exp stops at e**-87


def test_softmax_in_place_and_row_independence() -> None:
    logits = np.random.default_rng(4).standard_normal((3, 5000)).astype(np.float32)
    whole = nk.softmax(logits, np.array([0.5, 1.0, 2.0]))
    one = nk.softmax(logits[1:2], 1.0)
    np.testing.assert_array_equal(one[0], whole[1])
    assert nk.softmax(logits, np.array([0.5, 1.0, 2.0]), out=logits) is logits
    np.testing.assert_array_equal(logits, whole)


def test_argmax_of_excluded_rows_and_nan() -> None:
    rows = np.full((2, 33), -np.inf, np.float32)
    rows[1, 32] = -5
    assert nk.argmax(rows).tolist() == [0, 32]
    for place in (0, 32):  # in a vector, in the tail
        rows[1, place] = np.nan
        with pytest.raises(UsageError, match="logits: row 1 must not have a NaN"):
            nk.argmax(rows)


P = np.full((2, 4), 0.25, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nk.top_k_sampling_from_probs(P, 0, seed=1), UsageError, "top_k .* got 0"),
        (lambda: nk.top_k_sampling_from_probs(P, 1.5, seed=1), UsageError, "top_k .* got 1.5"),
        (lambda: nk.top_p_sampling_from_probs(P, 1.5, seed=1), UsageError, "top_p must be 0..1"),
        (lambda: nk.top_p_sampling_from_probs(P, np.nan, seed=1), UsageError, "top_p must be 0"),
        (lambda: nk.min_p_sampling_from_probs(P, [0.1] * 3, seed=1), UsageError, r"shape \(2,\)"),
        (lambda: nk.sampling_from_probs(P, seed=1.0), TypeError, "seed must be an integer"),
        (lambda: nk.sampling_from_probs(P, seed=2**64), TypeError, "seed must be an integer"),
        (lambda: nk.sampling_from_probs(P, seed=-1), UsageError, "seed must not be negative"),
        (
            lambda: nk.sampling_from_probs(P, seed=1, indices=np.array([2], np.int32)),
            UsageError,
            "indices must be in 0..1, the rows of probs, got 2",
        ),
        (
            lambda: nk.top_k_top_p_sampling_from_probs(
                P, 1, 1.0, seed=1, filter_apply_order="top_p_first"
            ),
            UsageError,
            "unknown filter_apply_order 'top_p_first'; did you mean 'top_k_first'",
        ),
        (lambda: nk.sampling_from_probs(P - 1, seed=1), UsageError, "probs: row 0 must be finite"),
        (lambda: nk.sampling_from_probs(P * 0, seed=1), UsageError, "not all zero"),
        (lambda: nk.sampling_from_probs(P * np.float32(np.nan), seed=1), UsageError, "row 0"),
        (lambda: nk.sampling_from_probs(P[:, :0], seed=1), UsageError, "row 0"),
        (lambda: nk.top_k_renorm_probs(P - 1, 1), UsageError, "probs: row 0 must be finite"),
        (lambda: nk.softmax(P, 0.0), UsageError, "temperature must be positive, got 0.0; for 0"),
        (lambda: nk.softmax(P, np.nan), UsageError, "temperature must be positive"),
        (lambda: nk.softmax(P[:, :0]), UsageError, "at least one column"),
        (lambda: nk.argmax(P[:, :0]), UsageError, "at least one column"),
        (lambda: nk.argmax(P.astype(float)), TypeError, "logits must have dtype float32"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()

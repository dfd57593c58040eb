"""Sampling from logits, typical, tail-free and Mirostat filters, top-k, masks, speculation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributions import check_frequencies, draws, some_probs

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import reference

LOGITS = np.log(np.maximum(some_probs(5), 1e-6)).astype(np.float32)


def frequencies(row: np.ndarray, mask: np.ndarray) -> np.ndarray:
    kept = np.where(mask, row.astype(float), 0.0)
    result: np.ndarray = kept / kept.sum()
    return result


@pytest.mark.parametrize(
    ("op", "filters", "mask"),
    [
        ("typical_sampling_from_probs", (0.6,), {"typical_p": 0.6}),
        ("tail_free_sampling_from_probs", (0.8,), {"z": 0.8}),
        ("mirostat_sampling_from_probs", (4.0,), {"floor": 2.0**-4}),
    ],
)
def test_frequencies_follow_the_filtered_probabilities(op: str, filters: Any, mask: Any) -> None:
    probs = some_probs(1)
    kept = reference._keep(probs[0].astype(float), **mask)
    assert 2 <= kept.sum() < (probs[0] > 0).sum(), "the case filters something, leaves a choice"
    drawn = draws(getattr(nk, op), probs, *filters)
    check_frequencies(drawn[0] if op.startswith("miro") else drawn, frequencies(probs[0], kept))


@pytest.mark.parametrize(
    ("op", "filters", "options"),
    [
        ("sampling_from_logits", (), {}),
        ("sampling_from_logits", (), {"temperature": 0.5}),
        ("top_k_top_p_sampling_from_logits", (8, 0.8), {}),
        ("top_k_top_p_sampling_from_logits", (8, 0.8), {"filter_apply_order": "joint"}),
    ],
)
def test_draws_from_logits_follow_the_softmax(op: str, filters: Any, options: Any) -> None:
    probs = reference.softmax(LOGITS, options.get("temperature"))[0]
    mask = np.ones(len(probs), bool)
    if filters:
        k, p = filters
        mask = reference._keep(probs, top_k=k, top_p=p, **options)
    check_frequencies(draws(getattr(nk, op), LOGITS, *filters, **options), frequencies(probs, mask))


def test_draws_from_logits_are_those_from_their_softmax() -> None:
    logits = (2 * np.random.default_rng(3).standard_normal((200, 3000))).astype(np.float32)
    probs = nk.softmax(logits)
    for one, other in (
        (nk.sampling_from_logits(logits, seed=4), nk.sampling_from_probs(probs, seed=4)),
        (
            nk.top_k_top_p_sampling_from_logits(logits, 30, 0.9, seed=4),
            nk.top_k_top_p_sampling_from_probs(probs, 30, 0.9, seed=4),
        ),
    ):
        # a number within rounding (1e-6 of the sum) of a token's edge may fall on the other side
        assert (one != other).sum() <= 1


@pytest.mark.usefixtures("split_everything")
def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(8)
    logits = (3 * rng.standard_normal((4, 9_000))).astype(np.float32)
    probs = nk.softmax(logits)
    chain = (probs[:, None], np.array([[3], [4], [5], [6]], np.int32), np.stack([probs] * 2, 1))
    seeds, offsets = np.arange(4) + 7, np.zeros(4, int)
    for call in (
        lambda i: nk.typical_renorm_probs(probs[i], 0.7),
        lambda i: nk.top_p_renorm_probs(probs[i], 0.95),
        lambda i: nk.tail_free_renorm_probs(probs[i], 0.9),
        lambda i: nk.top_k_mask_logits(logits[i], 40),
        lambda i: nk.top_k(logits[i], 40)[1],
        lambda i: nk.top_n_sigma_mask_logits(logits[i], 1.0),
        lambda i: nk.xtc_renorm_probs(probs[i], 0.5, 1e-3, seed=seeds[i], offset=offsets[i]),
        lambda i: nk.sampling_from_logits(logits[i], seed=seeds[i], offset=offsets[i]),
        lambda i: nk.top_k_top_p_sampling_from_logits(
            logits[i], 50, 0.9, seed=seeds[i], offset=offsets[i]
        ),
        lambda i: nk.chain_speculative_sampling(
            *(a[i] for a in chain), seed=seeds[i], offset=offsets[i]
        )[0],
    ):
        whole = call(slice(0, 4))
        for b in range(4):
            np.testing.assert_array_equal(call(slice(b, b + 1))[0], whole[b])


def test_filters_of_a_flat_row_keep_what_sorting_keeps() -> None:
    """A flat row, whose cut is found by `mass_window`."""
    logits = np.random.default_rng(2).standard_normal((1, 40_000)).astype(np.float32)
    probs = nk.softmax(logits)
    for p in (1e-6, 0.3, 0.9, 0.9999):
        kept = nk.top_p_renorm_probs(probs, p)[0] > 0
        np.testing.assert_array_equal(kept, reference._keep(probs[0].astype(float), top_p=p))
    for k in (1, 300, 313, 314, 20_000, 39_999):  # up to and past the number of chunks, 313
        values, ids = nk.top_k(logits, k)
        np.testing.assert_array_equal(ids[0], np.argsort(-logits[0], kind="stable")[:k])
        np.testing.assert_array_equal(values[0], logits[0, ids[0]])


def test_equal_elements_are_kept_from_the_lowest_index_on() -> None:
    for V in (20, 1_000, 10_000):
        probs = np.full((1, V), 1 / V, np.float32)
        for n in (1, V // 2, V - 1):
            for kept in (
                nk.top_p_renorm_probs(probs, (n - 0.5) / V),
                nk.typical_renorm_probs(probs, (n - 0.5) / V),
                nk.top_k_renorm_probs(probs, n),
            ):
                assert np.flatnonzero(kept[0]).tolist() == list(range(n))
            assert nk.top_k(probs, n)[1].tolist() == [list(range(n))]


def test_negative_zero_equals_zero() -> None:
    x = np.array([[-0.0, 0.0, -1.0, -0.0]], np.float32)
    assert nk.top_k(x, 2)[1].tolist() == [[0, 1]]
    assert nk.top_k(x, 3)[1].tolist() == [[0, 1, 3]]


def test_results_may_replace_their_input() -> None:
    probs, logits = some_probs(3), LOGITS.copy()
    for op, argument in (
        ("top_k_renorm_probs", 5),
        ("top_p_renorm_probs", 0.5),
        ("typical_renorm_probs", 0.5),
        ("tail_free_renorm_probs", 0.9),
    ):
        new, same = getattr(nk, op)(probs, argument), probs.copy()
        assert getattr(nk, op)(same, argument, out=same) is same
        np.testing.assert_array_equal(same, new)
    new, same = nk.xtc_renorm_probs(probs, 1.0, 0.1, seed=0), probs.copy()
    np.testing.assert_array_equal(nk.xtc_renorm_probs(same, 1.0, 0.1, seed=0, out=same), new)
    for op, number in (("top_k_mask_logits", 4), ("top_n_sigma_mask_logits", 0.5)):
        new, same = getattr(nk, op)(logits, number), logits.copy()
        np.testing.assert_array_equal(getattr(nk, op)(same, number, out=same), new)


def test_top_k_mask_and_softmax_are_top_k_renorm() -> None:
    got = nk.softmax(nk.top_k_mask_logits(LOGITS, 6))
    np.testing.assert_allclose(got, nk.top_k_renorm_probs(nk.softmax(LOGITS), 6), rtol=1e-5)


def test_tail_free_with_and_without_the_first_difference() -> None:
    # sorted .5 .4 .06 .02 .02; differences .24 .30 .04, sums .41 .93 1, without the first 0 .52 .59
    probs = np.array([[0.02, 0.5, 0.02, 0.4, 0.06]], np.float32)
    for z, first_counts, n in ((0.9, True, 1), (0.95, True, 2), (0.55, False, 2), (0.7, False, 5)):
        kept = nk.tail_free_renorm_probs(probs, z, first_counts=first_counts)
        assert (kept > 0).sum() == n


def test_mirostat_steers_the_surprise() -> None:
    """A fixed row of entropy 7 bits, target 3: the mean surprise approaches the target."""
    probs = np.random.default_rng(6).dirichlet(np.full(400, 0.4)).astype(np.float32)[None]
    mu: Any = 6.0
    surprises = []
    for i in range(400):
        before = np.asarray(mu)
        _, mu = nk.mirostat_sampling_from_probs(probs, mu, tau=3.0, eta=0.2, seed=1, offset=i)
        surprises.append(float(((before - mu) / 0.2 + 3.0).item()))
    # mu' - mu = -eta (s - tau): the mean of s - tau is the change of mu, a few bits, over 400 * eta
    assert abs(np.mean(surprises[100:]) - 3.0) < 0.1


def chains(n_rows: int, same: bool) -> tuple[Any, ...]:
    """Return draft and target rows of 3 positions and 6 tokens, and many chains of draft tokens."""
    rng = np.random.default_rng(11)
    target = rng.dirichlet(np.full(6, 0.7), 4).astype(np.float32)
    draft = target[:3] if same else rng.dirichlet(np.full(6, 0.7), 3).astype(np.float32)
    ids = np.stack(
        [
            nk.sampling_from_probs(
                draft, seed=i + 1, indices=np.full(n_rows, i, np.int32), offset=10**6
            )
            for i in range(3)
        ],
        axis=1,
    )
    return draft, target, np.ascontiguousarray(ids)


def test_speculation_leaves_the_target_distribution() -> None:
    N = 20_000
    draft, target, ids = chains(N, same=False)
    out, accepted, emitted = nk.chain_speculative_sampling(
        np.repeat(draft[None], N, 0), ids, np.repeat(target[None], N, 0), seed=77
    )
    for place in range(4):
        here = out[:, place]
        reached = emitted >= place
        assert (here[reached] >= 0).all()
        assert (here[~reached] == -1).all()
        wanted = target[place].astype(float)
        check_frequencies(here[reached], wanted / wanted.sum())
    # a token passes with probability sum min(p, q); three positions of N draws: 5 deviations
    rates = np.minimum(draft, target[:3]).sum(axis=1)
    spread = np.sqrt((rates * (1 - rates)).sum() * N)
    assert abs(accepted.sum() - N * rates.sum()) < 5 * spread
    assert (emitted <= accepted).all()


def test_speculation_accepts_everything_of_the_same_model() -> None:
    draft, target, ids = chains(500, same=True)
    counters = np.full(500, 10, np.int32), np.zeros(500, np.int32)
    out, accepted, emitted = nk.chain_speculative_sampling(
        np.repeat(draft[None], 500, 0), ids, np.repeat(target[None], 500, 0), *counters, seed=5
    )
    np.testing.assert_array_equal(out[:, :3], ids)
    assert (out[:, 3] >= 0).all()
    assert accepted is counters[0]
    assert (accepted == 13).all()
    assert (emitted == 3).all()


def test_speculation_without_a_difference_draws_from_the_target() -> None:
    """The draft has larger probabilities everywhere, so max(q - p, 0) is zero."""
    target = np.array([[[0.25, 0.25, 0.0], [0, 1, 0]]], np.float32)
    draft = np.array([[[0.5, 0.5, 0.5]]], np.float32)
    out, accepted, emitted = nk.chain_speculative_sampling(
        draft, np.array([[2]], np.int32), target, seed=0
    )
    assert out[0, 0] in (0, 1)
    assert (out[0, 1], accepted[0], emitted[0]) == (-1, 0, 0)


P = np.full((2, 4), 0.25, np.float32)
ONE = np.zeros((2, 1), np.int32)
PAIR = np.full((2, 2, 4), 0.25, np.float32)
DRAFT = np.full((2, 1, 4), 0.25, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nk.typical_sampling_from_probs(P, 1.5, seed=1), UsageError, "typical_p must be"),
        (lambda: nk.tail_free_sampling_from_probs(P, -1, seed=1), UsageError, "z must be 0..1"),
        (lambda: nk.typical_sampling_from_probs(P - 1, 0.5, seed=1), UsageError, "probs: row 0"),
        (lambda: nk.tail_free_renorm_probs(P * 0, 0.5), UsageError, "probs: row 0"),
        (lambda: nk.mirostat_sampling_from_probs(P, np.inf, seed=1), UsageError, "finite"),
        (lambda: nk.xtc_renorm_probs(P, 2.0, 0.1, seed=1), UsageError, "probability must be 0..1"),
        (lambda: nk.sampling_from_logits(P * np.nan, seed=1), UsageError, "logits: row 0"),
        (lambda: nk.sampling_from_logits(P - np.inf, seed=1), UsageError, "all -inf"),
        (lambda: nk.sampling_from_logits(P, temperature=0, seed=1), UsageError, "temperature"),
        (lambda: nk.top_k(P, 5), UsageError, r"k must be 1\.\.4, the number of columns, got 5"),
        (lambda: nk.top_k(P, 2.0), TypeError, "k must be an integer"),
        (lambda: nk.top_k(P * np.nan, 2), UsageError, "input: row 0 must not have a NaN"),
        (lambda: nk.top_k_mask_logits(P, 0), UsageError, "top_k .* got 0"),
        (lambda: nk.top_k_mask_logits(P, 1, out=P[:1]), UsageError, "out must have shape"),
        (lambda: nk.top_n_sigma_mask_logits(P, -1.0), UsageError, "n must not be negative"),
        (
            lambda: nk.chain_speculative_sampling(DRAFT, ONE, DRAFT, seed=1),
            UsageError,
            r"target_probs must have shape \(2, 2, 4\)",
        ),
        (
            lambda: nk.chain_speculative_sampling(DRAFT, ONE + 4, PAIR, seed=1),
            UsageError,
            r"draft_token_ids must be in 0\.\.3, .* got 4",
        ),
        (
            lambda: nk.chain_speculative_sampling(DRAFT, ONE, -PAIR, seed=1),
            UsageError,
            "target_probs: row 0",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_ties_of_top_k() -> None:
    x = np.array([[1, 3, 2, 3, 3], [5, 5, 5, 5, 5]], np.float32)
    for tie_break, wanted in ((0, [[1, 3], [0, 1]]), (1, [[1, 3], [0, 1]]), (2, [[3, 4], [3, 4]])):
        values, ids = nk.top_k(x, 2, deterministic=True, tie_break=tie_break)
        assert (ids == wanted).all()
        assert (values == np.take_along_axis(x, ids, 1)).all()
        by_index = nk.top_k(x, 2, sorted=False, tie_break=tie_break)[1]
        assert (by_index == np.sort(wanted, axis=1)).all()
    with pytest.raises(UsageError, match=r"tie_break must be 0 or 1, .* got 3"):
        nk.top_k(x, 2, tie_break=3)
    with pytest.raises(TypeError, match="deterministic must be a bool, got 1"):
        nk.top_k(x, 2, deterministic=1)


def test_windows_and_pages_are_checked() -> None:
    x, table = np.zeros((2, 8), np.float32), np.zeros((2, 4), np.int32)
    lengths, ones = np.array([8, 3], np.int32), np.ones(2, np.int32)
    raw = np.full((2, 3), 7, np.int32)
    found = nk.top_k_page_table_transform(
        x, table, lengths, 3, page_size=2, dsa_graph_safe=True, out_raw_indices=raw
    )
    assert (raw == [[0, 1, 2], [0, 1, 2]]).all()
    assert (found == [[0, 1, 0], [0, 1, 0]]).all()
    for call, message in (
        (lambda: nk.top_k_ragged_transform(x, ones, lengths + 1, 2), "lengths must lie in 0..8"),
        (lambda: nk.top_k_ragged_transform(x, ones, lengths, 0), "k must be positive"),
        (
            lambda: nk.top_k_ragged_transform(x, ones, lengths, 2, row_starts=ones),
            r"row_starts \+ lengths must lie in 0..8",
        ),
        (
            lambda: nk.top_k_page_table_transform(x, table, lengths, 2),
            "the last page of a window must lie in 0..3, got 2..7",
        ),
        (
            lambda: nk.top_k_page_table_transform(x, table, lengths, 2, page_size=3),
            "page_size must be a power of two",
        ),
        (
            lambda: nk.top_k_page_table_transform(x, table[:1], lengths, 2, page_size=2),
            "src_page_table must have a row for each of the 2 rows",
        ),
        (
            lambda: nk.top_k_page_table_transform(
                x, table, lengths, 2, page_size=2, row_starts=0 * ones
            ),
            "page_table_row_starts is needed",
        ),
        (
            lambda: nk.top_k_page_table_transform(x, table, lengths, 2, 2 * ones, page_size=2),
            "row_to_batch must lie in 0..1",
        ),
        (
            lambda: nk.top_k_page_table_transform(
                x, table, lengths, 3, page_size=2, out=raw, out_raw_indices=raw
            ),
            "out_raw_indices must not overlap out",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            call()

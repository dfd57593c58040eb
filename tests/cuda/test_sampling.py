"""Sampling on a device: tokens of many draws, rows that are not distributions, long rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.sampling import reference


def probabilities(rng: np.random.Generator, B: int, V: int) -> np.ndarray:
    probs = rng.dirichlet(np.full(V, 0.1), B).astype(np.float32)
    probs[:, rng.random(V) < 0.2] = 0
    probs[:, 3] = probs[:, 7] = np.float32(0.02)
    return probs


FILTERS: dict[str, dict[str, Any]] = {
    "sampling_from_probs": {},
    "top_k_sampling_from_probs": {"top_k": 20},
    "top_p_sampling_from_probs": {"top_p": 0.9},
    "min_p_sampling_from_probs": {"min_p": 0.05},
    "typical_sampling_from_probs": {"typical_p": 0.8},
    "tail_free_sampling_from_probs": {"z": 0.9},
}


@pytest.mark.parametrize("op", FILTERS)
def test_tokens_are_the_references(xp: Any, op: str) -> None:
    probs = probabilities(np.random.default_rng(1), 4, 300)
    rows = np.tile(np.arange(4, dtype=np.int32), 16)
    want = getattr(reference, op)(probs, seed=9, indices=rows, **FILTERS[op])
    got = getattr(nk, op)(xp.asarray(probs), seed=9, indices=xp.asarray(rows), **FILTERS[op])
    np.testing.assert_array_equal(got.get(), want)
    assert len(np.unique(want)) > 5


def test_tokens_of_logits_are_the_references(xp: Any) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 4, (3, 300)).astype(np.float32)
    rows = np.tile(np.arange(3, dtype=np.int32), 16)
    for options in ({"top_k": 30, "top_p": 0.9}, {"top_k": 301, "top_p": 0.5}):
        for order in ("top_k_first", "joint"):
            options = {**options, "filter_apply_order": order, "temperature": 0.7, "seed": 4}
            want = reference.top_k_top_p_sampling_from_logits(logits, indices=rows, **options)
            got = nk.top_k_top_p_sampling_from_logits(
                xp.asarray(logits), indices=xp.asarray(rows), **options
            )
            np.testing.assert_array_equal(got.get(), want)


def test_bad_rows_are_marked_and_the_others_are_drawn(xp: Any) -> None:
    probs = probabilities(np.random.default_rng(4), 6, 40)
    probs[1, 5], probs[2, 5], probs[3, 5], probs[4] = np.nan, -0.1, np.inf, 0
    on_device = xp.asarray(probs)
    tokens = nk.sampling_from_probs(on_device, seed=1).get()
    assert (tokens < 0).tolist() == [False, True, True, True, True, False]
    outside = xp.asarray(np.array([0, 6, -1], np.int32))  # rows that there are not
    assert (nk.sampling_from_probs(on_device, seed=1, indices=outside).get() < 0).tolist() == [
        False, True, True
    ]  # fmt: skip
    kept = nk.top_p_renorm_probs(on_device, 0.5).get()
    assert np.isnan(kept[1:5]).all()
    np.testing.assert_allclose(kept[[0, 5]].sum(axis=1), 1, atol=1e-6)
    logits = np.zeros((3, 9), np.float32)
    logits[0, 2], logits[1, 2], logits[2] = np.nan, np.inf, -np.inf
    assert nk.sampling_from_logits(xp.asarray(logits), seed=1).get().tolist() == [-1, -1, -1]
    assert np.isnan(nk.softmax(xp.asarray(logits)).get()).all()
    assert nk.argmax(xp.asarray(logits)).get().tolist() == [-1, 2, 0]


def test_ties_go_to_the_lowest_index_in_long_rows(xp: Any) -> None:
    """9000 columns: 1024 threads, and thousands of equals where the cut falls."""
    x = np.zeros((1, 9000), np.float32)
    x[0, 8000:8010] = 1
    values, indices = nk.top_k(xp.asarray(x), 500)
    np.testing.assert_array_equal(indices.get()[0], [*range(8000, 8010), *range(490)])
    np.testing.assert_array_equal(values.get()[0], [1] * 10 + [0] * 490)
    kept = np.isfinite(nk.top_k_mask_logits(xp.asarray(x), 12).get()[0])
    np.testing.assert_array_equal(np.flatnonzero(kept), [0, 1, *range(8000, 8010)])
    # each of 4500 equals weighs the same: a share of 1 / 3 is the first 1500 of them
    probs = np.zeros((1, 9000), np.float32)
    probs[0, ::2] = 2.0**-13
    renormed = nk.top_p_renorm_probs(xp.asarray(probs), 1 / 3).get()[0]
    np.testing.assert_array_equal(np.flatnonzero(renormed), np.arange(0, 3000, 2))

"""Attention with int8 queries over keys of int8 blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints

import nbflow_kernels as nk
from nbflow_kernels.attention import plan_layout, reference
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.kv_cache.cpu_codec import KINDS

pytestmark = pytest.mark.skipif(
    not launch.has_byte_products(), reason="int8 scores need AVX-512 VNNI, else nothing changes"
)

# A score is a sum of D / 32 terms, each rounded once and added with one rounding: 2 * 2**-24 of
# terms that add up to 5, less than the 1e-6 of `attention.cases`, with values up to 5.
ATOL = 3e-6


def run(paged: Paged, q: np.ndarray, rows: np.ndarray, name: str) -> Any:
    """Return the results of a launch with int8 scores, outputs filled with NaN."""
    wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout=paged.layout)
    paged.plan(wrapper, rows)
    plan, keys = wrapper.current, name.split("/")
    out = np.full((*q.shape[:2], paged.heads[2]), np.nan, np.float32)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    kinds = KINDS[keys[0]], KINDS[keys[-1]]
    launch.attend(plan, q, *paged.cache, out, lse, kinds, int8_scores=True)
    if plan.n_merges:
        launch.merge_splits(plan, out, lse)
    return out, lse


@pytest.mark.parametrize("D", [32, 96])
def test_scores_are_those_of_rounded_queries_in_any_batch(rng: np.random.Generator, D: int) -> None:
    name, rows = "q8_0", ints(0, 3, 73, 74)
    q = rng.standard_normal((74, 4, D)).astype(np.float32)
    paged = Paged(rng, [130, 70, 20], (4, 2, D), 8, "NHD", format=name)
    out, _ = run(paged, q, rows, name)
    for i, ((a, b), k, v) in enumerate(zip(pairwise(rows), paged.k, paged.v, strict=True)):
        want = reference.attend_with_int8_scores(q[a:b], k, v, causal=True, kv_format=name)
        np.testing.assert_allclose(out[a:b], want, rtol=0, atol=ATOL)
        plain = nk.single_prefill_with_kv_cache(q[a:b], k, v, causal=True, kv_format=name)
        assert np.abs(plain - out[a:b]).max() > 1e-4  # queries are rounded
        for row in {a, (a + b) // 2, b - 1} if i == 1 else ():
            n = len(k) - (b - 1 - row)  # the last row of a sequence that ends there
            short = Paged(np.random.default_rng(0), [n], (4, 2, D), 16, "HND", format=name)
            short.cache = (short._pages([k[:n]]), short._pages([v[:n]]))
            one, _ = run(short, q[row : row + 1], ints(0, 1), name)
            np.testing.assert_array_equal(one[0], out[row])


def test_a_query_that_is_not_finite_gives_nan(rng: np.random.Generator) -> None:
    paged = Paged(rng, [20], (2, 1, 32), 8, format="q8_0")
    q = np.zeros((2, 2, 32), np.float32)  # a query of zeros has scores of zero
    q[0, 1, 5] = np.inf
    out, _ = run(paged, q, ints(0, 2), "q8_0")
    assert np.isnan(out[0, 1]).all()
    assert np.isfinite(out[[0, 1, 1], [0, 0, 1]]).all()


def test_what_has_no_int8_scores() -> None:
    plans = [nk.attention.plan.AttentionPlan((4, 2, d, d), 16) for d in (64, 80, 288)]
    assert [launch.has_int8_scores(plan, KINDS["q8_0"]) for plan in plans] == [True, False, False]
    assert not launch.has_int8_scores(plans[0], KINDS["q4_0"])
    plans[0].set_table(plan_layout.ROPE, np.zeros((4, 64), np.float32))
    assert not launch.has_int8_scores(plans[0], KINDS["q8_0"])

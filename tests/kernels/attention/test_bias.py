"""Relative position bias (`AttentionPlan.set_bias`) of T5 against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from nbflow_kernels.attention import reference
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.plan import AttentionPlan, plan_into

PAGE = 16
LONGEST = 160


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 97), (5, 160), (40, 40), (70, 131)])
@pytest.mark.parametrize("split", [2048, 64])
def test_bias_by_distance(causal, n_queries, n_keys, split):
    H, G, D = 6, 2, 20
    rng = np.random.default_rng(n_keys)
    q = rng.standard_normal((n_queries, H, D)).astype(np.float32)
    k, v = rng.standard_normal((2, n_keys, G, D)).astype(np.float32)
    table = rng.standard_normal((H, 2 * LONGEST - 1)).astype(np.float32)
    n_pages = -(-n_keys // PAGE)
    pages = np.zeros((2, n_pages * PAGE, G, D), np.float32)
    pages[:, :n_keys] = k, v
    keys, values = (
        np.ascontiguousarray(a.reshape(n_pages, PAGE, G, D).swapaxes(1, 2)) for a in pages
    )
    plan = AttentionPlan(
        (H, G, D, D), PAGE, kv_layout="HND", causal=causal, sm_scale=0.3, split_keys=split
    )
    plan.set_bias(table, LONGEST)
    plan_into(
        plan,
        np.array([0, n_queries], np.int32),
        np.array([0, n_pages], np.int32),
        np.arange(n_pages, dtype=np.int32),
        np.array([n_keys], np.int32),
    )
    out = np.full((n_queries, H, D), np.nan, np.float32)
    launch.attend(plan, q, keys, values, out, None)
    if plan.n_merges:
        launch.merge_splits(plan, out, None)
    distance = np.arange(n_keys) - (np.arange(n_queries) + n_keys - n_queries)[:, None]
    expected = reference.single_prefill_with_kv_cache(
        q, k, v, causal=causal, sm_scale=0.3, bias=table[:, distance + LONGEST - 1]
    )
    # weights with scores of size 10: 10 * 2**-24 in each, and sums of at most 160 terms of size 1
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)

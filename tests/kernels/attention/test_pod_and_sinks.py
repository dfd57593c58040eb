"""A prompt and a decode batch in one launch, and attention sinks of the batch wrappers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

import nbflow_kernels as nk
from nbflow_kernels.attention import reference
from nbflow_kernels.attention.cases import ATOL
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.errors import UsageError

HEADS = (4, 2, 64)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("format", [None, "q8_0"])
def test_pod_has_the_bits_of_two_calls(format: str | None, threads: int) -> None:
    """One decode request is so long that its keys are split; one has none."""
    rng = np.random.default_rng(1)
    paged = Paged(rng, [9000, 5, 0, 70], HEADS, 16, "HND", np.float16, format=format)
    q, q_p = normal(rng, 4, 4, 64), normal(rng, 37, 4, 64)
    k_p, v_p = normal(rng, 130, 2, 64), normal(rng, 130, 2, 64)
    parallel_for.set_num_threads(threads)
    pod, decode = (
        cls(kv_layout="HND")
        for cls in (nk.PODWithPagedKVCacheWrapper, nk.BatchDecodeWithPagedKVCacheWrapper)
    )
    for wrapper in (pod, decode):
        wrapper.plan(*paged.table, *HEADS, 16, window_left=8900, **paged.format)
    outs = [np.full(a.shape, np.nan, np.float32) for a in (q_p, q)]
    options: dict[str, Any] = {"causal": True, "window_left": 100, "return_lse": True}
    with parallel_for.kernel_seconds() as seconds:
        got = pod.run(
            q_p, k_p, v_p, q, paged.cache, causal_p=True, window_left_p=100, return_lse_p=True,
            return_lse_d=True, v_scale=0.5, out_p=outs[0], out_d=outs[1],
        )  # fmt: skip
    assert len(seconds) == 1 + (pod.current.n_merges > 0)  # one launch, and the merge of splits
    assert pod.current.n_merges > 0 or threads == 1
    assert all(pair[0] is out for pair, out in zip(got, outs, strict=True))
    single = nk.single_prefill_with_kv_cache(q_p, k_p, v_p, **options)
    alone = decode.run(q, paged.cache, return_lse=True, v_scale=0.5)
    for pair, wanted in zip(got, (single, alone), strict=True):
        for found, want in zip(pair, wanted, strict=True):
            np.testing.assert_array_equal(found, want)
    want = reference.single_prefill_with_kv_cache(q_p, k_p, v_p, **options)
    np.testing.assert_allclose(got[0][0], want[0], rtol=0, atol=ATOL)


def test_pod_takes_masks_and_other_prompts() -> None:
    rng = np.random.default_rng(2)
    paged = Paged(rng, [40, 3], HEADS, 16)
    q = normal(rng, 2, 4, 64)
    pod = nk.PODWithPagedKVCacheWrapper()
    with pytest.raises(UsageError, match="run needs a plan"):
        pod.run(q, q, q, q, paged.cache)
    pod.plan(*paged.table, *HEADS, 16, sm_scale=0.1)
    for T, N in ((5, 20), (3, 33)):
        q_p, k_p, v_p = normal(rng, T, 4, 64), normal(rng, N, 2, 64), normal(rng, N, 2, 64)
        for mask in (rng.random((T, N)) < 0.5, rng.random((T, N)) < 0.5):
            got = pod.run(q_p, k_p, v_p, q, paged.cache, custom_mask_p=mask)[0]
            want = reference.single_prefill_with_kv_cache(q_p, k_p, v_p, custom_mask=mask)
            np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)
    for wrong in ({"causal_d": True}, {"sm_scale_d": 0.2}, {"kv_layout_d": "HND"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            pod.run(q_p, k_p, v_p, q, paged.cache, **wrong)


def test_sinks_of_batch_attention_and_of_its_wrapper() -> None:
    rng = np.random.default_rng(3)
    lens, rows = [70, 0, 2100, 5], ints(0, 3, 4, 5, 10)
    paged = Paged(rng, lens, HEADS, 16)
    q, sinks = normal(rng, 10, 4, 64), 2 * normal(rng, 4)
    want = paged.run(
        q, rows, reference.BatchPrefillWithPagedKVCacheWrapper, sinks=sinks, sm_scale=0.2
    )
    batch = nk.BatchAttention()
    indptr, indices, last = paged.table
    batch.plan(rows, indptr, indices, nk.get_seq_lens(indptr, last, 16), *HEADS, 64, 16, True, 0.2)
    outs = np.full(q.shape, np.nan, np.float32), np.full(q.shape[:2], np.nan, np.float32)
    assert batch.run(q, paged.cache, *outs, sinks=sinks)[0] is outs[0]
    wrapper = nk.BatchAttentionWithAttentionSinkWrapper(window_left=3000, head_dim_qk=64)
    paged.plan(wrapper, rows)
    other = wrapper.run(
        q, paged.cache, sinks, 0.2, return_lse=True
    )  # another scale than the plan's
    for found in (outs, other):
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL)
    assert wrapper.current.window_left == 3000
    without = batch.run(q, paged.cache)[0]
    np.testing.assert_array_equal(without, paged.run(q, rows, sm_scale=0.2)[0])
    with pytest.raises(UsageError, match="head_dim_qk must be the wrapper's, 64, got 32"):
        wrapper.plan(rows, *paged.table, 4, 2, 32, 16)
    with pytest.raises(UsageError, match="window_left must be the wrapper's, 3000, got 7"):
        paged.plan(wrapper, rows, window_left=7)

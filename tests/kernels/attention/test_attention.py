"""Attention beyond its cases: batch invariance, paging, masks, errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

from nbflow_kernels.attention import (
    BatchPrefillWithPagedKVCacheWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
    reference,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from nbflow_kernels.attention.cases import ATOL
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads
from nbflow_kernels.cpu.simd_memory import sum16
from nbflow_kernels.errors import UsageError

MIXED = [70, 1, 200, 0, 64, 130]  # keys of each request
NEW = [70, 1, 1, 0, 5, 3]  # query rows: a prompt, decodes, an empty request, chunks


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_mixed_batch_matches_reference(layout: str, dtype: Any, page_size: int) -> None:
    rng = np.random.default_rng(1)
    paged = Paged(rng, MIXED, (6, 2, 36), page_size, layout, dtype)
    rows = np.cumsum([0, *NEW]).astype(np.int32)
    q = normal(rng, rows[-1], 6, 36)
    options = {"window_left": 90, "logits_soft_cap": 4.0}
    out, lse = paged.run(q, rows, **options)
    want, want_lse = paged.run(q, rows, reference.BatchPrefillWithPagedKVCacheWrapper, **options)
    np.testing.assert_allclose(out, want, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=ATOL)


@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 20), (7, 1, 80)])
def test_rows_do_not_depend_on_the_batch(heads: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(2)
    paged = Paged(rng, MIXED, heads, 16)
    rows = np.cumsum([0, *NEW]).astype(np.int32)
    q = normal(rng, rows[-1], heads[0], heads[2])
    out, lse = paged.run(q, rows)
    for i, n in enumerate(MIXED):
        mine = slice(rows[i], rows[i + 1])
        alone, alone_lse = single_prefill_with_kv_cache(
            q[mine], paged.k[i], paged.v[i], causal=True, return_lse=True
        )
        np.testing.assert_array_equal(out[mine], alone, err_msg=f"request {i} of {n} keys")
        np.testing.assert_array_equal(lse[mine], alone_lse)


def test_page_size_and_layout_do_not_change_the_bits() -> None:
    results = []
    for page_size, layout in ((1, "NHD"), (7, "HND"), (64, "NHD"), (300, "HND")):
        rng = np.random.default_rng(3)
        H, G, D = 4, 2, 48
        q = normal(rng, 9, H, D)
        k, v = normal(rng, 250, G, D), normal(rng, 250, G, D)
        paged = Paged(np.random.default_rng(0), [250], (H, G, D), page_size, layout)
        indices = paged.table[1]
        for cache, rows in zip(paged.cache, (k, v), strict=True):
            pages = cache if layout == "NHD" else cache.transpose(0, 2, 1, 3)
            for at in range(0, 250, page_size):
                n = len(rows[at : at + page_size])
                pages[indices[at // page_size], :n] = rows[at : at + page_size]
        results.append(paged.run(q, ints(0, 9))[0])
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("options", [{}, {"window_left": 70}, {"logits_soft_cap": 3.0}])
def test_chunks_and_single_rows_give_the_bits_of_the_whole_prompt(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    N, H, G, D = 150, 6, 3, 32
    q, k, v = normal(rng, N, H, D), normal(rng, N, G, D), normal(rng, N, G, D)
    whole = single_prefill_with_kv_cache(q, k, v, causal=True, **options)
    for edges in ([0, 64, 128, 150], [0, 1, 50, 149, 150]):
        parts = [
            single_prefill_with_kv_cache(q[a:b], k[:b], v[:b], causal=True, **options)
            for a, b in pairwise(edges)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    for row in (0, 1, 63, 64, 65, 149):
        one = single_decode_with_kv_cache(q[row], k[: row + 1], v[: row + 1], **options)
        np.testing.assert_array_equal(one, whole[row])


def test_threads_do_not_change_the_bits() -> None:
    rng = np.random.default_rng(5)
    q, k, v = normal(rng, 90, 6, 64), normal(rng, 300, 3, 64), normal(rng, 300, 3, 64)
    before = get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            set_num_threads(n)
            results.append(single_prefill_with_kv_cache(q, k, v, causal=True))
    finally:
        set_num_threads(before)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_query_rows_may_be_far_apart_and_one_array_may_hold_the_cache() -> None:
    rng = np.random.default_rng(6)
    paged = Paged(rng, [40, 9], (4, 2, 16), 8)
    fused = normal(rng, 5, (4 + 2 * 2) * 16)  # columns of q, k and v
    q = np.lib.stride_tricks.as_strided(fused, (5, 4, 16), (fused.strides[0], 64, 4))
    rows = ints(0, 4, 5)
    want = paged.run(np.ascontiguousarray(q), rows)[0]
    np.testing.assert_array_equal(paged.run(q, rows)[0], want)
    paged.cache = np.stack(paged.cache, axis=1)  # (pages, 2, page_size, G, D)
    np.testing.assert_array_equal(paged.run(q, rows)[0], want)


@pytest.mark.parametrize("options", [{"window_left": 9}, {"attention_chunk": 45}])
def test_keys_outside_the_window_or_the_chunk_are_never_read(options: dict[str, int]) -> None:
    rng = np.random.default_rng(7)
    paged = Paged(rng, [100], (2, 1, 16), 4)
    q = normal(rng, 1, 2, 16)
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    indptr, indices, last = paged.table
    wrapper.plan(ints(0, 1), indptr, indices, last, 2, 1, 16, 4, **options)
    want = wrapper.run(q, paged.cache)
    for part in paged.cache:  # keys 90..99 are on pages 22..24 of the sequence, chunk 2 of 45
        part[indices[:22]] = np.nan
    np.testing.assert_array_equal(wrapper.run(q, paged.cache), want)


def test_a_key_seen_by_other_rows_only_cannot_spoil_a_row() -> None:
    rng = np.random.default_rng(8)
    q, k, v = normal(rng, 6, 2, 16), normal(rng, 6, 2, 16), normal(rng, 6, 2, 16)
    want = single_prefill_with_kv_cache(q, k, v, causal=True)
    k[4], v[4] = np.nan, np.inf
    got = single_prefill_with_kv_cache(q, k, v, causal=True)
    np.testing.assert_array_equal(got[:4], want[:4])
    assert not np.isfinite(got[4:]).any()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_overflow_are_not_lost(bad: float, cap: float | None) -> None:
    q, k = np.ones((1, 1, 16), np.float32), np.zeros((3, 1, 16), np.float32)
    k[1, 0, 0] = bad
    v = np.ones_like(k)
    got = single_prefill_with_kv_cache(q, k, v, logits_soft_cap=cap)
    assert np.isnan(got).all()


def test_large_scores_do_not_overflow() -> None:
    # scores 0, 80, ..., 5040, 400: the largest decides alone
    q = np.full((1, 16), 1.0, np.float32)
    k = np.repeat(np.arange(64, dtype=np.float32)[:, None] * 5, 16, axis=1)[:, None]
    v = np.arange(64, dtype=np.float32)[:, None, None].repeat(16, axis=2)
    out, lse = single_decode_with_kv_cache(q, k, v, sm_scale=1.0, return_lse=True)
    np.testing.assert_array_equal(out, np.full((1, 16), 63, np.float32))
    # 5040 * log2(e); one ulp of float32 there is 4.9e-4
    np.testing.assert_allclose(lse, 5040 / np.log(2), atol=5e-4)


def test_mask_equal_to_the_causal_one() -> None:
    rng = np.random.default_rng(9)
    q, k, v = normal(rng, 20, 4, 32), normal(rng, 90, 2, 32), normal(rng, 90, 2, 32)
    mask = np.arange(90) <= np.arange(20)[:, None] + 70
    causal = single_prefill_with_kv_cache(q, k, v, causal=True)
    for form in (mask, mask.ravel()):
        got = single_prefill_with_kv_cache(q, k, v, custom_mask=form)
        np.testing.assert_allclose(got, causal, rtol=0, atol=2 * ATOL)  # two kernels' errors


def test_merging_two_halves_of_the_keys() -> None:
    rng = np.random.default_rng(10)
    q, k, v = normal(rng, 3, 4, 32), normal(rng, 90, 2, 32), normal(rng, 90, 2, 32)
    both, s_both = single_prefill_with_kv_cache(q, k, v, return_lse=True)
    halves = [
        single_prefill_with_kv_cache(q, k[part], v[part], return_lse=True)
        for part in (slice(0, 33), slice(33, 90))
    ]
    got, s = merge_state(*halves[0], *halves[1])
    for many, one in zip(
        merge_states(*(np.stack(part, axis=1) for part in zip(*halves, strict=True))),
        (got, s),
        strict=True,
    ):
        np.testing.assert_allclose(many, one, rtol=2e-7, atol=1e-7)  # one rounding each
    v, lse = (part.copy() for part in halves[0])
    mask = np.array([True, False, True])
    merge_state_in_place(v, lse, *halves[1], mask=mask)
    np.testing.assert_array_equal(v[mask], got[mask])
    np.testing.assert_array_equal(v[1], halves[0][0][1])
    np.testing.assert_array_equal(lse, np.where(mask[:, None], s, halves[0][1]))
    np.testing.assert_allclose(got, both, rtol=0, atol=2 * ATOL)
    np.testing.assert_allclose(s, s_both, rtol=0, atol=2 * ATOL)


def test_out_and_lse_are_used() -> None:
    rng = np.random.default_rng(11)
    q, k = normal(rng, 3, 2, 16), normal(rng, 5, 2, 16)
    out, lse = np.full((3, 2, 16), np.nan, np.float32), np.full((3, 2), np.nan, np.float32)
    result = single_prefill_with_kv_cache(q, k, k, out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    one, one_lse = np.empty((2, 16), np.float32), np.empty(2, np.float32)
    result = single_decode_with_kv_cache(q[2], k, k, out=one, lse=one_lse, return_lse=True)
    assert result[0] is one
    assert result[1] is one_lse
    np.testing.assert_array_equal(one, out[2])


def test_empty_batch() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan(ints(0), ints(0), ints(), ints(), 4, 2, 16, 8)
    pages = np.zeros((3, 8, 2, 16), np.float32)
    assert wrapper.run(np.zeros((0, 4, 16), np.float32), (pages, pages)).shape == (0, 4, 16)


@jit.kernel
def _sums(rows: Any, found: Any, single: Any) -> None:
    r = simd.address(rows)
    v = simd.load_f32(r)
    total = sum16(
        v, simd.load_f32(r + 64), simd.load_f32(r + 128), simd.load_f32(r + 192),
        simd.load_f32(r + 256), simd.load_f32(r + 320), simd.load_f32(r + 384),
        simd.load_f32(r + 448), simd.load_f32(r + 512), simd.load_f32(r + 576),
        simd.load_f32(r + 640), simd.load_f32(r + 704), simd.load_f32(r + 768),
        simd.load_f32(r + 832), simd.load_f32(r + 896), simd.load_f32(r + 960),
    )  # fmt: skip
    simd.store_f32(simd.address(found), total)
    for i in range(16):
        single[i] = simd.sum(simd.load_f32(r + 64 * i))


def test_sixteen_sums_at_once_have_the_bits_of_single_sums() -> None:
    rows = normal(np.random.default_rng(13), 16, 16)
    found, single = np.zeros(16, np.float32), np.zeros(16, np.float32)
    _sums(rows, found, single)
    np.testing.assert_array_equal(found, single)
    np.testing.assert_allclose(single, rows.astype(float).sum(1), atol=4e-6)  # 16 terms below 4


Q, KV = np.zeros((2, 4, 16), np.float32), np.zeros((5, 2, 16), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": [1.0]}, TypeError, "q must be a NumPy array"),
        (
            {"q": Q.astype(np.float64)},
            TypeError,
            "q must have dtype float32 or float16, got float64",
        ),
        ({"q": Q[:, ::2]}, UsageError, "q must be C-contiguous"),
        ({"q": Q[:, :3].copy()}, UsageError, "must be a multiple of num_kv_heads = 2"),
        ({"k": KV[:4], "v": KV}, UsageError, r"v must have shape \(4, 2, any\)"),
        ({"v": KV.astype(np.int8)}, TypeError, "float32 or float16 or uint16, got int8"),
        ({"kv_layout": "NDH"}, UsageError, "unknown kv_layout 'NDH'; did you mean 'NHD'"),
        ({"logits_soft_cap": -1.0}, UsageError, "logits_soft_cap must be positive"),
        (
            {"custom_mask": np.ones((2, 4), bool)},
            UsageError,
            r"custom_mask must have shape \(2, 5\)",
        ),
        ({"custom_mask": np.ones(10, np.uint8)}, TypeError, "custom_mask must have dtype bool"),
        ({"custom_mask": [True]}, TypeError, "custom_mask must be a NumPy array"),
        ({"packed_custom_mask": np.ones(1, np.uint8)}, UsageError, r"shape \(2\), got \(1,\)"),
        ({"pos_encoding_mode": "ROPE_LAMA"}, UsageError, "did you mean 'ROPE_LLAMA'"),
        ({"rope_theta": 5e5}, UsageError, "rope_theta is for pos_encoding_mode='ROPE_LLAMA'"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 0.0}, UsageError, "must be positive"),
        ({"window_left": -2}, UsageError, "window_left must be a number of keys, or -1"),
        ({"attention_chunk": -2}, UsageError, "attention_chunk must be a number of positions"),
        ({"lse_base": "10"}, UsageError, "unknown lse_base '10'"),
        ({"backend": "fa3"}, UsageError, "backend must be 'auto'"),
        ({"use_fp16_qk_reduction": True}, UsageError, "use_fp16_qk_reduction must be False"),
        ({"sinks": np.zeros(2, np.float32)}, UsageError, r"sinks must have shape \(4\)"),
        (
            {"scale_k": np.ones(3)},
            UsageError,
            "k_scale must be a number, or have one per query head",
        ),
        ({"o_dtype": "float64"}, UsageError, "unknown output dtype 'float64'"),
        ({"kv_format": "q8_0"}, TypeError, "in format q8_0 must have dtype uint8, got float32"),
        ({"kv_format": "q8_1"}, UsageError, "unknown kv_format 'q8_1'"),
        ({"out": Q[:1]}, UsageError, r"out must have shape \(2, 4, 16\)"),
        ({"lse": np.zeros(2, np.float32)}, UsageError, r"lse must have shape \(2, 4\)"),
    ],
)
def test_wrong_arguments_are_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": KV, "v": KV, **change}
    with pytest.raises(error, match=words):
        single_prefill_with_kv_cache(**arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qo_indptr": ints(1, 2, 3)}, "qo_indptr must start at 0"),
        ({"qo_indptr": ints(0, 2, 1)}, "qo_indptr must start at 0 and never fall"),
        ({"qo_indptr": ints(0, 2)}, r"qo_indptr must have shape \(3\)"),
        ({"paged_kv_indptr": ints(0, 2, 1)}, "kv_indptr must start at 0 and never fall"),
        ({"paged_kv_indptr": ints(0, 2, 4)}, r"kv_indptr must end within kv_indices \(3 entries\)"),
        ({"paged_kv_last_page_len": ints(1, 9)}, "request 1 must be 1..8 .* got 9 with 1 pages"),
        ({"paged_kv_last_page_len": ints(0, 1)}, "request 0 must be 1..8 .* got 0 with 2 pages"),
        ({"num_kv_heads": 3}, "num_qo_heads must be a multiple of num_kv_heads = 3, got 4"),
        ({"head_dim_qk": 0}, "must be positive"),
        ({"page_size": 0}, "page_size must be positive, got 0"),
    ],
)
def test_wrong_plans_are_named(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "qo_indptr": ints(0, 1, 2),
        "paged_kv_indptr": ints(0, 2, 3),
        "paged_kv_indices": ints(2, 0, 1),
        "paged_kv_last_page_len": ints(1, 2),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "page_size": 8,
    }
    BatchPrefillWithPagedKVCacheWrapper().plan(**arguments)
    with pytest.raises(UsageError, match=words):
        BatchPrefillWithPagedKVCacheWrapper().plan(**{**arguments, **change})


def test_wrong_runs_are_named() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    q, pages = np.zeros((2, 4, 16), np.float32), np.zeros((2, 8, 2, 16), np.float32)
    with pytest.raises(UsageError, match="run needs a plan"):
        wrapper.run(q, (pages, pages))
    wrapper.plan(ints(0, 1, 2), ints(0, 1, 2), ints(1, 0), ints(1, 2), 4, 2, 16, 8)
    with pytest.raises(UsageError, match=r"q must have shape \(2, 4, 16\)"):
        wrapper.run(q[:1], (pages, pages))
    with pytest.raises(UsageError, match=r"kv_indices must name pages 0..0 of the cache, got 1"):
        wrapper.run(q, (pages[:1], pages[:1]))
    with pytest.raises(UsageError, match="a pair of 4-D arrays or one 5-D array"):
        wrapper.run(q, pages)
    with pytest.raises(UsageError, match="keys and values must have the same pages"):
        wrapper.run(q, (pages, pages[:1]))
    with pytest.raises(TypeError, match=r"must have dtype float32, .* or float8, got uint8"):
        wrapper.run(q, (pages, pages.astype(np.uint8)))

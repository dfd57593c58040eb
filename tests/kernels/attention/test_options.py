"""Attention options: masks, biases, fused RoPE, sinks, head sizes, element formats."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal, store

from nbflow_kernels.attention import (
    BatchPrefillWithPagedKVCacheWrapper,
    reference,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from nbflow_kernels.attention.cases import ATOL
from nbflow_kernels.position import alibi_slopes

MIXED = [70, 1, 200, 0, 64, 130]  # keys of each request
NEW = [70, 1, 1, 0, 5, 3]  # query rows
ROWS = np.cumsum([0, *NEW]).astype(np.int32)
MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


def close(got: Any, want: Any, atol: float = ATOL) -> None:
    for found, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


GRID = list(
    product(
        [54, 97, 512], [1, 8, 16], [(4, 4), (32, 4)], [64, 128, 256], ["NHD", "HND"], MODES,
        [None, 30.0],
    )
)  # fmt: skip


@pytest.mark.parametrize("case", GRID[::37], ids=str)
def test_decode_over_flashinfers_grid(case: Any) -> None:
    n, page_size, (H, G), D, layout, mode, cap = case
    rng = np.random.default_rng(n + D)
    paged = Paged(rng, [n, n - 3, 1], (H, G, D), page_size, layout, np.float16)
    q = normal(rng, 3, H, D)
    options = {"pos_encoding_mode": mode, "logits_soft_cap": cap}
    got = paged.run(q, ints(0, 1, 2, 3), **options)
    want = paged.run(q, ints(0, 1, 2, 3), reference.BatchPrefillWithPagedKVCacheWrapper, **options)
    # The table of rotations is float32: scores are off by 2**-24 of their terms, whose sum over
    # D = 256 products of unit variance is about 16 * 16 * 2**-24 = 1.5e-5 at most, with scale / 16.
    close(got, want, 4 * ATOL if mode == "ROPE_LLAMA" else ATOL)


@pytest.mark.parametrize("heads", [(6, 2, 20), (7, 1, 80), (4, 4, 96), (5, 5, 100), (3, 1, 144)])
@pytest.mark.parametrize("dim_vo", [None, 48])
def test_any_head_size_and_values_of_another_size(
    heads: tuple[int, int, int], dim_vo: int | None
) -> None:
    rng = np.random.default_rng(5)
    for dtype in (np.float32, np.float16):
        paged = Paged(rng, MIXED, heads, 16, "HND", dtype, dim_vo=dim_vo)
        q = normal(rng, ROWS[-1], heads[0], heads[2])
        want = paged.run(q, ROWS, reference.BatchPrefillWithPagedKVCacheWrapper)
        close(paged.run(q, ROWS), want)


def test_deepseeks_sizes() -> None:
    rng = np.random.default_rng(6)
    q, k, v = normal(rng, 9, 4, 192), normal(rng, 130, 4, 192), normal(rng, 130, 4, 128)
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    want = reference.single_prefill_with_kv_cache(q, k, v, **options)
    close(single_prefill_with_kv_cache(q, k, v, **options), want)


def test_masks_of_a_batch_as_bytes_and_as_bits() -> None:
    rng = np.random.default_rng(7)
    paged = Paged(rng, MIXED, (4, 2, 32), 16)
    q = normal(rng, ROWS[-1], 4, 32)
    masks = [rng.random((m, n)) < 0.4 for m, n in zip(NEW, MIXED, strict=True)]
    masks[2][:] = False  # a row without visible keys
    flat = np.concatenate([mask.ravel() for mask in masks])
    packed = np.concatenate([np.packbits(mask, bitorder="little") for mask in masks])
    options = {"causal": False, "window_left": 100}
    got = paged.run(q, ROWS, custom_mask=flat, **options)
    cls = reference.BatchPrefillWithPagedKVCacheWrapper
    close(got, paged.run(q, ROWS, cls, custom_mask=flat, **options))
    assert got[1][ROWS[2]].tolist() == [-np.inf] * 4
    assert (got[0][ROWS[2]] == 0).all()
    # a mask replaces `causal`, packed bits take precedence
    for other in (
        paged.run(q, ROWS, packed_custom_mask=packed, causal=True, window_left=100),
        paged.run(q, ROWS, packed_custom_mask=packed, custom_mask=~flat, window_left=100),
    ):
        for a, b in zip(got, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_nan_that_a_mask_hides_among_the_keys_does_no_harm() -> None:
    rng = np.random.default_rng(8)
    q, k, v = normal(rng, 3, 2, 16), normal(rng, 40, 2, 16), normal(rng, 40, 2, 16)
    mask = np.ones((3, 40), bool)
    mask[:, 7] = False
    want = single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    k[7] = np.nan
    np.testing.assert_array_equal(single_prefill_with_kv_cache(q, k, v, custom_mask=mask), want)


@pytest.mark.parametrize("H", [1, 2, 6, 8, 12, 71])
def test_alibi_slopes_of_any_number_of_heads(H: int) -> None:
    np.testing.assert_array_equal(alibi_slopes(H), reference.alibi_slopes(H).astype(np.float32))
    assert len(set(alibi_slopes(H).tolist())) == H


def test_a_soft_cap_far_above_the_scores_costs_no_accuracy() -> None:
    rng = np.random.default_rng(15)
    q, k, v = normal(rng, 4, 2, 64), normal(rng, 60, 2, 64), normal(rng, 60, 2, 64)
    for cap in (0.1, 1.0, 30.0, 1e6):
        want = reference.single_prefill_with_kv_cache(q, k, v, logits_soft_cap=cap)
        close([single_prefill_with_kv_cache(q, k, v, logits_soft_cap=cap)], [want])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [(6, 2, 36), (12, 4, 64)])
def test_position_modes(mode: str, heads: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(9)
    paged = Paged(rng, MIXED, heads, 16)
    q = normal(rng, ROWS[-1], heads[0], heads[2])
    scales = {"rope_scale": 2.0, "rope_theta": 5e5} if mode == "ROPE_LLAMA" else {}
    options = {"pos_encoding_mode": mode, "logits_soft_cap": 8.0, "window_left": 90, **scales}
    want = paged.run(q, ROWS, reference.BatchPrefillWithPagedKVCacheWrapper, **options)
    close(paged.run(q, ROWS, **options), want, 4 * ATOL)  # float32 table of rotations


def test_sinks_take_part_in_the_softmax() -> None:
    rng = np.random.default_rng(10)
    paged = Paged(rng, MIXED, (6, 2, 32), 16)
    q, sinks = normal(rng, ROWS[-1], 6, 32), normal(rng, 6) * 2
    got = paged.run(q, ROWS, sinks=sinks)
    close(got, paged.run(q, ROWS, reference.BatchPrefillWithPagedKVCacheWrapper, sinks=sinks))
    # a row without keys: the sink has all the weight
    none = single_prefill_with_kv_cache(q[:1], paged.k[3], paged.v[3], sinks=sinks, return_lse=True)
    np.testing.assert_array_equal(none[0], np.zeros((1, 6, 32), np.float32))
    np.testing.assert_allclose(none[1][0], sinks / np.log(2), rtol=2e-7)  # one rounding
    # the next call without sinks does not use them
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    paged.plan(wrapper, ROWS)
    wrapper.run(q, paged.cache, sinks=sinks)
    np.testing.assert_array_equal(wrapper.run(q, paged.cache), paged.run(q, ROWS)[0])


def test_scales_of_all_heads_and_of_each() -> None:
    rng = np.random.default_rng(11)
    q, k, v = normal(rng, 5, 6, 32), normal(rng, 80, 3, 32), normal(rng, 80, 3, 32)
    per_q, per_k, per_v = rng.random(6) + 0.5, rng.random(3) + 0.5, rng.random(3) + 0.5
    scales: dict[str, Any] = {"scale_q": per_q, "scale_k": per_k, "scale_v": per_v, "k_scale": 0.5}
    want = reference.single_prefill_with_kv_cache(q, k, v, return_lse=True, **scales)
    close(single_prefill_with_kv_cache(q, k, v, return_lse=True, **scales), want, 2 * ATOL)
    got = single_decode_with_kv_cache(q[4], k, v, q_scale=2.0, k_scale=0.5, v_scale=3.0)
    plain = single_decode_with_kv_cache(q[4], k, v)
    np.testing.assert_allclose(got, 3 * plain, rtol=3e-7, atol=1e-7)  # one more rounding


def test_natural_logarithm_and_half_precision_results() -> None:
    rng = np.random.default_rng(12)
    q, k, v = normal(rng, 5, 4, 32), normal(rng, 80, 2, 32), normal(rng, 80, 2, 32)
    out, lse = single_prefill_with_kv_cache(q, k, v, return_lse=True)
    natural = single_prefill_with_kv_cache(q, k, v, return_lse=True, lse_base="e")[1]
    np.testing.assert_allclose(natural, lse * np.log(2), rtol=2e-7)  # two roundings
    half = single_prefill_with_kv_cache(q.astype(np.float16), k, v)
    assert half.dtype == np.float16
    again = single_prefill_with_kv_cache(q.astype(np.float16).astype(np.float32), k, v)
    np.testing.assert_array_equal(half, again.astype(np.float16))
    room = np.empty(q.shape, np.float16)
    assert single_prefill_with_kv_cache(q, k, v, o_dtype="float16", out=room) is room
    np.testing.assert_array_equal(room, out.astype(np.float16))


@pytest.mark.parametrize(
    "format", ["bf16", "f16", "f8_e4m3", "q8_0", "q4_0", "q5_1", "q8", "q6", "q3h", "q2"]
)
def test_every_kind_of_cache_gives_the_bits_of_its_decoded_rows(format: str) -> None:
    from nbflow_kernels.formats import FORMATS
    from nbflow_kernels.kv_cache.reference import decode

    rng = np.random.default_rng(13)
    explicit = FORMATS.short_names.get(format, format)
    paged = Paged(rng, MIXED, (4, 2, 64), 16, "HND", format=format)
    q = normal(rng, ROWS[-1], 4, 64)
    got = paged.run(q, ROWS)
    for i, n in enumerate(NEW):
        if n == 0:
            continue
        k, v = (
            (x.astype(np.uint32) << 16).view(np.float32)
            if format == "bf16"
            else decode(x, explicit, 64).astype(np.float32)
            for x in (paged.k[i], paged.v[i])
        )
        mine = slice(ROWS[i], ROWS[i + 1])
        want = single_prefill_with_kv_cache(q[mine], k, v, causal=True, return_lse=True)
        np.testing.assert_array_equal(got[0][mine], want[0])
        np.testing.assert_array_equal(got[1][mine], want[1])


def test_rows_of_bytes_in_a_single_call() -> None:
    rng = np.random.default_rng(14)
    q, k, v = normal(rng, 2, 4, 80), normal(rng, 30, 2, 80), normal(rng, 30, 2, 80)
    options: dict[str, Any] = {"kv_format": "q8_0", "causal": True}
    got = single_prefill_with_kv_cache(q, store(k, "q8_0"), store(v, "q8_0"), **options)
    want = single_prefill_with_kv_cache(q, k, v, causal=True)
    # q8_0 rounds to 1/254 of the largest of 32 numbers, about 2.5: 0.5% of a standard deviation
    assert np.abs(got - want).max() < 0.02

"""Attention over NVFP4 caches: the bits of the decoded float32 cache, in every wrapper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.reference import decode_nvfp4, encode_nvfp4

H, G, D, PAGE, LENS = 4, 2, 48, 4, (70, 9)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _encoded(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales and the numbers that they stand for."""
    codes, scales = encode_nvfp4(rng.standard_normal(shape, dtype=np.float32), 1.0)
    return codes, scales, decode_nvfp4(codes, scales).astype(np.float32)


def _table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = [-(-n // PAGE) for n in LENS]
    indices = np.random.default_rng(5).permutation(sum(counts)).astype(np.int32)
    last = [(n - 1) % PAGE + 1 for n in LENS]
    return np.cumsum([0, *counts]).astype(np.int32), indices, ints(*last)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{"causal": True}, {"pos_encoding_mode": "ROPE_LLAMA"}])
def test_prefill_has_the_bits_of_the_decoded_rows(
    rng: np.random.Generator, layout: str, options: dict[str, Any]
) -> None:
    """Also with views of one array that has codes and scales side by side."""
    q = rng.standard_normal((5, H, D), dtype=np.float32)
    shape = (70, G, D) if layout == "NHD" else (G, 70, D)
    (k, k_sf, k_numbers), (v, v_sf, v_numbers) = (_encoded(rng, *shape) for _ in "kv")
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 3.0, "kv_layout": layout, **options}
    wanted = nk.single_prefill_with_kv_cache(q, k_numbers, v_numbers, **scales)
    found = nk.single_prefill_with_kv_cache(q, k, v, kv_cache_sf=(k_sf, v_sf), **scales)
    np.testing.assert_array_equal(found, wanted)
    both = np.concatenate([k, k_sf, v, v_sf], axis=-1)
    parts = np.split(both, np.cumsum([D // 2, D // 16, D // 2]), axis=-1)
    found = nk.single_prefill_with_kv_cache(
        q, parts[0], parts[2], kv_cache_sf=(parts[1], parts[3]), **scales
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [True, False])
def test_paged_wrappers_have_the_bits_of_the_decoded_pages(
    rng: np.random.Generator, layout: str, joined: bool
) -> None:
    indptr, indices, last = _table()
    inner = (PAGE, G) if layout == "NHD" else (G, PAGE)
    parts = [_encoded(rng, len(indices), *inner, D) for _ in "kv"]
    pages: Any
    scales: Any
    pages, scales, numbers = (tuple(part) for part in zip(*parts, strict=True))
    if joined:
        pages, scales = np.stack(pages, 1), np.stack(scales, 1)
    q = rng.standard_normal((5, H, D), dtype=np.float32)
    prefill = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout=layout)
    prefill.plan(ints(0, 3, 5), indptr, indices, last, H, G, D, PAGE, causal=True)
    mixed = nk.BatchAttention(layout)
    mixed.plan(ints(0, 3, 5), indptr, indices, ints(*LENS), H, G, D, D, PAGE, causal=True)
    decode = nk.BatchDecodeWithPagedKVCacheWrapper(kv_layout=layout)
    decode.plan(indptr, indices, last, H, G, D, PAGE)
    for wrapper, rows in ((prefill, q), (mixed, q), (decode, q[:2])):
        wanted = wrapper.run(rows, numbers, v_scale=3.0)
        found = wrapper.run(rows, pages, v_scale=3.0, kv_cache_sf=scales)
        again = wrapper.run(rows, numbers, v_scale=3.0)  # without the scales of the last run
        results = (r[0] if isinstance(r, tuple) else r for r in (wanted, found, again))
        first, *others = results
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_rows_and_long_divided_ones(rng: np.random.Generator, layout: str) -> None:
    lens = (5000, 3)
    shape = (sum(lens), G, 32) if layout == "NHD" else (G, sum(lens), 32)
    (k, k_sf, k_numbers), (v, v_sf, v_numbers) = (_encoded(rng, *shape) for _ in "kv")
    q = rng.standard_normal((3, H, 32), dtype=np.float32)
    wrapper = nk.BatchPrefillWithRaggedKVCacheWrapper(kv_layout=layout)
    wrapper.plan(ints(0, 1, 3), ints(0, lens[0], sum(lens)), H, G, 32, causal=True)
    wanted = wrapper.run(q, k_numbers, v_numbers, return_lse=True)
    found = wrapper.run(q, k, v, return_lse=True, kv_cache_sf=(k_sf, v_sf))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_append_then_attend(rng: np.random.Generator) -> None:
    """A cache written by the append is as near to the numbers as 4 bits allow."""
    indptr, indices, last = _table()
    key, value = rng.standard_normal((2, sum(LENS), G, D), dtype=np.float32)
    requests, positions = nk.get_batch_indices_positions(
        ints(0, LENS[0], sum(LENS)), ints(*LENS), sum(LENS)
    )
    pages = np.zeros((len(indices), 2, PAGE, G, D // 2), np.uint8)
    scales = np.zeros((len(indices), 2, PAGE, G, D // 16), np.uint8)
    tables = (indices, indptr, last)
    nk.nvfp4_quantize_append_paged_kv_cache(
        key, value, requests, positions, pages, scales, *tables, 0.001, 0.002
    )
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(indptr, indices, last, H, G, D, PAGE)
    q = rng.standard_normal((2, H, D), dtype=np.float32)
    found = wrapper.run(q, pages, k_scale=0.001, v_scale=0.002, kv_cache_sf=scales)
    for b, start in enumerate((0, LENS[0])):
        rows = slice(start, start + LENS[b])
        wanted = nk.single_decode_with_kv_cache(q[b], key[rows], value[rows])
        # a number is off by up to 1/6 of its block's largest, here below 3: rms 0.1 for values, and
        # scores of 1 that are off by 0.1 change weights by a tenth; sums of 9 or more keys
        np.testing.assert_allclose(found[b], wanted, atol=0.3)
        assert np.abs(found[b] - wanted).max() > 1e-3


def test_wrong_scales_are_refused(rng: np.random.Generator) -> None:
    q = np.ones((1, 1, 32), np.float32)
    k, sf = np.zeros((3, 1, 16), np.uint8), np.zeros((3, 1, 2), np.uint8)

    def call(scales: Any, **options: Any) -> Any:
        return nk.single_prefill_with_kv_cache(q, k, k, kv_cache_sf=scales, **options)

    with pytest.raises(UsageError, match=r"kv_cache_sf \(v\) must have shape \(3, 1, 2\)"):
        call((sf, sf[:2]))
    with pytest.raises(UsageError, match="kv_cache_sf must be a pair"):
        call(sf)
    with pytest.raises(UsageError, match="kv_cache_sf is for NVFP4 caches, got kv_format='q8_0'"):
        call((sf, sf), kv_format="q8_0")
    q = q[..., :24]
    with pytest.raises(UsageError, match="head sizes that are multiples of 16, got 24"):
        call((sf, sf))
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(ints(0, 1), ints(0), ints(2), 1, 1, 32, 2)
    pages, scales = np.zeros((1, 2, 2, 1, 16), np.uint8), np.zeros((2, 2, 2, 1, 2), np.uint8)
    with pytest.raises(UsageError, match="codes and scales must have the same pages"):
        wrapper.run(np.ones((1, 1, 32), np.float32), pages, kv_cache_sf=scales)

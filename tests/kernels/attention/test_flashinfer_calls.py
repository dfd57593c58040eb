"""Calls that FlashInfer has: multi-item scoring, second names, strides and axes of caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError

H, G, D, PREFIX = 4, 2, 32, 5
LENS = (3, 1, 4)
"""Tokens of the items."""


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _positions() -> np.ndarray:
    """Return a delimiter and the tokens of each item, then the last delimiter."""
    return ints(*(i for n in LENS for i in range(n + 1)), 0)


def _planned(wrapper: Any, n_rows: int, **options: Any) -> Any:
    """Plan two requests with the same items; the first has all rows, the second its last two."""
    positions, padded = _positions(), 20
    n_keys = PREFIX + len(positions)
    items = np.zeros(2 * padded, np.uint16)
    items[: len(positions)] = items[padded : padded + len(positions)] = positions
    given = {
        "prefix_len_ptr": np.array([PREFIX, PREFIX], np.uint32), "token_pos_in_items_ptr": items,
        "token_pos_in_items_len": padded, "max_item_len_ptr": ints(4, 4), "causal": True, **options,
    }  # fmt: skip
    rows = ints(0, n_rows, n_rows + 2)
    if isinstance(wrapper, nk.BatchPrefillWithRaggedKVCacheWrapper):
        wrapper.plan(rows, ints(0, n_keys, 2 * n_keys), H, G, D, **given)
    else:
        pages = np.arange(2 * n_keys, dtype=np.int32)
        wrapper.plan(rows, ints(0, n_keys, 2 * n_keys), pages, ints(1, 1), H, G, D, 1, **given)
    return n_keys


@pytest.mark.parametrize("ragged", [True, False])
def test_an_item_has_the_result_of_the_prompt_and_the_item_alone(
    rng: np.random.Generator, ragged: bool
) -> None:
    n_keys = PREFIX + len(_positions())
    q = rng.standard_normal((n_keys + 2, H, D), dtype=np.float32)
    k, v = rng.standard_normal((2, n_keys, G, D), dtype=np.float32)
    keys, values = np.concatenate([k, k]), np.concatenate([v, v])
    if ragged:
        wrapper: Any = nk.BatchPrefillWithRaggedKVCacheWrapper()
        _planned(wrapper, n_keys)
        found = wrapper.run(q, keys, values)
    else:
        wrapper = nk.BatchPrefillWithPagedKVCacheWrapper()
        _planned(wrapper, n_keys)
        found = wrapper.run(q, (keys[:, None], values[:, None]))
    prompt = np.arange(PREFIX)
    for row in range(PREFIX):
        wanted = nk.single_decode_with_kv_cache(q[row], k[: row + 1], v[: row + 1])
        np.testing.assert_allclose(found[row], wanted, atol=3e-6)  # of `attention.cases`
    start = PREFIX
    for n in LENS:
        for i in range(n + 1):  # the delimiter first: it sees the prompt only
            seen = np.concatenate([prompt, np.arange(start + 1, start + i + 1)])
            wanted = nk.single_decode_with_kv_cache(q[start + i], k[seen], v[seen])
            np.testing.assert_allclose(found[start + i], wanted, atol=3e-6)
        start += n + 1
    q2 = q[n_keys:]
    seen = np.concatenate([prompt, np.arange(n_keys - 5, n_keys - 1)])  # the whole last item
    wanted = nk.single_decode_with_kv_cache(q2[0], k[seen], v[seen])
    np.testing.assert_allclose(found[n_keys], wanted, atol=3e-6)
    wanted = nk.single_decode_with_kv_cache(q2[1], k[prompt], v[prompt])
    np.testing.assert_allclose(found[n_keys + 1], wanted, atol=3e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False}, "needs causal=True"),
        ({"prefix_len_ptr": None}, "needs prefix_len_ptr and token_pos_in_items_ptr"),
        ({"max_item_len_ptr": ints(4, 3)}, "max_item_len_ptr of request 1 .* 4, got 3"),
        ({"token_pos_in_items_len": 5}, "a position for each of the 12 tokens .* request 0"),
        ({"custom_mask": np.ones(1, bool)}, "prefix_len_ptr makes a custom_mask"),
    ],
)
def test_inconsistent_items_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _planned(nk.BatchPrefillWithPagedKVCacheWrapper(), 17, **options)


def test_flashinfers_other_names_are_the_same_functions(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((3, n, D), dtype=np.float32) for n in (H, G, G))
    wanted = nk.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    wrapper = nk.BatchPrefillWithRaggedKVCacheWrapper()
    wrapper.begin_forward(ints(0, 3), ints(0, 3), H, G, D, causal=True)
    for found in (
        nk.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True),
        (wrapper.forward(q, k, v), wanted[1]),
        wrapper.forward_return_lse(q, k, v),
    ):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match="causal"):  # an option of FlashInfer's `forward`
        wrapper.forward(q, k, v, causal=False)
    assert nk.mla_rope_quantize_fp8 is nk.rope_quantize_fp8


def test_fast_decode_plan_may_be_the_plan_of_an_instance(rng: np.random.Generator) -> None:
    q = rng.standard_normal((2, H, D), dtype=np.float32)
    pages = rng.standard_normal((3, 2, 4, G, D), dtype=np.float32)
    wrapper: Any = nk.BatchDecodeWithPagedKVCacheWrapper()
    tables = (ints(0, 2, 3), ints(2, 0, 1), ints(1, 4), H, G, D, 4)
    wrapper.plan(*tables)
    wanted = wrapper.run(q, pages)
    wrapper.plan = lambda *given, **more: nk.fast_decode_plan(wrapper, *given, **more)
    wrapper.plan(ints(0, 0, 0), *tables[1:], global_override_indptr_cpu=tables[0])
    np.testing.assert_array_equal(wrapper.run(q, pages), wanted)
    wrapper.plan(*tables, "NONE", 2)
    assert np.abs(wrapper.run(q, pages) - wanted).max() > 1e-3  # a window of 3 keys


def test_keys_and_values_may_have_strides_of_their_own(rng: np.random.Generator) -> None:
    """On the CPU: pages of keys and of values that are parts of wider arrays."""
    q = rng.standard_normal((2, H, D), dtype=np.float32)
    k, v = rng.standard_normal((2, 3, 4, G, D), dtype=np.float32)
    wide_k, wide_v = np.full((3, 4, G + 1, D + 16), np.nan, np.float32), np.zeros((3, 9, G, D))
    wide_v = wide_v.astype(np.float32)
    wide_k[:, :, :G, :D], wide_v[:, 2:6] = k, v
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(1, 4), H, G, D, 4)
    found = wrapper.run(q, (wide_k[:, :, :G, :D], wide_v[:, 2:6]))
    np.testing.assert_array_equal(found, wrapper.run(q, (k, v)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token_may_have_three_axes(rng: np.random.Generator, layout: str) -> None:
    q = rng.standard_normal((2, H, D), dtype=np.float32)
    rows = rng.standard_normal((2, 2, G, D), dtype=np.float32)
    k, v = np.zeros((2, 5, G, D), np.float32)
    nk.append_paged_kv_cache(
        rows[0], rows[1], ints(0, 1), ints(1, 0), (k, v), ints(4, 0, 2), ints(0, 2, 3), ints(1, 1),
        layout,
    )  # fmt: skip
    np.testing.assert_array_equal(k[[0, 2]], rows[0])
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(kv_layout=layout)
    wrapper.plan(ints(0, 2, 3), ints(4, 0, 2), ints(1, 1), H, G, D, 1)
    axis = 1 if layout == "NHD" else 2
    whole = np.expand_dims(k, axis), np.expand_dims(v, axis)
    np.testing.assert_array_equal(wrapper.run(q, (k, v)), wrapper.run(q, whole))
    wrapper.plan(ints(0, 1, 2), ints(4, 0), ints(2, 2), H, G, D, 2)
    with pytest.raises(UsageError, match="must have shape"):
        wrapper.run(q, (k, v))

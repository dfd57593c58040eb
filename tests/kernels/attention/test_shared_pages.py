"""Items of several requests with a common prefix of pages have the bits of single requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

from nbflow_kernels.attention import (
    AttentionPlan,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from nbflow_kernels.cpu.parallel_for import set_num_threads

PAGE = 16
LENS = [150, 131, 140, 70, 220, 205, 9]  # 6 sequences with common prefixes, and one without
SHARED = [0, 128, 128, 64, 0, 192, 0]
"""Length of the prefix that each request shares with the one before."""


def begin_alike(paged: Paged, shared: list[int]) -> Paged:
    """Replace the first pages of requests by those of the request before."""
    indptr, indices, _ = paged.table
    for b, n_keys in enumerate(shared):
        n = n_keys // paged.page_size
        if n:
            indices[indptr[b] : indptr[b] + n] = indices[indptr[b - 1] : indptr[b - 1] + n]
    return paged


def column(plan: AttentionPlan, name: str) -> list[int]:
    return plan.items[:, plan.COLUMNS.index(name)].tolist()


def both_ways(paged: Paged, q: np.ndarray, rows: np.ndarray, **options: Any) -> AttentionPlan:
    """Compare shared items with one item per request, bit for bit; return the plan."""
    results = []
    for off in (True, False):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(kv_layout=paged.layout)
        plan = paged.plan(wrapper, rows, disable_page_sharing=off, **options)
        assert any(column(plan, "shared")) is not off
        results.append(wrapper.run(q, paged.cache, return_lse=True))
    for alone, together in zip(*results, strict=True):
        assert np.isfinite(alone).all()
        np.testing.assert_array_equal(alone.view(np.uint32), together.view(np.uint32))
    return plan


@pytest.mark.parametrize("format", [None, "f16", "q8_0"])
@pytest.mark.parametrize("heads", [(2, 2, 32), (8, 2, 32)])
def test_bits_are_those_of_requests_read_one_by_one(
    heads: tuple[int, int, int], format: str | None
) -> None:
    rng = np.random.default_rng(0)
    dtype = np.float16 if format == "f16" else np.float32
    kv_format = format if format == "q8_0" else None
    paged = begin_alike(Paged(rng, LENS, heads, PAGE, "HND", dtype, format=kv_format), SHARED)
    q = normal(rng, len(LENS), heads[0], 32)
    for threads in (1, 2):
        set_num_threads(threads)
        plan = both_ways(paged, q, np.arange(len(LENS) + 1, dtype=np.int32))
        first = plan.items[plan.items[:, plan.COLUMNS.index("kv_head")] == 0]
        assert first[:, plan.COLUMNS.index("shared")].tolist() == [128, 0, 192, 0]
        assert first[:, plan.COLUMNS.index("n_rows")].tolist() == [3, 1, 2, 1]


def test_rows_of_a_verification_and_splits_go_together_too() -> None:
    rng, heads = np.random.default_rng(1), (4, 4, 16)
    paged = begin_alike(Paged(rng, LENS, heads, PAGE), SHARED)
    rows = ints(0, 3, 4, 7, 8, 10, 13, 13)
    set_num_threads(2)
    q = normal(rng, 13, 4, 16)
    for pages in (2, 3, 4, 8, 100):  # splits of 32, 48, 64, 128 keys, or none
        for causal in (True, False):
            plan = both_ways(
                paged, q, rows, causal=causal, fixed_split_size=pages, logits_soft_cap=20.0
            )
            assert column(plan, "n_rows")[0] == 3 + 1 + 3


def test_only_whole_chunks_that_all_rows_see_are_shared() -> None:
    """Prefixes are whole chunks of 64 keys; the last key is never shared."""
    paged = begin_alike(
        Paged(np.random.default_rng(2), [80, 80, 64, 64], (1, 1, 16), PAGE), [0, 80, 64, 64]
    )

    def shared(*rows: int, **options: Any) -> list[int]:
        wrapper = BatchPrefillWithPagedKVCacheWrapper()
        return column(paged.plan(wrapper, ints(*rows), **options), "shared")

    set_num_threads(1)
    assert shared(0, 1, 2, 3, 4) == [64, 0, 0]
    assert shared(0, 1, 18, 19, 20) == [64, 0, 0]  # the first of 17 rows sees 64 keys
    assert shared(0, 1, 19, 20, 21) == [0, 0, 0, 0]  # the first of 18 rows sees 63
    assert shared(0, 1, 19, 20, 21, causal=False) == [64, 0, 0]
    assert shared(0, 20, 33, 34, 35, causal=False) == [0, 0, 0, 0]  # more than 32 query vectors


def test_who_goes_together_saves_the_most_and_leaves_no_thread_idle() -> None:
    paged = begin_alike(
        Paged(np.random.default_rng(3), [300, 300, 80, 90], (1, 1, 16), PAGE), [0, 256, 64, 64]
    )
    wrapper = BatchDecodeWithPagedKVCacheWrapper()

    def items(threads: int) -> list[tuple[int, int]]:
        set_num_threads(threads)
        plan = wrapper.plan(*paged.table, 1, 1, 16, PAGE)
        return list(zip(column(plan, "n_rows"), column(plan, "shared"), strict=True))

    assert items(1) == [(2, 256), (2, 64)]
    assert items(2) == [(2, 256), (2, 64)]
    assert items(4) == [(1, 0)] * 4


def test_long_keys_are_divided_among_threads_rather_than_shared() -> None:
    paged = begin_alike(
        Paged(np.random.default_rng(5), [300] * 4, (1, 1, 16), PAGE), [0, 256, 256, 256]
    )
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    for threads, pages, shared in ((1, 2, 256), (2, 2, 0), (2, 4, 256)):  # 44 own keys, 32 or 64
        set_num_threads(threads)
        plan = paged.plan(wrapper, ints(0, 1, 2, 3, 4), fixed_split_size=pages)
        assert set(column(plan, "shared")) == {shared}


def test_what_depends_on_the_request_is_not_shared() -> None:
    rng = np.random.default_rng(4)
    paged = begin_alike(Paged(rng, [80, 90], (2, 1, 16), PAGE), [0, 64])
    set_num_threads(1)
    for options in (
        {"window_left": 70}, {"pos_encoding_mode": "ALIBI"}, {"pos_encoding_mode": "ROPE_LLAMA"},
        {"custom_mask": rng.random(170) < 0.5, "causal": False}, {"variant": _Plain},
    ):  # fmt: skip
        plan = paged.plan(BatchPrefillWithPagedKVCacheWrapper(), ints(0, 1, 2), **options)
        assert column(plan, "shared") == [0, 0]


class _Plain:
    """A variant without effect."""

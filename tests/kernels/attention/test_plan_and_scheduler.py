"""Plans and schedules: every row once, shares, splits, and bits independent of the schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

from nbflow_kernels.attention import (
    AttentionPlan,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    reference,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from nbflow_kernels.attention.cases import ATOL
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.cpu.scheduler import ITEM_COST, KEY_COST, SPLITS_PER_THREAD
from nbflow_kernels.attention.plan import plan_into
from nbflow_kernels.attention.plan_layout import SPLIT
from nbflow_kernels.cpu.parallel_for import capture, set_num_threads
from nbflow_kernels.kv_cache.cases import page_table

MIXED = [70, 1, 200, 0, 64, 130]  # keys of each request
NEW = [70, 1, 1, 0, 5, 3]  # query rows
ROWS = np.cumsum([0, *NEW]).astype(np.int32)


def column(plan: AttentionPlan, name: str) -> list[int]:
    return plan.items[:, plan.COLUMNS.index(name)].tolist()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_row_and_head_is_worked_on_once(threads: int) -> None:
    set_num_threads(threads)
    paged = Paged(np.random.default_rng(1), MIXED, (6, 3, 16), 16)
    plan = paged.plan(BatchPrefillWithPagedKVCacheWrapper(), ROWS, window_left=90)
    seen = np.zeros((ROWS[-1], 3, 200), int)
    assert not any(column(plan, "shared"))
    items = plan.items[:, :9].tolist()
    for request, row, n_rows, head, position, first, end, partial, cost in items:
        assert ROWS[request] <= row
        assert row + n_rows <= ROWS[request + 1]
        assert position == MIXED[request] - NEW[request] + row - ROWS[request]
        assert (first, end) == (max(0, position - 90), min(MIXED[request], position + n_rows))
        assert partial == -1
        assert cost > 0
        seen[row : row + n_rows, head, first:end] += 1
    for request, (a, b) in enumerate(pairwise(ROWS)):
        for row in range(a, b):
            position = MIXED[request] - b + row
            assert (seen[row, :, max(0, position - 90) : position + 1] == 1).all()
    assert plan.shares.tolist() == sorted(plan.shares.tolist())
    assert (plan.shares[0], plan.shares[-1]) == (0, plan.n_items)
    assert len(plan.shares) == threads + 1


def test_plan_of_a_decode_step_is_one_item_per_request_and_head() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    plan = wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(1, 2), 4, 2, 16, 8)
    assert column(plan, "kv_head") == [0, 1, 0, 1]
    assert column(plan, "request") == [0, 0, 1, 1]
    assert column(plan, "end_key") == [9, 9, 2, 2]
    assert column(plan, "position") == [8, 8, 1, 1]
    assert plan.work == (9 + 2) * 4 * (16 + 16)
    set_num_threads(2)
    text = str(wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(1, 2), 4, 2, 16, 8))
    head, names, first, *rest = text.splitlines()
    assert head == (
        "<AttentionPlan of 2 requests, 2 query rows, 11 keys, 4/2 heads of 16/16: 4 items in 2 "
        "shares, 0 merges>"
    )
    assert names.split() == ["share", *AttentionPlan.COLUMNS]
    assert first.split()[:4] == ["0", "0", "0", "1"]
    assert rest[-1].split()[0] == "1"


def test_shares_are_about_equal_in_cost() -> None:
    set_num_threads(4)
    plan = AttentionPlan((8, 2, 64, 64), 512, kv_layout="HND", sm_scale=1.0)
    plan_into(plan, ints(0, 512, 513), ints(0, 1, 2), ints(0, 1), ints(512, 300))
    cost = np.array(column(plan, "cost"))
    shares = [int(cost[a:b].sum()) for a, b in pairwise(plan.shares)]
    assert len(shares) == 4
    assert max(shares) - min(shares) <= 2 * cost.max()


@pytest.mark.parametrize("lens", [[3500], [40_000], [9000, 1, 2048, 64], [700] * 32])
@pytest.mark.parametrize("G", [1, 4, 32])
def test_decode_is_divided_evenly_among_1_to_128_threads(lens: list[int], G: int) -> None:
    """Plans only: every key once, and no share above an equal one by more than an item."""
    pages = np.arange(sum(-(-n // 16) for n in lens), dtype=np.int32)
    indptr = np.cumsum([0, *(-(-n // 16) for n in lens)]).astype(np.int32)
    rows, longest = np.arange(len(lens) + 1, dtype=np.int32), []
    for threads in range(1, 129):
        set_num_threads(threads)
        plan = AttentionPlan((4 * G, G, 64, 64), 16, kv_layout="HND")
        plan_into(plan, rows, indptr, pages, ints(*lens))
        names = ("request", "kv_head", "first_key", "end_key", "cost")
        request, head, first, end, cost = (np.array(column(plan, name)) for name in names)
        order = np.lexsort((first, head, request))
        starts, ends = first[order].reshape(-1), end[order].reshape(-1)
        begins = starts == 0
        assert begins.sum() == G * len(lens)
        assert (starts[~begins] == ends[:-1][~begins[1:]]).all()
        assert (starts % SPLIT == 0).all()
        assert ends[np.append(begins[1:], True)].tolist() == np.repeat(lens, G).tolist()
        # tiles above a quantum are split as far as the bits allow
        quantum = cost.sum() // (SPLITS_PER_THREAD * threads) + ITEM_COST
        assert cost.max() <= max(quantum, SPLIT * (4 + KEY_COST) + ITEM_COST) or threads == 1
        shares = np.array([cost[a:b].sum() for a, b in pairwise(plan.shares)])
        assert (len(shares), shares.sum()) == (min(threads, plan.n_items), cost.sum())
        assert shares.min() > 0
        assert shares.max() <= cost.sum() / threads + cost.max()
        longest.append(shares.max())
    assert longest[0] == max(longest)
    assert longest[-1] <= longest[0] / min(128, plan.n_items) + cost.max()


def long_sequence(n: int) -> Paged:
    return Paged(np.random.default_rng(2), [n], (2, 1, 16), 64, "HND", np.float32)


def test_long_keys_are_divided_and_the_bits_do_not_change() -> None:
    n = 2 * SPLIT + 300
    paged = long_sequence(n)
    q = normal(np.random.default_rng(3), 3, 2, 16)
    rows, results, plans = ints(0, 3), [], []
    for threads in (1, 2, 7):
        set_num_threads(threads)
        for off in (False, True):
            wrapper = BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
            plans.append(paged.plan(wrapper, rows, disable_split_kv=off))
            results.append(wrapper.run(q, paged.cache, return_lse=True))
    assert [plan.n_items for plan in plans] == [1, 1, 3, 1, 3, 1]
    assert [plan.n_merges for plan in plans] == [0, 0, 1, 0, 1, 0]
    assert column(plans[2], "first_key") == [0, SPLIT, 2 * SPLIT]
    assert column(plans[2], "partial") == [0, 6, 12]
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    want = paged.run(q, rows, reference.BatchPrefillWithPagedKVCacheWrapper)
    np.testing.assert_allclose(results[0][0], want[0], rtol=0, atol=ATOL)
    np.testing.assert_allclose(results[0][1], want[1], rtol=0, atol=ATOL)


@pytest.mark.parametrize("options", [{}, {"window_left": 100}, {"logits_soft_cap": 3.0}])
def test_prefill_over_splits_has_the_bits_of_decode(options: dict[str, Any]) -> None:
    """Small splits: rows of a tile see different numbers of them."""
    rng = np.random.default_rng(4)
    paged = Paged(rng, [200], (4, 2, 32), 8)
    q = normal(rng, 200, 4, 32)
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    paged.plan(
        wrapper, ints(0, 200), fixed_split_size=3, **options
    )  # 24 keys, not a multiple of a chunk
    whole, lse = wrapper.run(q, paged.cache, return_lse=True)
    want = paged.run(q, ints(0, 200), reference.BatchPrefillWithPagedKVCacheWrapper, **options)
    np.testing.assert_allclose(whole, want[0], rtol=0, atol=ATOL)
    indices = paged.table[1]
    decode = BatchDecodeWithPagedKVCacheWrapper()
    for threads in (1, 3):
        set_num_threads(threads)
        for row in (0, 23, 24, 70, 199):
            decode.plan(ints(0, row // 8 + 1), indices, ints(row % 8 + 1), 4, 2, 32, 8,
                        fixed_split_size=3, **options)  # fmt: skip
            one, one_lse = decode.run(q[row : row + 1], paged.cache, return_lse=True)
            np.testing.assert_array_equal(one[0], whole[row])
            np.testing.assert_array_equal(one_lse[0], lse[row])


def test_sinks_and_scales_reach_the_merged_rows() -> None:
    rng = np.random.default_rng(5)
    paged, q = long_sequence(SPLIT + 50), normal(rng, 1, 2, 16)
    sinks = np.array([0.5, 30.0], np.float32)
    results = []
    for threads in (1, 2):
        set_num_threads(threads)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
        plan = paged.plan(wrapper, ints(0, 1))
        assert plan.n_merges == threads - 1
        results.append(wrapper.run(q, paged.cache, sinks=sinks, v_scale=2.0, return_lse=True))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    options = {"sinks": sinks}
    want = paged.run(q, ints(0, 1), reference.BatchPrefillWithPagedKVCacheWrapper, **options)
    np.testing.assert_allclose(results[0][0], 2 * want[0], rtol=0, atol=2 * ATOL)


def test_nan_in_one_split_reaches_the_result() -> None:
    paged = long_sequence(2 * SPLIT + 10)
    q = normal(np.random.default_rng(6), 1, 2, 16)
    place = paged.table[1][SPLIT // 64]  # the page of the second split's first key
    paged.cache[0][place, 0, 5, 3] = np.nan
    for threads in (1, 2):
        set_num_threads(threads)
        assert np.isnan(paged.run(q, ints(0, 1))[0]).all()


def test_memory_of_a_plan_grows_with_the_length_not_with_its_square() -> None:
    set_num_threads(8)
    sizes = []
    for n in (8192, 16384, 32768):
        plan = AttentionPlan((8, 2, 64, 64), n, kv_layout="HND", sm_scale=1.0)
        plan_into(plan, ints(0, n), ints(0, 1), ints(0), ints(n))
        sizes.append(plan._items.nbytes + plan._partials.nbytes)
    assert sizes[2] - sizes[1] <= 2.2 * (sizes[1] - sizes[0])


def test_a_plan_is_filled_again_and_a_captured_call_follows_it() -> None:
    set_num_threads(1)
    paged = Paged(np.random.default_rng(7), [40], (4, 2, 16), 8, "HND", np.float16)
    q, out = normal(np.random.default_rng(8), 1, 4, 16), np.empty((1, 4, 16), np.float32)
    plan = AttentionPlan((4, 2, 16, 16), 8, kv_layout="HND", sm_scale=0.25)
    indices = paged.table[1]
    tables = [(ints(0, 1), ints(0, (n + 7) // 8), indices, ints(n)) for n in (1, 17, 40)]
    plan_into(plan, *tables[0])
    launch.attend(plan, q, *paged.cache, out, None)
    with capture() as seen:
        launch.attend(plan, q, *paged.cache, out, None)
    assert len(seen.calls) == 1
    for table in tables:
        assert plan_into(plan, *table) == 2
        seen.calls[0]()
        k, v = (rows[0][: table[3][0]] for rows in (paged.k, paged.v))
        want = single_decode_with_kv_cache(q[0], k, v, sm_scale=0.25)
        np.testing.assert_array_equal(out[0], want)


def test_tables_grow_when_a_step_needs_more_items() -> None:
    rng = np.random.default_rng(9)
    lens = [5] * 60
    indptr, indices, last = page_table(rng, lens, 8)
    plan = AttentionPlan((4, 4, 16, 16), 8, sm_scale=0.25)
    rows = np.arange(61, dtype=np.int32)
    assert plan_into(plan, rows, indptr, indices, np.array(lens, np.int32)) == 240
    assert sorted(set(column(plan, "request"))) == list(range(60))
    pages = normal(rng, len(indices), 8, 4, 16)
    q, out = normal(rng, 60, 4, 16), np.empty((60, 4, 16), np.float32)
    launch.attend(plan, q, pages, pages, out, None)
    k = pages[indices[indptr[59]]][:5]
    np.testing.assert_array_equal(out[59], single_decode_with_kv_cache(q[59], k, k, sm_scale=0.25))
    assert last[59] == 5


def test_one_query_row_of_many_heads() -> None:
    rng = np.random.default_rng(10)
    q, k = normal(rng, 2, 71, 64), normal(rng, 90, 1, 64)  # more heads than a tile holds rows
    got = single_prefill_with_kv_cache(q, k, k, causal=True)
    want = reference.single_prefill_with_kv_cache(q, k, k, causal=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)

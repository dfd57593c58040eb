"""Attention wrappers on device arrays: against float64, and bit for bit among kernels."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

import nbflow_kernels as nk
from nbflow_kernels.attention import cuda as kernels
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention import reference, single
from nbflow_kernels.attention.cuda.scheduler import Tiling, schedule
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.cuda import device_of
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.cpu_codec import F16

ATOL = 3e-6  # `attention.cases` derives it: float32 all the way
# Queries and weights in float16: a score, a dot product of unit variance, is off by 2**-12 times
# its size, below 4: 1e-3 of a weight at most, and the weights of a sum are off independently; a
# result, below 5 / sqrt(50 keys) away from its mean, 2e-4; float16 results add 2**-12 * 2.
HALF_ATOL = 1e-3
# Keys and values of block formats become float16 on the way: the same once more.
BLOCK_ATOL = 2e-3


def rows_of(qo_indptr: np.ndarray, i: int) -> slice:
    return slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))


def check(paged: Paged, q: np.ndarray, qo_indptr: np.ndarray, got: Any, atol: float) -> None:
    """Compare results and LSE on a device with the reference, request by request."""
    out, lse = (a.get() for a in got)
    for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True)):
        if not qo_indptr[i + 1] - qo_indptr[i]:
            continue
        want = reference.single_prefill_with_kv_cache(
            q[rows_of(qo_indptr, i)], k, v, causal=True, return_lse=True, **paged.format
        )
        values = want[0][..., : out.shape[2]]  # those of a block format are padded to whole blocks
        np.testing.assert_allclose(out[rows_of(qo_indptr, i)], values, rtol=0, atol=atol)
        np.testing.assert_allclose(lse[rows_of(qo_indptr, i)], want[1], rtol=0, atol=atol)


def on_device(xp: Any, paged: Paged) -> Paged:
    paged.cache = tuple(xp.asarray(pages) for pages in paged.cache)  # type: ignore[assignment]
    return paged


LENS, ROWS = [33, 1, 150, 0], ints(0, 20, 21, 22, 22)


@pytest.mark.parametrize(
    ("layout", "dtype", "q_dtype", "sizes"),
    [
        ("NHD", np.float32, np.float32, (6, 2, 20)),  # fallback kernel
        ("HND", np.float16, np.float32, (6, 2, 64)),  # the others: tensor cores
        ("NHD", np.float16, np.float16, (6, 2, 64)),
    ],
)
def test_mixed_batch_on_pages(
    xp: Any, layout: str, dtype: Any, q_dtype: Any, sizes: tuple[int, int, int]
) -> None:
    rng = np.random.default_rng(1)
    paged = on_device(xp, Paged(rng, LENS, sizes, 16, layout, dtype))
    q = normal(rng, 22, sizes[0], sizes[2]).astype(q_dtype)
    table = paged.table
    # page tables may lie on the device too
    paged.table = tuple(xp.asarray(a) for a in table)  # type: ignore[assignment]
    got = paged.run(xp.asarray(q), xp.asarray(ROWS))
    assert got[0].dtype == q_dtype
    check(paged, q, ROWS, got, ATOL if q_dtype == np.float32 else HALF_ATOL)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_row_has_the_same_bits_in_any_batch_tile_and_division(xp: Any, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    sizes, lens = (4, 2, 32), [200, 20, 150]
    paged = on_device(xp, Paged(rng, lens, sizes, 16, "HND", dtype))
    q, rows = normal(rng, 60, 4, 32), ints(0, 30, 40, 60)
    together, _ = paged.run(xp.asarray(q), rows, fixed_split_size=4)  # prefill kernel
    want = together.get()
    for last, first in ((29, 0), (59, 2)):  # decode kernel, last row of a request
        alone = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
        indptr, indices, last_len = paged.table
        pages = indices[indptr[first] : indptr[first + 1]]
        alone.plan(
            ints(0, 1), ints(0, len(pages)), pages, last_len[first : first + 1], *sizes, 16,
            causal=True, fixed_split_size=4,
        )  # fmt: skip
        row = xp.asarray(q[last : last + 1])
        assert alone.current is not None
        for may_split in (0, 1):
            alone.current.header[at.MAY_SPLIT] = may_split
            alone.current.on_devices.clear()
            np.testing.assert_array_equal(alone.run(row, paged.cache).get()[0], want[last])
            for tiling in (kernels.SIMT, kernels.DECODE):
                assert len(schedule(alone.current, tiling, 132).merges) == may_split


@pytest.mark.parametrize("name", ["f32/q8_0", "q4_0/bf16"])  # `kvcache.cases` decode all of them
def test_block_formats_beside_floats(xp: Any, name: str) -> None:
    rng = np.random.default_rng(3)
    paged = on_device(xp, Paged(rng, [40], (4, 2, 80), 16, "HND", format=name))
    q = normal(rng, 2, 4, 80)
    check(paged, q, ints(0, 2), paged.run(xp.asarray(q), ints(0, 2)), ATOL)


@pytest.mark.parametrize("name", ["bf16/q8_0", "bf16/f16"])
def test_mixed_formats_on_tensor_cores(xp: Any, name: str) -> None:
    rng = np.random.default_rng(4)
    paged = on_device(xp, Paged(rng, [70], (4, 2, 32), 16, "HND", format=name))
    q = normal(rng, 2, 4, 32, dtype=np.float16)
    got = paged.run(xp.asarray(q), ints(0, 2), o_data_type=np.float32)
    check(paged, q.astype(np.float32), ints(0, 2), got, BLOCK_ATOL)


OPTIONS: dict[str, dict[str, Any]] = {
    "alibi_and_cap": {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 5.0, "causal": True},
    "window": {"causal": True, "window_left": 20},
    "mask": {"masked": True},
    "values_of_64": {"dim_vo": 64, "causal": True},
    "natural": {"lse_base": "e", "scale_q": 0.5, "v_scale": 0.25},
}


@pytest.mark.parametrize("T", [2, 20])  # up to 16 query vectors, and more
@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_tensor_cores(xp: Any, name: str, T: int) -> None:
    rng = np.random.default_rng(5)
    options = dict(OPTIONS[name])
    D, D_vo = (96, options.pop("dim_vo")) if "dim_vo" in options else (32, 32)
    q, k, v = normal(rng, T, 4, D), normal(rng, 90, 2, D), normal(rng, 90, 2, D_vo)
    k, v = k.astype(np.float16), v.astype(np.float16)
    if options.pop("masked", False):
        options["custom_mask"] = rng.random((T, 90)) < 0.5
    sinks = normal(rng, 4)
    got = nk.single_prefill_with_kv_cache(
        *map(xp.asarray, (q, k, v)), return_lse=True, sinks=xp.asarray(sinks), **options
    )
    want = reference.single_prefill_with_kv_cache(q, k, v, return_lse=True, sinks=sinks, **options)
    for found, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(found.get(), wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize(("D", "T"), [(256, 17), (128, 17), (80, 3)])
def test_head_sizes_on_tensor_cores(xp: Any, D: int, T: int) -> None:
    rng = np.random.default_rng(6)
    q, k, v = normal(rng, T, 1, D), normal(rng, 70, 1, D), normal(rng, 70, 1, D)
    k, v = k.astype(np.float16), v.astype(np.float16)
    want = reference.single_prefill_with_kv_cache(q, k, v, causal=True)
    exact = nk.single_prefill_with_kv_cache(*map(xp.asarray, (q, k, v)), causal=True)
    np.testing.assert_allclose(exact.get(), want, rtol=0, atol=ATOL)


def test_bfloat16_caches_keep_what_they_hold(xp: Any) -> None:
    rng = np.random.default_rng(7)
    paged = on_device(xp, Paged(rng, [70, 9], (4, 2, 32), 16, "HND", format="bf16"))
    q, rows = normal(rng, 12, 4, 32), ints(0, 11, 12)
    # queries and weights are two bfloat16 numbers each: 2**-17 instead of 2**-24
    check(paged, q, rows, paged.run(xp.asarray(q), rows), 2e-5)


def test_nan_in_what_a_row_sees_is_not_lost_and_other_rows_do_not_see_it(xp: Any) -> None:
    rng = np.random.default_rng(8)
    for dtype, D in ((np.float32, 20), (np.float16, 32)):
        q, k, v = normal(rng, 3, 1, D), normal(rng, 40, 1, D), normal(rng, 40, 1, D)
        k[38, 0, 0] = np.nan
        out = nk.single_prefill_with_kv_cache(
            *map(xp.asarray, (q, k.astype(dtype), v.astype(dtype))), causal=True
        ).get()
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1:]).all()
    # half a query beyond float16, all of whose scores would be -infinity and weigh nothing
    q = np.full((2, 1, 32), 100, np.float16)
    q[1] = 6e4
    k = np.full((9, 1, 32), -1, np.float16)
    out = nk.single_prefill_with_kv_cache(*map(xp.asarray, (q, k, k)), sm_scale=2.0).get()
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_ragged_batch(xp: Any) -> None:
    rng = np.random.default_rng(9)
    qo, kv = ints(0, 3, 4), ints(0, 40, 110)
    q, k, v = normal(rng, 4, 4, 32), normal(rng, 110, 2, 32), normal(rng, 110, 2, 32)
    for layout in ("NHD", "HND"):
        wrapper = nk.BatchPrefillWithRaggedKVCacheWrapper(kv_layout=layout)
        wrapper.plan(xp.asarray(qo), xp.asarray(kv), 4, 2, 32, causal=True)
        keys = [a if layout == "NHD" else a.swapaxes(0, 1).copy() for a in (k, v)]
        got = wrapper.run(xp.asarray(q), *map(xp.asarray, keys)).get()
        for (a, b), (c, d) in zip(pairwise(qo), pairwise(kv), strict=True):
            want = reference.single_prefill_with_kv_cache(q[a:b], k[c:d], v[c:d], causal=True)
            np.testing.assert_allclose(got[a:b], want, rtol=0, atol=ATOL)


def test_decode_wrapper_and_lengths_in_tokens(xp: Any) -> None:
    rng = np.random.default_rng(10)
    paged = on_device(xp, Paged(rng, [33, 5], (4, 2, 32), 16, "HND", np.float16))
    q, rows = normal(rng, 2, 4, 32), ints(0, 1, 2)
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(kv_layout="HND")
    wrapper.plan(*paged.table, 4, 2, 32, 16)
    check(paged, q, rows, wrapper.run(xp.asarray(q), paged.cache, return_lse=True), ATOL)
    batch = nk.BatchAttention("HND")
    batch.plan(rows, *paged.table[:2], ints(33, 5), 4, 2, 32, 32, 16, causal=True)
    check(paged, q, rows, batch.run(xp.asarray(q), paged.cache), ATOL)


def test_cascade(xp: Any) -> None:
    rng = np.random.default_rng(11)
    pages = normal(rng, 9, 2, 2, 4, 32)  # HND
    tokens = pages.transpose(1, 0, 3, 2, 4).reshape(2, 36, 2, 32)  # keys, values: (slot, G, D)
    own_tables = (ints(0, 2, 5), ints(4, 5, 6, 7, 8), ints(2, 3))
    cascade = nk.MultiLevelCascadeAttentionWrapper(2, kv_layout="HND")
    cascade.plan(
        [ints(0, 3), ints(0, 1, 3)], [ints(0, 4), own_tables[0]], [ints(0, 1, 2, 3), own_tables[1]],
        [ints(4), own_tables[2]], 4, 2, 32, 4, causal=True,
    )  # fmt: skip
    q, on_device = normal(rng, 3, 4, 32), xp.asarray(pages)
    got = cascade.run(xp.asarray(q), on_device).get()
    for rows, own in ((slice(0, 1), range(16, 22)), (slice(1, 3), range(24, 35))):
        keys, values = (np.concatenate([part[:16], part[list(own)]]) for part in tokens)
        want = reference.single_prefill_with_kv_cache(q[rows], keys, values, causal=True)
        # two results and a merge: see `test_attention_cascade`
        np.testing.assert_allclose(got[rows], want, rtol=0, atol=2 * ATOL)


@pytest.mark.parametrize("sizes", [(5, 20, 7), (16, 512, 64)])
def test_latent_attention(xp: Any, sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(12)
    H, D_ckv, D_kpe = sizes
    both = normal(rng, 6, 4, D_ckv + D_kpe)
    q = normal(rng, 3, H, D_ckv + D_kpe)
    wrapper = nk.BatchMLAPagedAttentionWrapper()
    pages = ints(5, 0, 3, 1, 2, 4)
    wrapper.plan(ints(0, 2, 3), ints(0, 4, 6), pages, ints(15, 6), *sizes, 4, True, 0.04)
    joined = xp.asarray(both)
    parts = (xp.asarray(np.ascontiguousarray(part)) for part in np.split(q, [D_ckv], axis=2))
    out, lse = wrapper.run(*parts, joined[..., :D_ckv], joined[..., D_ckv:], return_lse=True)
    for rows, numbers, n in ((slice(0, 2), pages[:4], 15), (slice(2, 3), pages[4:], 6)):
        keys = both[numbers].reshape(-1, 1, D_ckv + D_kpe)[:n]
        want = reference.single_prefill_with_kv_cache(
            q[rows], keys, keys[..., :D_ckv], causal=True, sm_scale=0.04, return_lse=True
        )
        for found, wanted in zip((out, lse), want, strict=True):  # see `test_attention_mla`
            np.testing.assert_allclose(found.get()[rows], wanted, rtol=0, atol=5e-6)


def test_values_that_are_columns_of_latent_keys(xp: Any) -> None:
    """DeepSeek's 576 and 512 columns in one array: in two splits, and in one item."""
    H, D, C, page_size, n = 3, 576, 512, 16, 90
    rng = np.random.default_rng(9)
    q, pages = normal(rng, 1, H, D), normal(rng, 6, 1, page_size, D).astype(np.float16)
    rows = pages.reshape(1, -1, D)[:, :n]
    # head by head, so that keys of one head and values of fewer columns are those of `reference`
    k, v = (np.repeat(x.transpose(1, 0, 2), H, axis=1) for x in (rows, rows[..., :C]))
    wanted = reference.single_prefill_with_kv_cache(q, k, v, sm_scale=0.05)
    options: Any = {"kv_layout": "HND", "sm_scale": 0.05, "split_keys": 64}
    plan = AttentionPlan((H, 1, D, C), page_size, **options)
    cache, found = xp.asarray(pages), []
    for may_split in (1, 0):
        plan.header[at.MAY_SPLIT] = may_split
        plan_into(plan, ints(0, 1), ints(0, 6), np.arange(6, dtype=np.int32), ints(n))
        assert len(schedule(plan, kernels.DECODE, 132).merges) == may_split
        out = xp.empty((1, H, C), np.float32)
        kernels.attend(plan, xp.asarray(q), cache, cache[..., :C], out, None, (F16, F16))
        np.testing.assert_allclose(out.get(), wanted, rtol=0, atol=ATOL)
        found.append(out.get().tobytes())
    assert found[0] == found[1]


def test_block_sparse(xp: Any) -> None:
    rng = np.random.default_rng(13)
    q, k, v = normal(rng, 10, 4, 32), normal(rng, 64, 2, 32), normal(rng, 64, 2, 32)
    blocks = rng.random((4, 4, 16)) < 0.6
    indptr, indices = ints(0, 2, 2, 4), ints(3, 0, 1, 2)
    wrapper = nk.BlockSparseAttentionWrapper()
    wrapper.plan(indptr, indices, 10, 64, 4, 16, 4, 2, 32, mask=blocks, causal=True)
    got = wrapper.run(*map(xp.asarray, (q, k, v))).get()
    seen = np.zeros((12, 64), bool)
    for i, j, block in ((0, 3, 0), (0, 0, 1), (2, 1, 2), (2, 2, 3)):
        seen[4 * i : 4 * i + 4, 16 * j : 16 * j + 16] = blocks[block]
    seen = seen[:10] & (np.arange(64) <= np.arange(10)[:, None] + 54)
    want = reference.single_prefill_with_kv_cache(q, k, v, custom_mask=seen)
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)

    chosen = rng.random((2, 2, 3)) < 0.6
    rows, columns = np.array([[4, 6], [10, 0]], np.int32), np.array([[16, 32, 16]] * 2, np.int32)
    variable = nk.VariableBlockSparseAttentionWrapper()
    variable.plan(chosen, rows, columns, 4, 2, 32)
    heads = (xp.asarray(np.ascontiguousarray(a.swapaxes(0, 1))) for a in (q, k, v))
    got = variable.run(*heads).get()
    for g in range(2):
        seen = np.repeat(np.repeat(chosen[g], rows[g], axis=0), columns[g], axis=1)
        group = slice(2 * g, 2 * g + 2)
        want = reference.single_prefill_with_kv_cache(
            q[:, group], k[:, g : g + 1], v[:, g : g + 1], custom_mask=seen
        )
        np.testing.assert_allclose(got[group].swapaxes(0, 1), want, rtol=0, atol=ATOL)


def test_later_calls_of_a_plan_see_what_has_changed(xp: Any) -> None:
    """Bits of calls of one plan are those of plans made for each call."""
    rng = np.random.default_rng(20)
    paged = on_device(xp, Paged(rng, [40, 9], (4, 2, 32), 16, "HND", np.float16))
    rows = ints(0, 2, 3)
    q, other_q = (xp.asarray(normal(rng, 3, 4, 32)) for _ in range(2))
    there, other, sinks = xp.asarray(normal(rng, 4)), xp.asarray(normal(rng, 4)), normal(rng, 4)
    calls: list[dict[str, Any]] = [
        {}, {"sinks": sinks}, {"sinks": sinks.copy()}, {"sinks": there}, {"sinks": other},
        {"k_scale": 0.5}, {"v_scale": 2.0}, {"lse_base": "e"}, {"window_left": 5}, {"sinks": there},
        {"window_left": -1}, {},
    ]  # fmt: skip

    def run(wrapper: Any, queries: Any, call: dict[str, Any]) -> list[np.ndarray]:
        return [a.get() for a in wrapper.run(queries, paged.cache, return_lse=True, **call)]

    def planned(window_left: int = -1) -> Any:
        wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
        paged.plan(wrapper, rows, window_left=window_left)
        return wrapper

    kept, window, seen = planned(), -1, set()
    for call in calls:
        window = call.get("window_left", window)
        found = run(kept, q, call)
        want = run(planned(window), q, {k: v for k, v in call.items() if k != "window_left"})
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_array_equal(got, expected)
        seen.add((found[0].tobytes(), found[1].tobytes()))
    assert len(seen) == 9  # equal: the sinks and their copy; the first and the last two calls
    sinks += 1.0  # in place: layers may pass one array
    np.testing.assert_array_equal(
        run(kept, q, {"sinks": sinks})[0], run(planned(), q, {"sinks": sinks})[0]
    )
    np.testing.assert_array_equal(run(kept, other_q, {})[0], run(planned(), other_q, {})[0])
    with pytest.raises(UsageError, match=r"q must have shape \(3, 4, 32\)"):
        kept.run(q[:2], paged.cache)
    with pytest.raises(TypeError, match="paged_kv_cache must have dtype"):
        kept.run(q, tuple(xp.asarray(pages.get().astype(np.float64)) for pages in paged.cache))


def test_one_request_again_and_again(xp: Any) -> None:
    """The plan of a shape is kept, and calls do not see those before; graphs take another plan."""
    rng = np.random.default_rng(21)
    k, v = (normal(rng, 70, 2, 32, dtype=np.float16) for _ in range(2))
    k_there, v_there = xp.asarray(k), xp.asarray(v)
    recent = device_of(k_there).constants.setdefault(("attention", "recent plans"), {})
    recent.clear()
    for scale, sinks in ((None, None), (0.5, normal(rng, 4)), (None, None)):
        q = normal(rng, 4, 32)
        options = {"k_scale": scale, "sinks": sinks, "return_lse": True}
        found = nk.single_decode_with_kv_cache(xp.asarray(q), k_there, v_there, **options)
        want = reference.single_decode_with_kv_cache(q, k, v, **options)
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got.get(), expected, rtol=0, atol=ATOL)
    assert len(recent) == 1
    first = next(iter(recent.values()))[0]
    with pytest.raises(UsageError, match="v must have shape"):
        nk.single_decode_with_kv_cache(xp.asarray(q), k_there, v_there[:60])
    for n in range(60, 66):  # a request that grows
        nk.single_decode_with_kv_cache(xp.asarray(q), k_there[:n], v_there[:n])
    assert len(recent) == 4
    assert all(plan is not first for plan, _ in recent.values())
    rows = xp.asarray(normal(rng, 40, 4, 32))
    nk.single_prefill_with_kv_cache(rows, k_there, v_there)  # many rows: not kept
    assert len(recent) == 4


def test_a_graph_does_not_take_the_plan_of_an_earlier_call(
    xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(22)
    q, k, v = (xp.asarray(normal(rng, n, 32).reshape(-1, 2, 32)) for n in (4, 140, 140))
    device, used = device_of(k), []
    run = single.run_plan
    monkeypatch.setattr(single, "run_plan", lambda r: used.append(r.plan) or run(r))
    for _ in range(2):
        nk.single_decode_with_kv_cache(q[0], k, v)
    monkeypatch.setattr(type(device), "is_capturing", True)
    for _ in range(2):
        nk.single_decode_with_kv_cache(q[0], k, v)
    assert used[0] is used[1]
    assert len({id(plan) for plan in used}) == 3


def test_arrays_on_the_wrong_side_are_named(xp: Any) -> None:
    q, k = np.zeros((1, 2, 16), np.float32), np.zeros((3, 2, 16), np.float32)
    with pytest.raises(TypeError, match="k must be on the device, as q is"):
        nk.single_prefill_with_kv_cache(xp.asarray(q), k, k)
    out = np.zeros_like(q)
    with pytest.raises(TypeError, match="out must be on the device, as q is"):
        nk.single_prefill_with_kv_cache(*map(xp.asarray, (q, k, k)), out=out)


def test_nvfp4_caches_are_refused(xp: Any) -> None:
    q, k = np.zeros((1, 2, 16), np.float32), np.zeros((3, 2, 8), np.uint8)
    q, k, scales = map(xp.asarray, (q, k, np.zeros((3, 2, 1), np.uint8)))
    with pytest.raises(UsageError, match="no CUDA kernel reads NVFP4 caches"):
        nk.single_prefill_with_kv_cache(q, k, k, kv_cache_sf=(scales, scales))


def test_division_covers_every_key_once_and_leaves_requests_to_other_kernels() -> None:
    lens = np.array([1300, 20, 0, 700], np.int32)
    rows = ints(0, 30, 31, 31, 51)
    pages = ints(0, 82, 84, 84, 128)
    plan = AttentionPlan((4, 2, 32, 32), 16, window_left=900, sm_scale=1.0)
    plan_into(plan, rows, pages, np.arange(128, dtype=np.int32), lens)
    for tiling in (Tiling(16), Tiling(64, more_than=16)):
        found = schedule(plan, tiling, 1000)
        covered = np.zeros((51, 1300), np.int64)
        for _request, row, n_rows, position, first, end, _partial, _ in found.items.tolist():
            for r in range(n_rows):
                here = position + r
                covered[row + r, max(first, here - 900) : min(end, here + 1)] += 1
        for b in range(4):
            n = rows[b + 1] - rows[b]
            for r in range(rows[b], rows[b + 1]):
                here = lens[b] - n + r - rows[b]
                left_out = tiling.more_than and b == 1
                seen = np.zeros(1300, np.int64)
                seen[max(0, here - 900) : here + 1] = 0 if left_out else 1
                np.testing.assert_array_equal(covered[r], seen)
        partials = found.items[:, 6] >= 0
        assert partials.any()
        assert found.n_partials == (found.items[partials, 2] * 2).sum()


def test_header_fields_match_the_cuda_source() -> None:
    from pathlib import Path

    source = (Path(kernels.__file__).parent / "plan.cuh").read_text()
    names = source.split("enum HeaderField {")[1].split("}")[0].replace("\n", " ").split(",")
    for number, name in enumerate(name.strip() for name in names):
        assert getattr(at, name) == number


def _transform(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head, qo_pos):  # type: ignore[no-untyped-def]
    return logit + params[0][qo_head] * (kv_idx - qo_pos) + params[1]


def _mask(params, batch, qo_idx, kv_idx, qo_head, kv_head):  # type: ignore[no-untyped-def]
    return (kv_idx + qo_head + batch) % 3 != 0


def _output(params, output, batch, qo_idx, qo_head, qo_pos):  # type: ignore[no-untyped-def]
    return output * (1 + qo_pos - 16)


@pytest.mark.parametrize("use_softmax", [True, False])
def test_users_functions(xp: Any, use_softmax: bool) -> None:
    rng = np.random.default_rng(14)
    params = (np.linspace(-0.1, 0.1, 4), 0.25)
    variant = nk.AttentionVariant(_transform, _mask, _output, params, use_softmax)
    paged = Paged(rng, [20], (4, 2, 64), 4, "HND", format="q8_0" if use_softmax else "f16")
    q, sinks = normal(rng, 3, 4, 64), normal(rng, 4) if use_softmax else None
    wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
    there = dataclasses.replace(variant, params=(xp.asarray(params[0]), params[1]))
    paged.plan(wrapper, ints(0, 3), window_left=9, attention_chunk=9, variant=there)
    on_device(xp, paged)
    more = {} if sinks is None else {"sinks": xp.asarray(sinks)}
    got = wrapper.run(xp.asarray(q), paged.cache, v_scale=0.5, **more).get()
    want = reference.single_prefill_with_kv_cache(
        q, paged.k[0], paged.v[0], causal=True, window_left=9, attention_chunk=9, variant=variant,
        v_scale=0.5, sinks=sinks, **paged.format,
    )  # fmt: skip
    # float64 but for the dot products; results are up to three times as large as usual
    np.testing.assert_allclose(got, want, rtol=0, atol=3 * ATOL)


def test_functions_that_cannot_be_compiled_are_named(xp: Any) -> None:
    def transform(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head):  # type: ignore[no-untyped-def]
        return no_such_name + logit  # noqa: F821

    x = xp.asarray(np.zeros((1, 1, 16), np.float32))
    with pytest.raises(UsageError, match=r"variant cannot be compiled.*no_such_name"):
        nk.single_prefill_with_kv_cache(x, x, x, variant=nk.AttentionVariant(transform))
    here, variant = np.zeros((1, 1, 16), np.float32), nk.AttentionVariant(_transform, params=(x,))
    with pytest.raises(UsageError, match=r"variant.params\[0\] is on a CUDA device"):
        nk.single_prefill_with_kv_cache(here, here, here, variant=variant)

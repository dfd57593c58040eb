"""Attention in CUDA graphs, on several streams, and in a caller's workspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

import nbflow_kernels as nk
from nbflow_kernels.attention import cuda as kernels
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention import reference
from nbflow_kernels.attention.cases import HALF_ATOL
from nbflow_kernels.attention.cuda.plan import device_plan
from nbflow_kernels.cuda import device_of
from nbflow_kernels.errors import UsageError

ATOL = 3e-6  # as in test_attention_devices
HEADS, PAGE = (4, 2, 32), 16


def buffers(xp: Any, *sizes: int) -> list[Any]:
    return [xp.asarray(np.full(n, -1, np.int32)) for n in sizes]


def step(seed: int, lens: list[int], dtype: Any = np.float16) -> Paged:
    return Paged(np.random.default_rng(seed), lens, HEADS, PAGE, "HND", dtype)


def expected(paged: Paged, q: np.ndarray, rows: np.ndarray, **options: Any) -> np.ndarray:
    """Return the attention of each request's rows in float64."""
    parts = [
        reference.single_prefill_with_kv_cache(q[a:b], k, v, causal=True, **options)
        for a, b, k, v in zip(rows[:-1], rows[1:], paged.k, paged.v, strict=True)
    ]
    return np.concatenate(parts)


class Cache:
    """Pages at fixed addresses, refilled with other sequences by each step."""

    def __init__(self, xp: Any, n_pages: int, dtype: Any = np.float16) -> None:
        self.xp, shape = xp, (n_pages, HEADS[1], PAGE, HEADS[2])
        self.pages = tuple(xp.asarray(np.full(shape, np.nan, dtype)) for _ in "kv")

    def put(self, paged: Paged) -> Any:
        for there, pages in zip(self.pages, paged.cache, strict=True):
            there[: len(pages)] = self.xp.asarray(pages)
        return paged.table


def capture(xp: Any, run: Any) -> tuple[Any, Any]:
    """Return the graph of a call, captured on a new stream, and that stream."""
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        try:
            run()
        finally:
            graph = stream.end_capture()
    return graph, stream


# lengths of the steps of a graph: shorter, longer and none; the last one is split
STEPS = [[33, 5, 70], [1, 90, 17], [600, 0, 3]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])  # tensor cores, fallback kernel
def test_a_captured_decode_reads_the_next_plan(xp: Any, dtype: Any) -> None:
    cache = Cache(xp, 45, dtype)
    tables = buffers(xp, 4, 50, 3)
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(None, "HND", True, False, *tables)
    q = normal(np.random.default_rng(0), 3, *HEADS[::2])
    q_there, out = xp.asarray(q), xp.asarray(np.zeros_like(q))
    graph = stream = None
    for seed, lens in enumerate(STEPS):
        paged = step(seed, lens, dtype)
        table = cache.put(paged)
        plan = wrapper.plan(*table, *HEADS, PAGE, sm_scale=0.2)
        assert plan is wrapper.current
        if graph is None:
            wrapper.run(q_there, cache.pages, out=out, v_scale=0.5)
            graph, stream = capture(
                xp, lambda: wrapper.run(q_there, cache.pages, out=out, v_scale=0.5)
            )
        out[...] = xp.asarray(np.full_like(q, np.nan))
        xp.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = 0.5 * expected(paged, q, ints(0, 1, 2, 3), sm_scale=0.2)
        np.testing.assert_allclose(out.get(), want, rtol=0, atol=ATOL)
        for buffer, array in zip(tables, table, strict=True):
            np.testing.assert_array_equal(buffer.get()[: len(array)], array)


def test_a_graph_of_layers_with_factors_and_sinks_of_their_own(xp: Any) -> None:
    cache = Cache(xp, 12)
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(
        None, "HND", True, False, *buffers(xp, 3, 12, 2)
    )
    rng = np.random.default_rng(1)
    q, sinks = normal(rng, 2, *HEADS[::2]), [normal(rng, 4) for _ in range(2)]
    q_there, outs = xp.asarray(q), [xp.asarray(np.zeros_like(q)) for _ in range(2)]
    sinks_there = [xp.asarray(s) for s in sinks]

    def run() -> None:
        for i in range(2):
            wrapper.run(
                q_there,
                cache.pages,
                out=outs[i],
                sinks=sinks_there[i],
                v_scale=1 + i,
                k_scale=2 - i,
            )

    table = cache.put(step(2, [40, 3]))
    wrapper.plan(*table, *HEADS, PAGE)
    run()
    graph, stream = capture(xp, run)
    paged = step(3, [7, 100])
    wrapper.plan(*cache.put(paged), *HEADS, PAGE)
    xp.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for i in range(2):
        scale = (2 - i) / HEADS[2] ** 0.5
        want = (1 + i) * expected(paged, q, ints(0, 1, 2), sm_scale=scale, sinks=sinks[i])
        np.testing.assert_allclose(outs[i].get(), want, rtol=0, atol=2 * ATOL)


def test_a_captured_prefill_reads_the_next_plan(xp: Any) -> None:
    cache = Cache(xp, 12)
    tables = buffers(xp, 3, 3, 12, 2)
    wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(None, "HND", True, *tables)
    q = normal(np.random.default_rng(4), 9, *HEADS[::2])
    q_there, out = xp.asarray(q), xp.asarray(np.zeros_like(q))
    options = {"causal": True, "pos_encoding_mode": "ALIBI"}
    wrapper.plan(ints(0, 2, 9), *cache.put(step(5, [40, 30])), *HEADS, PAGE, **options)
    wrapper.run(q_there, cache.pages, out=out)
    graph, stream = capture(xp, lambda: wrapper.run(q_there, cache.pages, out=out))
    paged, rows = step(6, [60, 5]), ints(0, 6, 7)
    wrapper.plan(rows, *cache.put(paged), *HEADS, PAGE, **options)
    out[...] = xp.asarray(np.full_like(q, 9))
    xp.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    want = expected(paged, q, rows, pos_encoding_mode="ALIBI")
    np.testing.assert_allclose(out.get()[:7], want, rtol=0, atol=ATOL)
    assert (out.get()[7:] == 9).all()  # padding rows are not written


def test_a_captured_ragged_prefill_reads_the_next_plan(xp: Any) -> None:
    wrapper = nk.BatchPrefillWithRaggedKVCacheWrapper(None, "NHD", True, *buffers(xp, 3, 3))
    rng = np.random.default_rng(7)
    q, k, v = normal(rng, 4, 4, 32), normal(rng, 110, 2, 32), normal(rng, 110, 2, 32)
    arrays, out = [xp.asarray(a) for a in (q, k, v)], xp.asarray(np.zeros_like(q))
    options: Any = {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"}
    wrapper.plan(ints(0, 3, 4), ints(0, 60, 110), 4, 2, 32, **options)
    wrapper.run(*arrays, out=out)
    graph, stream = capture(xp, lambda: wrapper.run(*arrays, out=out))
    wrapper.plan(xp.asarray(ints(0, 1, 4)), xp.asarray(ints(0, 3, 100)), 4, 2, 32, **options)
    xp.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for rows, keys in ((slice(0, 1), slice(0, 3)), (slice(1, 4), slice(3, 100))):
        want = reference.single_prefill_with_kv_cache(q[rows], k[keys], v[keys], **options)
        # rotation by a float32 table: see `attention.cases`
        np.testing.assert_allclose(out.get()[rows], want, rtol=0, atol=5 * ATOL)
    with pytest.raises(UsageError, match="kv_indptr must end at 110 or less"):
        wrapper.plan(ints(0, 1, 4), ints(0, 3, 111), 4, 2, 32, **options)


def test_what_does_not_fit_a_graph_is_named(xp: Any) -> None:
    paged = step(8, [33, 5])
    tables = buffers(xp, 3, 4, 2)
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(None, "HND", True, False, *tables)
    wrapper.plan(*paged.table, *HEADS, PAGE)
    for changed, words in (
        ({"sm_scale": 2.0}, "sm_scale must stay None with use_cuda_graph, got 2.0"),
        ({"window_left": 3}, "window_left must stay -1"),
        ({"q_len_per_req": 2}, "q_len_per_req must stay 1"),
        ({"kv_data_type": "float16"}, "kv_data_type must stay None"),
        ({"variant": nk.AttentionVariant()}, "variant is not supported with use_cuda_graph"),
    ):
        with pytest.raises(UsageError, match=words):
            wrapper.plan(*paged.table, *HEADS, PAGE, **changed)
    with pytest.raises(UsageError, match="num_qo_heads must stay 4"):
        wrapper.plan(*paged.table, 2, 2, 32, PAGE)
    with pytest.raises(UsageError, match=r"must have 2 requests, .* got 3"):
        wrapper.plan(*step(9, [1, 1, 1]).table, *HEADS, PAGE)
    with pytest.raises(UsageError, match="paged_kv_indices_buffer must hold 5 pages, got"):
        wrapper.plan(*step(9, [33, 17]).table, *HEADS, PAGE)
    wrapper.plan(*paged.table, *HEADS, PAGE)
    q = normal(np.random.default_rng(9), 2, *HEADS[::2])
    with pytest.raises(UsageError, match="q is in host memory, the buffers of use_cuda_graph"):
        wrapper.run(q, paged.cache)
    there = [xp.asarray(a) for a in (q, *paged.cache)]
    with pytest.raises(UsageError, match=r"window_left must be the plan's \(-1\)"):
        wrapper.run(there[0], tuple(there[1:]), window_left=2)
    prefill = nk.BatchPrefillWithPagedKVCacheWrapper(None, "HND", True, *buffers(xp, 3, 3, 4, 2))
    prefill.plan(ints(0, 2, 3), *paged.table, *HEADS, PAGE)
    with pytest.raises(UsageError, match=r"qo_indptr must end at 3 or less .* got 4"):
        prefill.plan(ints(0, 2, 4), *paged.table, *HEADS, PAGE)
    with pytest.raises(UsageError, match="custom_mask is not supported with use_cuda_graph"):
        prefill.plan(ints(0, 2, 3), *paged.table, *HEADS, PAGE, custom_mask=np.ones(71, bool))
    with pytest.raises(UsageError, match="in host memory; bring both"):
        nk.BatchDecodeWithPagedKVCacheWrapper(
            None, "HND", True, False, tables[0], np.zeros(4, np.int32), tables[2]
        )


def test_streams_have_partial_results_of_their_own(xp: Any) -> None:
    paged = step(10, [700, 40])
    q = normal(np.random.default_rng(10), 2, *HEADS[::2])
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(None, "HND")
    plan = wrapper.plan(*paged.table, *HEADS, PAGE)
    q_there, cache = xp.asarray(q), tuple(xp.asarray(pages) for pages in paged.cache)
    xp.cuda.get_current_stream().synchronize()
    headers = {}
    for stream in [xp.cuda.Stream(non_blocking=True) for _ in range(2)]:
        with stream:
            out = wrapper.run(q_there, cache)
            items = device_plan(plan, device_of(q_there)).items(kernels.DECODE)
            assert items.n_partials
            headers[stream] = device_plan(plan, device_of(q_there)).header(kernels.DECODE)
            stream.synchronize()
            want = expected(paged, q, ints(0, 1, 2))
            np.testing.assert_allclose(out.get(), want, rtol=0, atol=ATOL)
    first, second = (header.get() for header in headers.values())
    for place in (at.PARTIALS, at.ARRIVED, at.ITEMS, at.KV_INDICES):
        assert first[place] != second[place]
    for stream, header in headers.items():  # the same call changes nothing
        with stream:
            assert device_plan(plan, device_of(q_there)).header(kernels.DECODE) is header


def test_partial_results_lie_in_the_callers_workspace(xp: Any) -> None:
    paged = step(11, [1300, 40])
    q = normal(np.random.default_rng(11), 2, *HEADS[::2])
    q_there, cache = xp.asarray(q), tuple(xp.asarray(pages) for pages in paged.cache)
    want = expected(paged, q, ints(0, 1, 2))
    bits = None
    for n_bytes, divided in ((1 << 16, True), (100, False), (None, True)):
        workspace = None if n_bytes is None else xp.empty(n_bytes, np.uint8)
        wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        plan = wrapper.plan(*paged.table, *HEADS, PAGE)
        got = wrapper.run(q_there, cache).get()
        np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)
        bits = got if bits is None else bits
        np.testing.assert_array_equal(got, bits)
        tables = device_plan(plan, device_of(q_there))
        assert (tables.items(kernels.DECODE).n_partials > 0) is divided
        if workspace is not None:
            place = int(tables.header(kernels.DECODE).get()[at.PARTIALS])
            assert place == -(-workspace.data.ptr // 16) * 16
    wrapper.reset_workspace_buffer(np.empty(8, np.uint8))
    wrapper.plan(*paged.table, *HEADS, PAGE)
    with pytest.raises(UsageError, match="buffer is in host memory, q is on a CUDA"):
        wrapper.run(q_there, cache)


def test_a_blocking_plan_waits_for_its_copies(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = step(12, [5])
    q = xp.asarray(normal(np.random.default_rng(12), 1, *HEADS[::2]))
    cache = tuple(xp.asarray(pages) for pages in paged.cache)
    waits: list[int] = []
    monkeypatch.setattr(type(device_of(q)), "synchronize", lambda self: waits.append(1))
    for graph in (False, True):
        tables = buffers(xp, 2, 4, 1) if graph else [None] * 3
        for non_blocking in (True, False):
            wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(None, "HND", graph, False, *tables)
            wrapper.plan(*paged.table, *HEADS, PAGE, non_blocking=non_blocking)
            wrapper.run(q, cache)
            assert bool(waits) is not non_blocking
            waits.clear()


def test_tensor_cores_that_are_asked_for(xp: Any) -> None:
    q = normal(np.random.default_rng(13), 1, *HEADS[::2])
    for dtype in (np.float16, np.float32):
        paged = step(13, [20], dtype)
        wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(None, "HND", use_tensor_cores=True)
        wrapper.plan(*paged.table, *HEADS, PAGE)
        arguments = xp.asarray(q), tuple(xp.asarray(pages) for pages in paged.cache)
        if dtype == np.float16:
            want = expected(paged, q, ints(0, 1))
            np.testing.assert_allclose(wrapper.run(*arguments).get(), want, rtol=0, atol=ATOL)
        else:
            with pytest.raises(UsageError, match="True: no tensor-core kernel supports float32"):
                wrapper.run(*arguments)
    with pytest.raises(UsageError, match="use_tensor_cores=True needs arrays on a CUDA device"):
        nk.single_decode_with_kv_cache(q[0], paged.k[0], paged.v[0], use_tensor_cores=True)


PREFIXES = [[33, 16], [5, 40]]
"""Keys of the two shared prefixes in each step; the second is that of the last request."""


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_captured_cascade_reads_the_next_plan(xp: Any, dtype: Any) -> None:
    """Levels of other lengths and groups; results over the prefix and the request's own keys."""
    cache = Cache(xp, 20)
    levels = [buffers(xp, 3, 3, 8, 2), buffers(xp, 4, 4, 8, 3)]
    arrays = [[level[i] for level in levels] for i in range(4)]
    wrapper = nk.MultiLevelCascadeAttentionWrapper(2, None, "HND", True, *arrays)
    q = normal(np.random.default_rng(0), 5, *HEADS[::2]).astype(dtype)
    q_there, out = xp.asarray(q), xp.asarray(np.zeros_like(q))
    graph = stream = None
    for seed, (shared, own, rows) in enumerate(
        [(PREFIXES[0], [3, 20, 1], [2, 2, 1]), (PREFIXES[1], [17, 0, 9], [1, 0, 3])]
    ):
        paged = step(seed, [*shared, *own])
        indptr, indices, last = cache.put(paged)
        starts = np.cumsum([0, *rows]).astype(np.int32)
        tables = [
            [starts[[0, 2, 3]], starts],
            [indptr[:3], indptr[2:] - indptr[2]],
            [indices[: indptr[2]], indices[indptr[2] :]],
            [last[:2], last[2:]],
        ]
        wrapper.plan(*tables, *HEADS, PAGE, causal=True)
        if graph is None:
            wrapper.run(q_there, cache.pages, out=out)
            graph, stream = capture(xp, lambda: wrapper.run(q_there, cache.pages, out=out))
        out[...] = xp.asarray(np.full_like(q, np.nan))
        xp.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for i, n in enumerate(rows):
            k, v = (np.concatenate([part[i // 2], part[2 + i]]) for part in (paged.k, paged.v))
            mine = slice(starts[i], starts[i] + n)
            want = reference.single_prefill_with_kv_cache(q[mine], k, v, causal=True)
            # float16 queries: as in attention.cases, two keys seen at least
            atol = 2 * ATOL if dtype == np.float32 else HALF_ATOL
            np.testing.assert_allclose(out.get()[mine], want, rtol=0, atol=atol)


def test_buffers_of_a_cascade_are_checked() -> None:
    one = [buffers(np, n) for n in (3, 3, 8, 2)]
    with pytest.raises(UsageError, match="in qo_indptr_buf_arr a buffer for each of 2 levels"):
        nk.MultiLevelCascadeAttentionWrapper(2, None, "HND", True, *one)
    with pytest.raises(UsageError, match="paged_kv_indices_buf_arr is for use_cuda_graph=True"):
        nk.MultiLevelCascadeAttentionWrapper(1, paged_kv_indices_buf_arr=one[2])
    wrapper = nk.MultiLevelCascadeAttentionWrapper(1, None, "HND", True, *one)
    table = [ints(0, 1, 2)], [ints(0, 1, 2)], [ints(0, 1)], [ints(1, 2)]
    wrapper.plan(*table, *HEADS, PAGE)
    with pytest.raises(UsageError, match="sm_scale must stay None with use_cuda_graph"):
        wrapper.plan(*table, *HEADS, PAGE, sm_scale=0.5)


def test_a_captured_pod_run_reads_the_next_plan(xp: Any) -> None:
    cache = Cache(xp, 45)
    wrapper = nk.PODWithPagedKVCacheWrapper(None, "HND", True, *buffers(xp, 4, 50, 3))
    rng = np.random.default_rng(0)
    q, q_p = normal(rng, 3, *HEADS[::2]), normal(rng, 9, *HEADS[::2])
    k_p, v_p = (normal(rng, HEADS[1], 70, HEADS[2], dtype=np.float16) for _ in "kv")
    there = [xp.asarray(a) for a in (q_p, k_p, v_p, q)]
    outs = [xp.asarray(np.zeros_like(a)) for a in (q_p, q)]

    def run() -> None:
        wrapper.run(
            *there, cache.pages, causal_p=True, kv_layout_p="HND", out_p=outs[0], out_d=outs[1]
        )

    graph, stream = None, xp.cuda.Stream(non_blocking=True)
    for seed, lens in enumerate(STEPS[:2]):
        paged = step(seed, lens)
        wrapper.plan(*cache.put(paged), *HEADS, PAGE)
        xp.cuda.get_current_stream().synchronize()
        if graph is None:
            with stream:
                run()  # copies the plan of the prompt
                stream.begin_capture()
                run()
                graph = stream.end_capture()
        for out in outs:
            out[...] = xp.asarray(np.full(out.shape, np.nan, np.float32))
        xp.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = expected(paged, q, ints(0, 1, 2, 3))
        np.testing.assert_allclose(outs[1].get(), want, rtol=0, atol=ATOL)
        want = reference.single_prefill_with_kv_cache(q_p, k_p, v_p, causal=True, kv_layout="HND")
        np.testing.assert_allclose(outs[0].get(), want, rtol=0, atol=ATOL)

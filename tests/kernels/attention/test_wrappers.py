"""Ragged and mixed wrappers, FlashInfer's signatures, and refused arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

from nbflow_kernels.attention import (
    BatchAttention,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.cpu.graph import CpuGraph
from nbflow_kernels.cpu.thread_pool import ThreadPool
from nbflow_kernels.errors import UsageError

LENS = [33, 1, 150]


@contextmanager
def n_threads(n: int) -> Iterator[None]:
    before = parallel_for.get_num_threads()
    parallel_for.set_num_threads(n)
    yield
    parallel_for.set_num_threads(before)


# Parameters in the order of FlashInfer's sources of 2026-08, without trailing options of single GPU
# kernels.
FLASHINFER = {
    single_decode_with_kv_cache: "q k v kv_layout pos_encoding_mode use_tensor_cores q_scale "
    "k_scale v_scale window_left logits_soft_cap sm_scale rope_scale rope_theta return_lse",
    single_prefill_with_kv_cache: "q k v scale_q scale_k scale_v o_dtype custom_mask "
    "packed_custom_mask causal kv_layout pos_encoding_mode use_fp16_qk_reduction sm_scale "
    "window_left logits_soft_cap rope_scale rope_theta backend return_lse",
    BatchDecodeWithPagedKVCacheWrapper: "float_workspace_buffer kv_layout use_cuda_graph "
    "use_tensor_cores paged_kv_indptr_buffer paged_kv_indices_buffer "
    "paged_kv_last_page_len_buffer backend",
    BatchDecodeWithPagedKVCacheWrapper.plan: "self indptr indices last_page_len num_qo_heads "
    "num_kv_heads head_dim page_size pos_encoding_mode window_left logits_soft_cap q_data_type "
    "kv_data_type o_data_type data_type",
    BatchPrefillWithPagedKVCacheWrapper: "float_workspace_buffer kv_layout use_cuda_graph "
    "qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf",
    BatchPrefillWithPagedKVCacheWrapper.plan: "self qo_indptr paged_kv_indptr paged_kv_indices "
    "paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo "
    "custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale "
    "window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type "
    "non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr",
    BatchPrefillWithRaggedKVCacheWrapper: "float_workspace_buffer kv_layout use_cuda_graph "
    "qo_indptr_buf kv_indptr_buf",
    BatchPrefillWithRaggedKVCacheWrapper.plan: "self qo_indptr kv_indptr num_qo_heads num_kv_heads "
    "head_dim_qk head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode "
    "use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale rope_theta q_data_type "
    "kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr "
    "token_pos_in_items_len max_item_len_ptr",
    BatchAttention: "kv_layout",
    BatchAttention.plan: "self qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads "
    "head_dim_qk head_dim_vo page_size causal sm_scale logits_soft_cap q_data_type kv_data_type",
    BatchAttention.run: "self q kv_cache out lse k_scale v_scale logits_soft_cap",
}


@pytest.mark.parametrize("function", FLASHINFER, ids=lambda f: f.__qualname__)
def test_positional_parameters_are_flashinfers(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == FLASHINFER[function].split()


def decode(layout: str = "NHD", dtype: Any = np.float16) -> tuple[Paged, np.ndarray]:
    rng = np.random.default_rng(1)
    return Paged(rng, LENS, (6, 2, 64), 16, layout, dtype), normal(rng, 3, 6, 64)


def plan_decode(wrapper: Any, paged: Paged, **options: Any) -> Any:
    return wrapper.plan(*paged.table, *paged.heads, paged.page_size, **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batch_decode_has_the_bits_of_single_decodes(layout: str) -> None:
    paged, q = decode(layout)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, layout)
    plan_decode(wrapper, paged, window_left=70, logits_soft_cap=20.0)
    out, lse = wrapper.run(q, paged.cache, return_lse=True)
    for i in range(3):
        want = single_decode_with_kv_cache(
            q[i], paged.k[i], paged.v[i], window_left=70, logits_soft_cap=20.0, return_lse=True
        )
        np.testing.assert_array_equal(out[i], want[0])
        np.testing.assert_array_equal(lse[i], want[1])
    np.testing.assert_array_equal(wrapper.run_return_lse(q, paged.cache)[1], lse)


def test_several_rows_per_request_are_causal_among_each_other() -> None:
    paged, _ = decode()
    q = normal(np.random.default_rng(2), 3, 6, 64)
    long = Paged(np.random.default_rng(3), [40], (6, 2, 64), 16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    plan_decode(wrapper, long, q_len_per_req=3)
    want = single_prefill_with_kv_cache(q, long.k[0], long.v[0], causal=True)
    np.testing.assert_array_equal(wrapper.run(q, long.cache), want)
    with pytest.raises(UsageError, match="q_len_per_req must be positive, got 0"):
        plan_decode(wrapper, paged, q_len_per_req=0)


def test_another_window_in_run_changes_the_plan() -> None:
    paged, q = decode()
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    results = {}
    for window in (-1, 20):
        plan_decode(wrapper, paged, window_left=window)
        results[window] = wrapper.run(q, paged.cache)
    for window in (-1, 20, -1):
        got = wrapper.run(q, paged.cache, window_left=window)
        np.testing.assert_array_equal(got, results[window])


def test_tables_are_kept_in_the_callers_buffers() -> None:
    paged, q = decode()
    rooms = [np.full(n, -1, np.int32) for n in (4, 40, 3)]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True, False, *rooms)
    plan = plan_decode(wrapper, paged)
    assert np.shares_memory(plan.kv_indices, rooms[1])
    np.testing.assert_array_equal(rooms[0], paged.table[0])
    want = paged.run(q, ints(0, 1, 2, 3))[0]
    np.testing.assert_array_equal(wrapper.run(q, paged.cache), want)
    with pytest.raises(UsageError, match=r"needs the buffers paged_kv_indptr_buffer, .* missing"):
        BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True)
    with pytest.raises(UsageError, match="paged_kv_indptr_buffer is for use_cuda_graph=True"):
        BatchDecodeWithPagedKVCacheWrapper(paged_kv_indptr_buffer=rooms[0])
    with pytest.raises(UsageError, match="paged_kv_indptr_buffer must have 2 elements for the 1 "):
        BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True, False, *(ints(0),) * 3)
    out = np.zeros_like(q)
    with n_threads(1), parallel_for.capture() as seen:  # a CPU's graph
        wrapper.run(q, paged.cache, out=out)
    other = Paged(np.random.default_rng(7), [9, 20, 3], (6, 2, 64), 16)
    for there, pages in zip(paged.cache, other.cache, strict=True):
        there[: len(pages)] = pages.astype(np.float16)
    with n_threads(1):
        assert plan_decode(wrapper, other) is plan
        want = wrapper.run(q, paged.cache)
    ThreadPool(1).run_graph(CpuGraph(seen.calls, 1))
    np.testing.assert_array_equal(out, want)
    with pytest.raises(UsageError, match="sm_scale must stay None with use_cuda_graph"):
        plan_decode(wrapper, other, sm_scale=1.0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("format", [None, "q8_0"])
def test_ragged_keys_have_the_bits_of_pages(layout: str, format: str | None) -> None:
    rng = np.random.default_rng(4)
    paged = Paged(rng, [40, 0, 130], (4, 2, 64), 16, format=format)
    rows = ints(0, 7, 7, 10)
    q = normal(rng, 10, 4, 64)
    k, v = np.concatenate(paged.k), np.concatenate(paged.v)
    if layout == "HND":
        k, v = (np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (k, v))
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(kv_layout=layout)
    plan = wrapper.plan(rows, ints(0, 40, 40, 170), 4, 2, 64, causal=True, kv_format=format)
    assert plan.kv_lens.tolist() == [40, 0, 130]
    out, lse = wrapper.run(q, k, v, return_lse=True)
    want = paged.run(q, rows)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])
    with pytest.raises(UsageError, match="k must have shape"):
        wrapper.run(q, k[:, 1:].copy(), v)


def test_lengths_in_tokens() -> None:
    paged, _ = decode()
    q = normal(np.random.default_rng(5), 6, 6, 64)
    rows, (indptr, indices, _) = ints(0, 4, 5, 6), paged.table
    batch = BatchAttention()
    sizes = (6, 2, 64, 64, 16)
    batch.plan(rows, indptr, indices, np.array(LENS, np.int32), *sizes, causal=True)
    out, lse = batch.run(q, paged.cache)
    want = paged.run(q, rows)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])
    half = batch.run(q, paged.cache, v_scale=0.5)[0]
    np.testing.assert_array_equal(half, out / 2)
    with pytest.raises(UsageError, match=r"logits_soft_cap must be the plan's \(0.0\), got 5.0"):
        batch.run(q, paged.cache, logits_soft_cap=5.0)
    with pytest.raises(UsageError, match=r"kv_len_arr of request 1 must be 0\.\.16, .* got 17"):
        batch.plan(rows, indptr, indices, ints(33, 17, 150), *sizes)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"q_data_type": "float16"}, TypeError, "q was planned as float16, got an array of float3"),
        ({"kv_data_type": np.float32}, TypeError, "paged_kv_cache was planned as float32, got"),
        ({"data_type": "float16"}, TypeError, "q was planned as float16, got an array of float3"),
        (
            {"data_type": "float32", "q_data_type": "float32"},
            TypeError,
            "paged_kv_cache was planned as float32, got",
        ),
        ({"kv_format": "q8_0"}, TypeError, "in format q8_0 must have dtype uint8, got float16"),
        ({"head_dim_vo": 32}, UsageError, "paged_kv_cache"),
    ],
)
def test_arrays_that_do_not_fit_the_plan(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    paged, q = decode()
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    plan_decode(wrapper, paged, **options)
    with pytest.raises(error, match=words):
        wrapper.run(q, paged.cache)


def test_a_float8_type_of_the_cache_is_its_format() -> None:
    rng = np.random.default_rng(11)
    paged, q = decode(dtype=np.float32)
    codes = tuple(rng.integers(0, 0x7E, side.shape).astype(np.uint8) for side in paged.cache)
    wrapper, named = BatchDecodeWithPagedKVCacheWrapper(), BatchDecodeWithPagedKVCacheWrapper()
    plan_decode(wrapper, paged, kv_data_type="float8_e4m3fn")
    plan_decode(named, paged, kv_format="f8_e4m3")
    found = wrapper.run(q, codes, k_scale=0.01)
    np.testing.assert_array_equal(found, named.run(q, codes, k_scale=0.01))
    with pytest.raises(TypeError, match="paged_kv_cache in format f8_e4m3 must have dtype uint8"):
        wrapper.run(q, paged.cache)


def test_unknown_keywords_are_python_type_errors() -> None:
    paged, q = decode()
    both = {"q_data_type": "float32", "kv_data_type": "float16"}
    with pytest.raises(UsageError, match="data_type goes without q_data_type and kv_data_type, or"):
        plan_decode(BatchDecodeWithPagedKVCacheWrapper(), paged, data_type="float16", **both)
    with pytest.raises(TypeError, match="unexpected keyword argument 'jit_args'"):
        BatchDecodeWithPagedKVCacheWrapper(jit_args=[])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_tables'"):
        plan_decode(BatchDecodeWithPagedKVCacheWrapper(), paged, block_tables=None)
    for backend in ("fa2", "trtllm-gen"):
        with pytest.raises(UsageError, match="backend must be 'auto'"):
            BatchDecodeWithPagedKVCacheWrapper(backend=backend)
    with pytest.raises(UsageError, match="unknown kv_layout 'HDN'"):
        BatchAttention("HDN")
    with pytest.raises(UsageError, match="run needs a plan"):
        BatchAttention().run(q, paged.cache)


@pytest.mark.parametrize("n_bytes", [1 << 20, 100])
def test_partial_results_lie_in_the_callers_workspace(n_bytes: int) -> None:
    long = Paged(np.random.default_rng(8), [5000], (2, 1, 64), 16, "HND")
    q = normal(np.random.default_rng(9), 1, 2, 64)
    want = long.run(q, ints(0, 1))[0]
    workspace = np.full(n_bytes, 255, np.uint8)
    with n_threads(2):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace[1:], "HND")
        plan = long.plan(wrapper, ints(0, 1))
        np.testing.assert_array_equal(wrapper.run(q, long.cache), want)
    enough = n_bytes > 100
    assert (plan.n_merges > 0) is enough
    assert (workspace != 255).any() == enough


def test_workspaces_that_cannot_be_used() -> None:
    with pytest.raises(
        TypeError, match=r"float_workspace_buffer must be a NumPy array, .* got int"
    ):
        BatchDecodeWithPagedKVCacheWrapper(1 << 20)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(np.empty(128, np.uint8), "HND")
    with pytest.raises(UsageError, match="int_workspace_buffer must be None"):
        wrapper.reset_workspace_buffer(np.empty(8), np.empty(8))
    with pytest.raises(UsageError, match="float_workspace_buffer must be C-contiguous"):
        wrapper.reset_workspace_buffer(np.empty(8)[::2])

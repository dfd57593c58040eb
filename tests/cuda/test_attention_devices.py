"""Attention wrappers on arrays of a device: against float64, and bit for bit against each other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from paged import Paged, ints, normal

import nbflow_kernels as nk
from nbflow_kernels.attention import cuda as kernels
from nbflow_kernels.attention import layout as at
from nbflow_kernels.attention import reference
from nbflow_kernels.attention.device_items import Tiling, divide_for_device
from nbflow_kernels.attention.plan import build_plan
from nbflow_kernels.errors import UsageError

pytestmark = pytest.mark.compiler

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


def on_device(cupy: Any, paged: Paged) -> Paged:
    paged.cache = tuple(cupy.asarray(pages) for pages in paged.cache)  # type: ignore[assignment]
    return paged


LENS, ROWS = [33, 1, 150, 0], ints(0, 20, 21, 22, 22)


@pytest.mark.parametrize(
    ("layout", "dtype", "q_dtype", "sizes"),
    [
        ("NHD", np.float32, np.float32, (6, 2, 20)),  # the general kernel
        ("HND", np.float16, np.float32, (6, 2, 64)),  # the others: tensor cores
        ("NHD", np.float16, np.float16, (6, 2, 64)),
    ],
)
def test_mixed_batch_on_pages(
    cupy: Any, layout: str, dtype: Any, q_dtype: Any, sizes: tuple[int, int, int]
) -> None:
    rng = np.random.default_rng(1)
    paged = on_device(cupy, Paged(rng, LENS, sizes, 16, layout, dtype))
    q = normal(rng, 22, sizes[0], sizes[2]).astype(q_dtype)
    table = paged.table
    # page tables may lie on the device too
    paged.table = tuple(cupy.asarray(a) for a in table)  # type: ignore[assignment]
    got = paged.run(cupy.asarray(q), cupy.asarray(ROWS))
    assert got[0].dtype == q_dtype
    check(paged, q, ROWS, got, ATOL if q_dtype == np.float32 else HALF_ATOL)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_row_has_the_same_bits_in_any_batch_tile_and_division(cupy: Any, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    sizes, lens = (4, 2, 32), [200, 20, 150]
    paged = on_device(cupy, Paged(rng, lens, sizes, 16, "HND", dtype))
    q, rows = normal(rng, 60, 4, 32), ints(0, 30, 40, 60)
    together, _ = paged.run(cupy.asarray(q), rows, fixed_split_size=4)  # many vectors
    want = together.get()
    for last, first in ((29, 0), (59, 2)):  # decode of the last row of a request: few
        alone = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
        indptr, indices, last_len = paged.table
        pages = indices[indptr[first] : indptr[first + 1]]
        alone.plan(
            ints(0, 1), ints(0, len(pages)), pages, last_len[first : first + 1], *sizes, 16,
            causal=True, fixed_split_size=4,
        )  # fmt: skip
        row = cupy.asarray(q[last : last + 1])
        assert alone.current is not None
        for may_split in (0, 1):
            alone.current.header[at.MAY_SPLIT] = may_split
            alone.current.on_devices.clear()
            np.testing.assert_array_equal(alone.run(row, paged.cache).get()[0], want[last])
            for tiling in (kernels.GENERAL, kernels.FEW):
                assert len(divide_for_device(alone.current, tiling, 132).merges) == may_split


@pytest.mark.parametrize("name", ["q8_0", "q6", "q3h"])  # `kvcache.cases` decode all of them
def test_block_formats(cupy: Any, name: str) -> None:
    rng = np.random.default_rng(3)
    paged = on_device(cupy, Paged(rng, [40], (4, 2, 80), 16, "HND", format=name))
    q = normal(rng, 2, 4, 80)
    check(paged, q, ints(0, 2), paged.run(cupy.asarray(q), ints(0, 2)), ATOL)


@pytest.mark.parametrize(("name", "D"), [("q8_0", 64), ("q3h", 128), ("q4_0", 32)])
def test_block_formats_on_tensor_cores(cupy: Any, name: str, D: int) -> None:
    rng = np.random.default_rng(4)
    paged = on_device(cupy, Paged(rng, [70], (4, 2, D), 16, "HND", format=name))
    q = normal(rng, 2, 4, D, dtype=np.float16)
    got = paged.run(cupy.asarray(q), ints(0, 2), o_data_type=np.float32)
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
def test_options_on_tensor_cores(cupy: Any, name: str, T: int) -> None:
    rng = np.random.default_rng(5)
    options = dict(OPTIONS[name])
    D, D_vo = (96, options.pop("dim_vo")) if "dim_vo" in options else (32, 32)
    q, k, v = normal(rng, T, 4, D), normal(rng, 90, 2, D), normal(rng, 90, 2, D_vo)
    k, v = k.astype(np.float16), v.astype(np.float16)
    if options.pop("masked", False):
        options["custom_mask"] = rng.random((T, 90)) < 0.5
    sinks = normal(rng, 4)
    got = nk.single_prefill_with_kv_cache(
        *map(cupy.asarray, (q, k, v)), return_lse=True, sinks=cupy.asarray(sinks), **options
    )
    want = reference.single_prefill_with_kv_cache(q, k, v, return_lse=True, sinks=sinks, **options)
    for found, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(found.get(), wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize(("D", "T"), [(256, 17), (128, 17), (80, 3)])
def test_head_sizes_on_tensor_cores(cupy: Any, D: int, T: int) -> None:
    rng = np.random.default_rng(6)
    q, k, v = normal(rng, T, 1, D), normal(rng, 70, 1, D), normal(rng, 70, 1, D)
    k, v = k.astype(np.float16), v.astype(np.float16)
    want = reference.single_prefill_with_kv_cache(q, k, v, causal=True)
    exact = nk.single_prefill_with_kv_cache(*map(cupy.asarray, (q, k, v)), causal=True)
    np.testing.assert_allclose(exact.get(), want, rtol=0, atol=ATOL)


def test_bfloat16_caches_keep_what_they_hold(cupy: Any) -> None:
    rng = np.random.default_rng(7)
    paged = on_device(cupy, Paged(rng, [70, 9], (4, 2, 32), 16, "HND", format="bf16"))
    q, rows = normal(rng, 12, 4, 32), ints(0, 11, 12)
    # queries and weights are two bfloat16 numbers each: 2**-17 instead of 2**-24
    check(paged, q, rows, paged.run(cupy.asarray(q), rows), 2e-5)


def test_nan_in_what_a_row_sees_is_not_lost_and_other_rows_do_not_see_it(cupy: Any) -> None:
    rng = np.random.default_rng(8)
    for dtype, D in ((np.float32, 20), (np.float16, 32)):
        q, k, v = normal(rng, 3, 1, D), normal(rng, 40, 1, D), normal(rng, 40, 1, D)
        k[38, 0, 0] = np.nan
        out = nk.single_prefill_with_kv_cache(
            *map(cupy.asarray, (q, k.astype(dtype), v.astype(dtype))), causal=True
        ).get()
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1:]).all()


def test_ragged_batch(cupy: Any) -> None:
    rng = np.random.default_rng(9)
    qo, kv = ints(0, 3, 4), ints(0, 40, 110)
    q, k, v = normal(rng, 4, 4, 32), normal(rng, 110, 2, 32), normal(rng, 110, 2, 32)
    for layout in ("NHD", "HND"):
        wrapper = nk.BatchPrefillWithRaggedKVCacheWrapper(kv_layout=layout)
        wrapper.plan(cupy.asarray(qo), cupy.asarray(kv), 4, 2, 32, causal=True)
        keys = [a if layout == "NHD" else a.swapaxes(0, 1).copy() for a in (k, v)]
        got = wrapper.run(cupy.asarray(q), *map(cupy.asarray, keys)).get()
        for (a, b), (c, d) in zip(pairwise(qo), pairwise(kv), strict=True):
            want = reference.single_prefill_with_kv_cache(q[a:b], k[c:d], v[c:d], causal=True)
            np.testing.assert_allclose(got[a:b], want, rtol=0, atol=ATOL)


def test_decode_wrapper_and_lengths_in_tokens(cupy: Any) -> None:
    rng = np.random.default_rng(10)
    paged = on_device(cupy, Paged(rng, [33, 5], (4, 2, 32), 16, "HND", np.float16))
    q, rows = normal(rng, 2, 4, 32), ints(0, 1, 2)
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(kv_layout="HND")
    wrapper.plan(*paged.table, 4, 2, 32, 16)
    check(paged, q, rows, wrapper.run(cupy.asarray(q), paged.cache, return_lse=True), ATOL)
    batch = nk.BatchAttention("HND")
    batch.plan(rows, *paged.table[:2], ints(33, 5), 4, 2, 32, 32, 16, causal=True)
    check(paged, q, rows, batch.run(cupy.asarray(q), paged.cache), ATOL)


def test_cascade_and_shared_prefix(cupy: Any) -> None:
    rng = np.random.default_rng(11)
    pages = normal(rng, 9, 2, 2, 4, 32)  # HND
    tables = (
        [ints(0, 3), ints(0, 1, 3)], [ints(0, 4), ints(0, 2, 5)], [ints(0, 1, 2, 3),
        ints(4, 5, 6, 7, 8)], [ints(4), ints(2, 3)], 4, 2, 32, 4,
    )  # fmt: skip
    q = normal(rng, 3, 4, 32)
    host = nk.MultiLevelCascadeAttentionWrapper(2, kv_layout="HND")
    device = nk.MultiLevelCascadeAttentionWrapper(2, kv_layout="HND")
    host.plan(*tables, causal=True)
    device.plan(*tables, causal=True)
    want = host.run(q, pages, return_lse=True)
    got = device.run(cupy.asarray(q), cupy.asarray(pages), return_lse=True)
    for found, wanted in zip(got, want, strict=True):  # the host's own error comes on top
        np.testing.assert_allclose(found.get(), wanted, rtol=0, atol=2 * ATOL)
    prefix = normal(rng, 2, 2, 20, 32)
    results = []
    for place in (np.asarray, cupy.asarray):
        wrapper = nk.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(kv_layout="HND")
        wrapper.begin_forward(
            ints(0, 1, 3), ints(0, 2, 5), ints(4, 5, 6, 7, 8), ints(2, 3), 4, 2, 32, 4
        )
        results.append(wrapper.forward(place(q), place(prefix[0]), place(prefix[1]), place(pages)))
    np.testing.assert_allclose(results[1].get(), results[0], rtol=0, atol=2 * ATOL)


@pytest.mark.parametrize("sizes", [(5, 20, 7), (16, 512, 64)])
def test_latent_attention(cupy: Any, sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(12)
    H, D_ckv, D_kpe = sizes
    both = normal(rng, 6, 4, D_ckv + D_kpe)
    caches = both[..., :D_ckv], both[..., D_ckv:]
    q = normal(rng, 3, H, D_ckv), normal(rng, 3, H, D_kpe)
    results = []
    for place in (np.asarray, cupy.asarray):
        wrapper = nk.BatchMLAPagedAttentionWrapper()
        tables = ints(0, 2, 3), ints(0, 4, 6), ints(5, 0, 3, 1, 2, 4), ints(15, 6)
        wrapper.plan(*tables, *sizes, 4, True, 0.1)
        joined = place(both)
        pages = (joined[..., :D_ckv], joined[..., D_ckv:])
        results.append(wrapper.run(place(q[0]), place(q[1]), *pages, return_lse=True))
    assert caches[0].shape == (6, 4, D_ckv)
    for found, wanted in zip(results[1], results[0], strict=True):
        # scores of 576 products with a factor of 0.1 instead of 0.04: 5e-6 on either side
        np.testing.assert_allclose(found.get(), wanted, rtol=0, atol=1e-5)


def test_block_sparse(cupy: Any) -> None:
    rng = np.random.default_rng(13)
    q, k, v = normal(rng, 10, 4, 32), normal(rng, 64, 2, 32), normal(rng, 64, 2, 32)
    mask = rng.random((4, 4, 16)) < 0.6
    sizes = (ints(0, 2, 2, 4), ints(3, 0, 1, 2), 10, 64, 4, 16, 4, 2, 32)
    results = []
    for place in (np.asarray, cupy.asarray):
        wrapper = nk.BlockSparseAttentionWrapper()
        wrapper.plan(*sizes, mask=mask, causal=True)
        results.append(wrapper.run(place(q), place(k), place(v)))
    np.testing.assert_allclose(results[1].get(), results[0], rtol=0, atol=2 * ATOL)
    chosen = rng.random((2, 2, 3)) < 0.6
    shapes = np.array([[4, 6], [10, 0]], np.int32), np.array([[16, 32, 16]] * 2, np.int32)
    results = []
    for place in (np.asarray, cupy.asarray):
        variable = nk.VariableBlockSparseAttentionWrapper()
        variable.plan(chosen, *shapes, 4, 2, 32)
        heads = [place(np.ascontiguousarray(a.swapaxes(0, 1))) for a in (q, k, v)]
        results.append(variable.run(*heads, return_lse=True))
    for found, wanted in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(found.get(), wanted, rtol=0, atol=2 * ATOL)


def test_arrays_on_the_wrong_side_are_named(cupy: Any) -> None:
    q, k = np.zeros((1, 2, 16), np.float32), np.zeros((3, 2, 16), np.float32)
    with pytest.raises(TypeError, match="k must be on the device, as q is"):
        nk.single_prefill_with_kv_cache(cupy.asarray(q), k, k)
    out = np.zeros_like(q)
    with pytest.raises(TypeError, match="out must be on the device, as q is"):
        nk.single_prefill_with_kv_cache(*map(cupy.asarray, (q, k, k)), out=out)
    buffers = [cupy.zeros(4, np.int32)] * 4
    wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, *buffers)
    with pytest.raises(TypeError, match="qo_indptr_buf must be a NumPy array"):
        wrapper.plan(ints(0, 1), ints(0, 1), ints(0), ints(1), 1, 1, 16, 4)


def test_division_covers_every_key_once_and_leaves_requests_to_other_kernels() -> None:
    lens = np.array([1300, 20, 0, 700], np.int32)
    rows = ints(0, 30, 31, 31, 51)
    pages = ints(0, 82, 84, 84, 128)
    plan = build_plan(
        rows, pages, np.arange(128, dtype=np.int32), lens, (4, 2, 32), 16, kv_layout="NHD",
        causal=True, window_left=900, logits_soft_cap=0.0, sm_scale=1.0,
    )  # fmt: skip
    for tiling in (Tiling(16), Tiling(64, more_than=16)):
        found = divide_for_device(plan, tiling, 1000)
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


def test_header_places_are_those_of_the_cuda_source() -> None:
    from pathlib import Path

    source = (Path(kernels.__file__).parent / "plan.cuh").read_text()
    names = source.split("enum Place {")[1].split("}")[0].replace("\n", " ").split(",")
    for number, name in enumerate(name.strip() for name in names):
        assert getattr(at, name) == number


def _transform(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head):  # type: ignore[no-untyped-def]
    return logit + params[0][qo_head] * (kv_idx - qo_idx) + params[1]


def _mask(params, batch, qo_idx, kv_idx, qo_head, kv_head):  # type: ignore[no-untyped-def]
    return (kv_idx + qo_head + batch) % 3 != 0


def _output(params, output, batch, qo_idx, qo_head):  # type: ignore[no-untyped-def]
    return output * (1 + qo_idx)


@pytest.mark.parametrize("use_softmax", [True, False])
def test_users_functions(cupy: Any, use_softmax: bool) -> None:
    rng = np.random.default_rng(14)
    params = (np.linspace(-0.1, 0.1, 4), 0.25)
    variant = nk.AttentionVariant(_transform, _mask, _output, params, use_softmax)
    name = "q8_0" if use_softmax else "f16"
    paged = Paged(rng, [20, 7], (4, 2, 64), 4, "HND", format=name)
    q, rows = normal(rng, 4, 4, 64), ints(0, 3, 4)
    results = []
    for place in (np.asarray, cupy.asarray):
        wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
        paged.plan(wrapper, rows, window_left=9, variant=variant)
        pages = tuple(place(pages) for pages in paged.cache)
        results.append(wrapper.run(place(q), pages, return_lse=use_softmax, v_scale=0.5))
    pairs = zip(*results, strict=True) if use_softmax else [results]
    for wanted, found in pairs:  # results up to 4 times as large as usual, of both
        np.testing.assert_allclose(found.get(), wanted, rtol=0, atol=8 * ATOL)


def test_functions_that_cannot_be_compiled_are_named(cupy: Any) -> None:
    def transform(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head):  # type: ignore[no-untyped-def]
        return no_such_name + logit  # noqa: F821

    x = cupy.asarray(np.zeros((1, 1, 16), np.float32))
    with pytest.raises(UsageError, match=r"variant cannot be compiled.*no_such_name"):
        nk.single_prefill_with_kv_cache(x, x, x, variant=nk.AttentionVariant(transform))

"""Tensor-core attention over quantized caches: layouts, copy modes, options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal, store

import nbflow_kernels as nk
from nbflow_kernels.attention import cuda as kernels
from nbflow_kernels.attention import reference
from nbflow_kernels.attention.cases import cut_of_values
from nbflow_kernels.attention.cuda import quantized_kv
from nbflow_kernels.attention.cuda.call_shape import CallShape
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.cuda import device_of
from nbflow_kernels.kv_cache.formats import kv_formats
from nbflow_kernels.kv_cache.page_table import strides

# Queries and weights are exact to 2**-22 and products of keys are added exactly, so where tensor
# cores are exact, the tolerance is that of float32 all the way.
ATOL = 3e-6


def on_device(xp: Any, paged: Paged) -> Paged:
    paged.cache = tuple(xp.asarray(pages) for pages in paged.cache)  # type: ignore[assignment]
    return paged


def with_cut(format: str) -> float:
    """Return the tolerance of results for values of a format, as tensor cores round."""
    return ATOL + (0 if format == "f16" else cut_of_values(int(format[1])))


def check(
    paged: Paged, q: np.ndarray, rows: np.ndarray, got: Any, atol: float = with_cut("q8_0")
) -> None:
    """Compare results and LSE with the reference, request by request."""
    out, lse = (a.get() for a in got)
    for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True)):
        own = slice(rows[i], rows[i + 1])
        if not len(k):
            continue
        values, sums = reference.single_prefill_with_kv_cache(
            q[own], k, v, causal=True, return_lse=True, **paged.format
        )
        # those of a block format are padded to whole blocks
        np.testing.assert_allclose(out[own], values[..., : out.shape[2]], rtol=0, atol=atol)
        np.testing.assert_allclose(lse[own], sums, rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("name", "sizes", "page_size", "layout"),
    [
        ("q8_0/q3h", (7, 1, 96), 5, "NHD"),  # rows of 102 bytes, copied two at a time
        ("q4_0/q6", (4, 2, 64), 3, "NHD"),  # 36: four
        ("q3/q5_1", (1, 1, 160), 16, "HND"),  # 16 keys of a warp at a time
        ("q3h/q3", (8, 1, 64), 16, "HND"),
        ("q6/f16", (4, 1, 64), 16, "HND"),
        ("f16/q4_1", (4, 1, 32), 16, "NHD"),
    ],
)
def test_layouts_of_codes_and_ways_of_copying(
    xp: Any, name: str, sizes: tuple[int, int, int], page_size: int, layout: str
) -> None:
    """Fields of 8, 4 and 2 bits, planes of high bits, pair codes; zero points and bases."""
    atol = with_cut(name.split("/")[1])
    if hasattr(xp, "reset"):  # emulated: exact sums show errors that the cut would hide
        xp.reset(exact_mma=True)
        atol = ATOL
    rng = np.random.default_rng(1)
    paged = on_device(xp, Paged(rng, [37, 1, 0], sizes, page_size, layout, format=name))
    q, rows = normal(rng, 3, sizes[0], sizes[2]), ints(0, 1, 2, 3)
    check(paged, q, rows, paged.run(xp.asarray(q), rows), atol)


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sums_over_values_of_few_bits_are_cut_on_tensor_cores(arch: str, cupy: Any) -> None:
    """More than in float32, and less than the tolerance; scores are as exact as in float32."""
    cupy.reset(arch=arch)
    rng = np.random.default_rng(1)
    sizes, q, rows = (8, 1, 64), normal(rng, 3, 8, 64), ints(0, 1, 2, 3)
    paged = on_device(cupy, Paged(rng, [37, 9, 0], sizes, 16, "HND", format="q3h/q3"))
    got = paged.run(cupy.asarray(q), rows)
    check(paged, q, rows, got, with_cut("q3"))
    with pytest.raises(AssertionError):
        check(paged, q, rows, got, ATOL)


def test_a_row_has_the_same_bits_in_any_batch_tile_and_division(xp: Any) -> None:
    """Decode and prefill, splits in one item and in several, block and row copies."""
    rng = np.random.default_rng(3)
    sizes, lens = (4, 2, 32), [100, 5, 70]
    paged = Paged(rng, lens, sizes, 16, "HND", format="q4_0")
    rows_first = tuple(np.ascontiguousarray(pages.swapaxes(1, 2)) for pages in paged.cache)
    q, rows = normal(rng, 15, 4, 32), ints(0, 9, 10, 15)
    want = on_device(xp, paged).run(xp.asarray(q), rows, fixed_split_size=4)[0].get()  # 16 vectors
    np.testing.assert_array_equal(
        paged.run(xp.asarray(q), rows, fixed_split_size=4, disable_split_kv=True)[0].get(), want
    )
    indptr, indices, last_len = paged.table
    caches = {"HND": paged.cache, "NHD": tuple(map(xp.asarray, rows_first))}
    for last, first, layout in ((8, 0, "HND"), (14, 2, "NHD")):  # decode of a last row: 4 vectors
        pages = indices[indptr[first] : indptr[first + 1]]
        alone = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout=layout)
        alone.plan(
            ints(0, 1), ints(0, len(pages)), pages, last_len[first : first + 1], *sizes, 16,
            causal=True, fixed_split_size=4, kv_format="q4_0",
        )  # fmt: skip
        found = alone.run(xp.asarray(q[last : last + 1]), caches[layout]).get()[0]
        np.testing.assert_array_equal(found, want[last])


@pytest.mark.compiler
def test_bulk_copies_bring_the_same_bits(cupy: Any) -> None:
    """Bulk copies on compute capability 9.0, with stages reused."""
    rng = np.random.default_rng(4)
    paged = Paged(rng, [270], (4, 1, 32), 16, "HND", format="q8_0")
    q, pages, results = normal(rng, 1, 4, 32), paged.cache, []
    for arch in ("sm_80", "sm_90"):
        cupy.reset(arch=arch, exact_mma=True)  # else their tensor cores round differently
        paged.cache = pages
        found = on_device(cupy, paged).run(cupy.asarray(q), ints(0, 1))
        check(paged, q, ints(0, 1), found)
        results.append(found[0].get())
    np.testing.assert_array_equal(*results)


OPTIONS: dict[str, dict[str, Any]] = {
    "alibi_and_cap": {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 5.0, "causal": True},
    "window": {"causal": True, "window_left": 20},
    "mask": {"masked": True},
    "natural": {"lse_base": "e", "scale_q": 0.5, "v_scale": 0.25},
}


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(xp: Any, name: str, T: int) -> None:
    rng = np.random.default_rng(5)
    options = {**OPTIONS[name], "kv_format": "q8_0", "kv_layout": "HND"}
    q = normal(rng, T, 2, 32)
    k, v = (store(normal(rng, 1, 96, 32), "q8_0") for _ in "kv")
    if options.pop("masked", False):
        options["custom_mask"] = rng.random((T, 96)) < 0.5
    sinks = normal(rng, 2)
    found = nk.single_prefill_with_kv_cache(
        *map(xp.asarray, (q, k, v)), return_lse=True, sinks=xp.asarray(sinks), **options
    )
    want = reference.single_prefill_with_kv_cache(q, k, v, return_lse=True, sinks=sinks, **options)
    for one, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(one.get(), wanted, rtol=0, atol=with_cut("q8_0"))


@pytest.mark.parametrize("factor", [5e-3, 3000.0])  # scales of 1e-4 and 70
def test_small_and_large_values_are_as_exact(xp: Any, factor: float) -> None:
    """Normal float16 scales keep their relative accuracy; ragged keys end with their array."""
    rng = np.random.default_rng(6)
    q, (k, v) = normal(rng, 2, 4, 32), (normal(rng, 70, 1, 32) for _ in "kv")
    k, v = store(k / np.float32(factor), "q8_0"), store(v * np.float32(factor), "q8_0")
    wrapper = nk.BatchPrefillWithRaggedKVCacheWrapper(kv_layout="NHD")
    wrapper.plan(
        ints(0, 1, 2), ints(0, 40, 70), 4, 1, 32, causal=True, kv_format="q8_0", sm_scale=factor / 6
    )
    got = wrapper.run(*map(xp.asarray, (q, k, v))).get()
    for i, own in enumerate((slice(0, 40), slice(40, 70))):
        want = reference.single_prefill_with_kv_cache(
            q[i : i + 1], k[own], v[own], causal=True, kv_format="q8_0", sm_scale=factor / 6
        )
        atol = with_cut("q8_0")
        np.testing.assert_allclose(got[i : i + 1] / factor, want / factor, rtol=0, atol=atol)


def test_nan_in_a_scale_reaches_those_who_see_it(xp: Any) -> None:
    rng = np.random.default_rng(7)
    q = normal(rng, 3, 1, 32)
    k, v = (store(normal(rng, 1, 48, 32), "q8_0") for _ in "kv")
    k[0, 46, :2] = 0xFF  # the scale of the last key but one
    found = nk.single_prefill_with_kv_cache(
        *map(xp.asarray, (q, k, v)), causal=True, kv_format="q8_0", kv_layout="HND"
    ).get()
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1:]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_splits_that_are_no_whole_steps(xp: Any, dtype: Any) -> None:
    rng = np.random.default_rng(8)
    paged = on_device(xp, Paged(rng, [230], (4, 1, 32), 16, "HND", format="q8_0"))
    q = normal(rng, 1, 4, 32).astype(dtype)
    options = {"fixed_split_size": 9, "o_data_type": np.float32}
    check(paged, q, ints(0, 1), paged.run(xp.asarray(q), ints(0, 1), **options))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_float8_codes_are_exact_on_tensor_cores(xp: Any, dtype: Any) -> None:
    """Both types are float16 numbers, so a float8 cache is as exact as one of float16."""
    rng = np.random.default_rng(9)
    name, sizes, rows = "f8_e4m3/f8_e5m2", (4, 2, 32), ints(0, 1, 4)
    paged = on_device(xp, Paged(rng, [70, 5], sizes, 16, "HND", format=name))
    q = normal(rng, 4, 4, 32).astype(dtype)
    wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
    plan = paged.plan(wrapper, rows, o_data_type=np.float32)
    kinds = tuple(format.kind for format in kv_formats(name))
    steps = tuple(strides(pages, "HND") for pages in paged.cache)
    there = xp.asarray(q)
    shape = CallShape.of(plan, device_of(there), there, *paged.cache, steps, kinds)
    assert kernels.mma_supports(shape)
    got = wrapper.run(xp.asarray(q), paged.cache, k_scale=0.75, v_scale=1.5).get()
    in_float64 = reference.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
    paged.plan(in_float64, rows, k_scale=0.75, v_scale=1.5)
    want = in_float64.run(q, tuple(pages.get() for pages in paged.cache))
    # float16 queries: weights are rounded to 2**-12 of themselves, values times 1.5 are below 8
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * ATOL if dtype == np.float32 else 2e-3)


def test_what_is_left_to_other_kernels(xp: Any) -> None:
    """Float32 and bfloat16 mixed with block formats, wide heads, fused RoPE."""

    def taken(name: str, D: int, **options: Any) -> bool:
        formats = kv_formats(name)
        plan = AttentionPlan((2, 1, D, D), 16, kv_layout="HND", sm_scale=1.0, **options)
        plan_into(plan, ints(0, 1), ints(0, 1), ints(0), ints(9))
        k, v = (xp.asarray(np.zeros((1, 1, 16, f.row_length(D)), f.dtype)) for f in formats)
        steps, kinds = tuple(strides(a, "HND") for a in (k, v)), tuple(f.kind for f in formats)
        return quantized_kv.supports(CallShape.of(plan, device_of(k), k, k, v, steps, kinds))

    assert all(taken(name, 256) for name in ("q8_0", "q4_0/f16", "q3h", "q2/q8"))
    assert taken("q8_0", 80)  # padded to whole blocks
    for name in ("f32/q8_0", "q8_0/bf16", "f16", "f16/f32"):
        assert not taken(name, 64)
    assert not taken("q8_0", 288)
    assert not taken("q8_0/f16", 80)  # float16 rows are not padded

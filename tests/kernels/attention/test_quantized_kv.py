"""Attention over quantized caches: exact for the stored numbers, and the error of each format."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints

import nbflow_kernels as nk
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention import reference
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.benchmarks import kv_cache_error
from nbflow_kernels.cpu.register_tiles import has_wide_registers
from nbflow_kernels.kv_cache.cases import page_table
from nbflow_kernels.kv_cache.cpu_codec import KINDS

# As nbflow_kernels.attention.cases: float32 scores, and means of values up to 5.  The cache's own
# rounding does not count: the reference reads the same cache.
ATOL = 3e-6

# The error of attention over N(0, 1) keys and values in the format, relative to the results, as
# ``python -m nbflow_kernels.benchmarks.kv_cache_error`` prints it, rounded up in the second digit.
TOTAL_ERROR = {
    "f32": 1e-7,
    "f16": 3.1e-4,
    "bf16": 2.5e-3,
    "q8_b32t1": 6.8e-3,
    "q8_b32t2": 7.8e-3,
    "q6_b64t1": 0.031,
    "q5_b32t1": 0.055,
    "q5_b64t1": 0.066,
    "q5h_b64t1": 0.044,
    "q4_b32t1a": 0.12,
    "q4_b32t1b": 0.12,
    "q4_b64t1": 0.14,
    "q3h_b64t1": 0.21,
    "q3_b32t1a": 0.26,
    "q3_b32t1b": 0.23,
    "q2_b32t1a": 0.62,
    "q2_b32t1b": 0.45,
    "q8_0": 7.8e-3,
    "q5_1": 0.055,
    "q5_0": 0.061,
    "q4_1": 0.12,
    "q4_0": 0.13,
    "lm4": 0.13,
    "lm3": 0.26,
    "lm2": 0.45,
    "f8_e4m3": 0.039,
    "f8_e5m2": 0.078,
    "nvfp4": 0.15,
}


@pytest.mark.parametrize("name", TOTAL_ERROR)
def test_total_error_of_a_format_is_what_is_stated(name: str) -> None:
    assert 0.8 * TOTAL_ERROR[name] * (name != "f32") <= kv_cache_error.attention_error(name)
    assert kv_cache_error.attention_error(name) <= TOTAL_ERROR[name]


def test_table_has_a_row_for_every_format() -> None:
    lines = kv_cache_error.table().splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == [*KINDS, "nvfp4"]


PAIRS = ("q8_0/q4_0", "q3h/q5_1", "q8_0/f16", "f16/q8_0", "f8_e4m3/q4_0")
"""Formats of keys and of values: mixed block formats, and block formats with floats."""


@pytest.mark.parametrize("name", PAIRS)
def test_each_side_of_a_pair_holds_what_it_holds_alone(name: str, rng: np.random.Generator) -> None:
    G, D, lens = 2, 36, [9, 3]
    state = rng.bit_generator.state
    held = {}
    for format in (name, *name.split("/")):
        rng.bit_generator.state = state  # the same numbers
        _, _, held[format] = cache_of(rng, format, lens, G, D, 4, "HND")
    keys, values = name.split("/")
    for both, left, right in zip(held[name], held[keys], held[values], strict=True):
        np.testing.assert_array_equal(both[0], left[0])
        np.testing.assert_array_equal(both[1], right[1])


@pytest.mark.parametrize("name", ["q8_0", *PAIRS])  # q8_0: few rows in place, many decoded
def test_a_pair_has_the_same_bits_alone_in_a_batch_and_on_any_pages(
    name: str, rng: np.random.Generator
) -> None:
    rows = ints(0, 3, 73, 74)
    q = rng.standard_normal((74, 4, 32)).astype(np.float32)
    for page_size, layout in ((64, "HND"), (8, "NHD")):
        paged = Paged(rng, [130, 70, 20], (4, 2, 32), page_size, layout, format=name)
        out, lse = paged.run(q, rows)
        for (a, b), k, v in zip(pairwise(rows), paged.k, paged.v, strict=True):
            alone = nk.single_prefill_with_kv_cache(
                q[a:b], k, v, causal=True, return_lse=True, kv_format=name
            )
            np.testing.assert_array_equal(out[a:b], alone[0])
            np.testing.assert_array_equal(lse[a:b], alone[1])
            want = reference.single_prefill_with_kv_cache(q[a:b], k, v, causal=True, kv_format=name)
            np.testing.assert_allclose(out[a:b], want[..., :32], rtol=0, atol=ATOL)


@pytest.mark.skipif(not has_wide_registers(), reason="blocks in place need 32 vector registers")
@pytest.mark.parametrize(
    ("name", "dims", "in_place"),
    [
        ("q8_0", (64, 64), (True, True)),
        ("q8_0/f16", (64, 64), (True, False)),
        ("f16/q8_0", (64, 64), (False, True)),
        ("q8_0/q4_0", (64, 64), (True, False)),
        ("q8_0", (64, 48), (True, False)),
    ],
)
def test_each_side_is_read_in_place_where_it_can_be(
    name: str, dims: tuple[int, int], in_place: tuple[bool, bool]
) -> None:
    keys, _, values = name.partition("/")
    kinds = KINDS[keys], KINDS[values or keys]
    for n_vectors in (launch.BLOCKS_UP_TO, launch.BLOCKS_UP_TO + 1):
        plan = AttentionPlan((1, 1, *dims), 16)
        plan.header[at.MAX_VECTORS] = n_vectors
        readers = launch._readers(plan, kinds, 0, 0, (64,) * 8)
        found = tuple(isinstance(like, np.int8) for _, like, _, _ in readers)
        assert found == (in_place if n_vectors == launch.BLOCKS_UP_TO else (False, False))


def cache_of(
    rng: np.random.Generator,
    name: str,
    lens: list[int],
    G: int,
    D: int,
    page_size: int,
    layout: str,
) -> tuple[Any, tuple[np.ndarray, np.ndarray, np.ndarray], Any]:
    """Return a cache filled by `append_paged_kv_cache`, its page table, and its decoded numbers."""
    indptr, indices, last = page_table(rng, lens, page_size)
    inner = (page_size, G) if layout == "NHD" else (G, page_size)
    cache = tuple(
        np.zeros((len(indices), *inner, format.row_length(D)), format.dtype)
        for format in nk.kv_formats(name)
    )
    starts = np.cumsum([0, *lens]).astype(np.int32)
    places = nk.get_batch_indices_positions(starts, np.array(lens, np.int32), int(starts[-1]))
    new = (rng.standard_normal((sum(lens), G, D)).astype(np.float32) for _ in "kv")
    nk.append_paged_kv_cache(*new, *places, cache, indices, indptr, last, layout, kv_format=name)
    held = nk.gather_paged_kv_cache(
        cache, indices, indptr, last, layout, head_dim=D, kv_format=name
    )
    parts = [tuple(a[x:y] for a in held) for x, y in pairwise(starts)]
    return cache, (indptr, indices, last), parts


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", [*KINDS, *PAIRS])
def test_prefill_reads_exactly_what_the_cache_holds(
    name: str, layout: str, rng: np.random.Generator
) -> None:
    H, G, D, rows = 4, 2, 80 if layout == "NHD" else 64, [5, 1, 70]
    cache, tables, held = cache_of(rng, name, [9, 130, 70], G, D, 4, layout)
    wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout=layout)
    qo_indptr = np.cumsum([0, *rows]).astype(np.int32)
    wrapper.plan(qo_indptr, *tables, H, G, D, 4, causal=True, kv_format=name)
    q = rng.standard_normal((sum(rows), H, D)).astype(np.float32)
    out = wrapper.run(q, cache)
    for (a, b), (k, v) in zip(pairwise(qo_indptr), held, strict=True):
        want = reference.single_prefill_with_kv_cache(q[a:b], k, v, causal=True)
        np.testing.assert_allclose(out[a:b], want, rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", [*KINDS, *PAIRS])
def test_decode_reads_exactly_what_the_cache_holds(name: str, rng: np.random.Generator) -> None:
    H, G, D, lens = 8, 2, 128, [300, 1, 64]
    cache, tables, held = cache_of(rng, name, lens, G, D, 16, "HND")
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper(kv_layout="HND")
    wrapper.plan(*tables, H, G, D, 16, kv_format=name)
    q = rng.standard_normal((3, H, D)).astype(np.float32)
    out = wrapper.run(q, cache)
    for i, (k, v) in enumerate(held):
        want = reference.single_decode_with_kv_cache(q[i], k, v)
        np.testing.assert_allclose(out[i], want, rtol=0, atol=ATOL)


def test_the_documented_table_is_the_computed_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "kvcache.md").read_text()
    assert kv_cache_error.table() in text

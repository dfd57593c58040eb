"""Cascades against attention over whole sequences in float64, and their predicted gain."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

import nbflow_kernels as nk
from nbflow_kernels.attention import reference
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.reference import gather_paged_kv_cache

# A level is off by 3e-6 (see nbflow_kernels.attention.cases); a merge is a mean of two results with
# weights off by 1e-7 each and one more rounding to float32, 5 * 2e-7, for each of up to 2 merges.
ATOL = 5e-6


class Tree:
    """Requests whose sequences share keys level by level, in pages of one cache."""

    def __init__(
        self,
        rng: np.random.Generator,
        rows: list[list[int]],
        lens: list[list[int]],
        heads: tuple[int, int, int] = (4, 2, 32),
        page_size: int = 4,
        *,
        layout: str = "NHD",
        dtype: Any = np.float32,
        kv_format: str | None = None,
    ) -> None:
        H, G, D = heads
        self.heads, self.page_size, self.layout = heads, page_size, layout
        self.kv_format = kv_format
        counts = [[-(-n // page_size) for n in level] for level in lens]
        numbers = rng.permutation(sum(map(sum, counts))).astype(np.int32)
        self.rows = [np.cumsum([0, *level]).astype(np.int32) for level in rows]
        self.indptr = [np.cumsum([0, *level]).astype(np.int32) for level in counts]
        starts = np.cumsum([0, *map(sum, counts)])
        self.indices = [numbers[a:b] for a, b in itertools.pairwise(starts)]
        self.last = [
            np.array([n - max(c - 1, 0) * page_size for n, c in zip(level, count, strict=True)])
            .astype(np.int32)
            for level, count in zip(lens, counts, strict=True)
        ]  # fmt: skip
        inner = (page_size, G) if layout == "NHD" else (G, page_size)
        values = rng.standard_normal((2, len(numbers), *inner, D)).astype(np.float32)
        if kv_format is None:
            self.cache: Any = (values[0].astype(dtype), values[1].astype(dtype))
        else:
            stored = nk.kv_format(kv_format)
            shape = (*values.shape[1:-1], stored.row_length(D))
            data = (nk.quantize(v, kv_format, quantizer="reference").data for v in values)
            self.cache = tuple(d.view(stored.dtype).reshape(shape) for d in data)
        self.q = rng.standard_normal((int(self.rows[-1][-1]), H, D)).astype(np.float32)

    def plan(self, **options: Any) -> nk.MultiLevelCascadeAttentionWrapper:
        wrapper = nk.MultiLevelCascadeAttentionWrapper(len(self.rows), kv_layout=self.layout)
        if self.kv_format is not None:
            options["kv_format"] = self.kv_format
        wrapper.plan(
            self.rows, self.indptr, self.indices, self.last, *self.heads, self.page_size, **options
        )
        return wrapper

    def keys(self, level: int, entry: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of an entry, decoded."""
        part = slice(entry, entry + 1)
        pages = self.indices[level][self.indptr[level][entry] : self.indptr[level][entry + 1]]
        return gather_paged_kv_cache(
            self.cache, pages, ints(0, len(pages)), self.last[level][part], self.layout,
            head_dim=self.heads[2], kv_format=self.kv_format,
        )  # fmt: skip

    def expected(self, causal: bool, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return result and LSE row by row over whole sequences, in float64."""
        out, lse = np.empty(self.q.shape), np.empty(self.q.shape[:2])
        for request, (a, b) in enumerate(zip(self.rows[-1][:-1], self.rows[-1][1:], strict=True)):
            for row in range(a, b):
                found = [
                    self.keys(level, int(np.searchsorted(rows, row, side="right")) - 1)
                    for level, rows in enumerate(self.rows[:-1])
                ]
                k, v = self.keys(len(self.rows) - 1, request)
                n = len(k) - (b - 1 - row) if causal else len(k)
                found.append((k[:n], v[:n]))
                k, v = (np.concatenate(parts) for parts in zip(*found, strict=True))
                one, one_lse = reference.single_prefill_with_kv_cache(
                    self.q[row : row + 1].astype(np.float64), k, v, return_lse=True, **options
                )
                out[row], lse[row] = one[0], one_lse[0]
        return out, lse


# rows and keys of the entries on each level
TREES: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "decode": ([[5], [1] * 5], [[70], [3, 0, 9, 1, 17]]),
    "prefill": ([[12], [3, 1, 8]], [[33], [3, 6, 8]]),
    "three_levels": ([[9], [4, 5], [1, 3, 2, 3]], [[21], [8, 13], [4, 3, 5, 7]]),
    "two_prefixes": ([[2, 3], [1] * 5], [[40, 12], [3, 2, 9, 1, 6]]),
    "a_request_without_rows": ([[3], [1, 0, 2]], [[9], [3, 4, 5]]),
    "nothing_shared": ([[0, 2], [1, 1]], [[9, 0], [3, 4]]),
    "one_level": ([[2, 1]], [[9, 5]]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_cascade_is_attention_over_the_whole_sequences(
    name: str, causal: bool, rng: np.random.Generator
) -> None:
    tree = Tree(rng, *TREES[name])
    out, lse = tree.plan(causal=causal).run(tree.q, tree.cache, return_lse=True)
    want, want_lse = tree.expected(causal)
    np.testing.assert_allclose(out, want, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("build", "run"),
    [
        ({"layout": "HND"}, {}),
        ({"dtype": np.float16, "heads": (8, 1, 64)}, {}),
        ({"heads": (2, 2, 20), "page_size": 1}, {"sm_scale": 0.3}),
        ({}, {"logits_soft_cap": 1.5}),
        ({"kv_format": "q8_0", "layout": "HND"}, {}),
        ({"kv_format": "q4", "heads": (4, 2, 80)}, {}),
        ({"kv_format": "bf16"}, {}),
    ],
)
def test_layouts_formats_and_options(
    build: dict[str, Any], run: dict[str, Any], rng: np.random.Generator
) -> None:
    tree = Tree(rng, *TREES["three_levels"], **build)
    out = tree.plan(causal=True, **run).run(tree.q, tree.cache)
    want, _ = tree.expected(True, **run)
    np.testing.assert_allclose(out, want, rtol=0, atol=ATOL)


def test_one_level_is_bitwise_the_batch_wrapper(rng: np.random.Generator) -> None:
    tree = Tree(rng, *TREES["one_level"])
    flat = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="NHD")
    flat.plan(
        tree.rows[0], tree.indptr[0], tree.indices[0], tree.last[0], *tree.heads, 4, causal=True
    )
    out = np.full(tree.q.shape, np.nan, np.float32)
    assert tree.plan(causal=True).run(tree.q, tree.cache, out=out) is out
    np.testing.assert_array_equal(out, flat.run(tree.q, tree.cache))


@pytest.mark.usefixtures("split_everything")
def test_bitwise_the_same_with_two_threads(rng: np.random.Generator) -> None:
    tree = Tree(rng, *TREES["three_levels"], kv_format="q8_0")
    found = []
    for n in (1, 2):
        parallel_for.set_num_threads(n)
        found.append(tree.plan(causal=True).run(tree.q, tree.cache))
    np.testing.assert_array_equal(*found)


def test_half_precision_queries_give_half_precision_results(rng: np.random.Generator) -> None:
    tree = Tree(rng, *TREES["three_levels"], dtype=np.float16)
    tree.q = tree.q.astype(np.float16)
    wrapper = tree.plan(causal=True, q_data_type=np.float16, kv_data_type="float16")
    into = np.full(tree.q.shape, np.nan, np.float16)
    out = wrapper.run(tree.q, tree.cache, out=into)
    assert out is into
    want, _ = tree.expected(True)
    # levels are merged in float32; one rounding to float16
    np.testing.assert_allclose(out, want, rtol=2.0**-11, atol=ATOL)
    np.testing.assert_array_equal(wrapper.run(tree.q, tree.cache), out)
    with pytest.raises(TypeError, match="q was planned as float16, got an array of float32"):
        wrapper.run(tree.q.astype(np.float32), tree.cache)


@pytest.mark.parametrize(("P", "u", "B"), [(64, 4, 7), (16, 16, 3), (32, 0, 2)])
def test_predicted_ratio_of_two_levels(P: int, u: int, B: int, rng: np.random.Generator) -> None:
    wrapper = Tree(rng, [[B], [1] * B], [[P], [u] * B]).plan()
    assert wrapper.predicted_byte_ratio() == pytest.approx((P + u) * B / (P + u * B))


def test_predicted_ratio_in_general(rng: np.random.Generator) -> None:
    # sequences of 21 + 8 + 4, 21 + 8 + 3, 21 + 13 + 5, 21 + 13 + 7 keys against all keys once
    wrapper = Tree(rng, *TREES["three_levels"]).plan()
    assert wrapper.predicted_byte_ratio() == pytest.approx(145 / (21 + 21 + 19))
    # the prefix of 9 keys has no rows and is not read: 0 + 3, 0 + 4
    assert Tree(rng, *TREES["nothing_shared"]).plan().predicted_byte_ratio() == 1.0
    # one of three requests has no rows
    wrapper = Tree(rng, *TREES["a_request_without_rows"]).plan()
    assert wrapper.predicted_byte_ratio() == pytest.approx((9 + 3 + 9 + 5) / (9 + 3 + 5))


def test_measure_times_the_same_attention(rng: np.random.Generator) -> None:
    tree = Tree(rng, [[6], [1] * 6], [[64], [3, 0, 9, 1, 17, 2]])
    wrapper = tree.plan()
    timing = wrapper.measure(tree.q, tree.cache, repeats=2)
    assert timing.predicted_byte_ratio == wrapper.predicted_byte_ratio()
    assert timing.measured_ratio == timing.flat_s / timing.cascade_s > 0
    assert wrapper._flat is not None
    flat = wrapper._flat().run(tree.q, tree.cache)
    np.testing.assert_allclose(flat, tree.expected(False)[0], rtol=0, atol=ATOL)


def test_a_prefix_that_ends_within_a_page_cannot_be_timed(rng: np.random.Generator) -> None:
    tree = Tree(rng, *TREES["decode"])  # 70 keys on pages of 4
    with pytest.raises(UsageError, match="level 0 ends within a page of 4 tokens"):
        tree.plan().measure(tree.q, tree.cache)


def test_wrong_cascades_are_named(rng: np.random.Generator) -> None:
    tree = Tree(rng, *TREES["decode"])
    tables = [tree.rows, tree.indptr, tree.indices, tree.last]
    sizes = (*tree.heads, tree.page_size)
    wrapper = nk.MultiLevelCascadeAttentionWrapper(2)
    for call in (lambda: wrapper.run(tree.q, tree.cache), wrapper.predicted_byte_ratio):
        with pytest.raises(UsageError, match=r"needs a plan: call plan\(...\)"):
            call()
    with pytest.raises(UsageError, match="num_levels must be at least 1, got 0"):
        nk.MultiLevelCascadeAttentionWrapper(0)
    with pytest.raises(UsageError, match="paged_kv_indices_arr must have an array for each of 2"):
        wrapper.plan(tables[0], tables[1], tables[2][:1], tables[3], *sizes)
    with pytest.raises(UsageError, match=r"end at the same row on all levels, got \[4, 5\]"):
        wrapper.plan([ints(0, 4), tree.rows[1]], *tables[1:], *sizes)
    with pytest.raises(UsageError, match="pos_encoding_mode must be 'NONE' here, got 'ALIBI'"):
        wrapper.plan(*tables, *sizes, pos_encoding_mode="ALIBI")
    with pytest.raises(UsageError, match="window_left must be -1 in a cascade, got 4"):
        wrapper.plan(*tables, *sizes, window_left=4)
    with pytest.raises(UsageError, match="use_fp16_qk_reduction must be False"):
        wrapper.plan(*tables, *sizes, use_fp16_qk_reduction=True)

"""Block-sparse attention against dense attention under the same mask, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

import nbflow_kernels as nk
from nbflow_kernels.attention import reference
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.errors import UsageError

ATOL = 3e-6  # as nbflow_kernels.attention.cases: float32 scores and means of values up to 5


def inputs(
    rng: np.random.Generator, M: int, N: int, heads: tuple[int, int, int], dtype: Any
) -> Any:
    """Return q (M, H, D), k and v (N, G, D)."""
    H, G, D = heads
    q = rng.standard_normal((M, H, D)).astype(np.float32)
    return q, *(rng.standard_normal((N, G, D)).astype(dtype) for _ in "kv")


def random_bsr(
    rng: np.random.Generator, M: int, N: int, R: int, C: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return indptr and indices of a BSR matrix with an empty second block row."""
    seen = rng.random((-(-M // R), N // C)) < 0.4
    seen[1:2] = False
    indices = [rng.permutation(np.flatnonzero(row)) for row in seen]  # the order is free
    indptr = np.cumsum([0, *map(len, indices)]).astype(np.int32)
    return indptr, np.concatenate([ints(), *indices]).astype(np.int32)


def dense(
    indptr: np.ndarray, indices: np.ndarray, mask: np.ndarray | None, sizes: tuple[int, ...]
) -> np.ndarray:
    """Return the dense mask (M, N) of a BSR matrix."""
    M, N, R, C = sizes
    seen = np.zeros((-(-M // R) * R, N), bool)
    for i in range(len(indptr) - 1):
        for b in range(indptr[i], indptr[i + 1]):
            columns = slice(indices[b] * C, indices[b] * C + C)
            seen[i * R : i * R + R, columns] = True if mask is None else mask[b]
    return seen[:M]


SIZES = {  # M, N, R, C; H, G, D; dtype of keys
    "blocks": ((48, 64, 16, 16), (4, 2, 32), np.float32),
    "vectors": ((12, 90, 4, 1), (2, 2, 20), np.float32),
    "single_elements": ((5, 7, 1, 1), (3, 1, 16), np.float32),
    "last_row_block_is_short": ((37, 150, 10, 50), (2, 1, 64), np.float16),
    "wide": ((33, 512, 33, 128), (8, 2, 80), np.float16),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["full", "mask", "packed"])
@pytest.mark.parametrize("name", SIZES)
def test_block_sparse_is_dense_with_the_mask(
    name: str, masked: str, causal: bool, rng: np.random.Generator
) -> None:
    (M, N, R, C), heads, dtype = SIZES[name]
    indptr, indices = random_bsr(rng, M, N, R, C)
    q, k, v = inputs(rng, M, N, heads, dtype)
    mask = rng.random((len(indices), R, C)) < 0.6 if masked != "full" else None
    given: dict[str, Any] = {} if mask is None else {"mask": mask}
    if masked == "packed":
        flat = nk.convert_bsr_mask_layout(mask, indptr)
        given = {"packed_mask": nk.segment_packbits(flat, indptr * (R * C), "little")[0]}
    wrapper = nk.BlockSparseAttentionWrapper()
    wrapper.plan(indptr, indices, M, N, R, C, *heads, causal=causal, **given)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    seen = dense(indptr, indices, mask, (M, N, R, C))
    if causal:
        seen &= np.arange(N) <= np.arange(M)[:, None] + N - M
    want, want_lse = reference.single_prefill_with_kv_cache(
        q, k, v, custom_mask=seen, return_lse=True
    )
    np.testing.assert_allclose(out, want, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=ATOL)
    assert not out[R : 2 * R].any() or M <= R  # the empty block row
    into = np.full_like(out, np.nan)
    assert wrapper.run(q, k, v, out=into) is into
    np.testing.assert_array_equal(into, out)


def test_options_and_only_stored_blocks_are_worked_on(rng: np.random.Generator) -> None:
    (M, N, R, C), heads, dtype = SIZES["blocks"]
    indptr, indices = random_bsr(rng, M, N, R, C)
    q, k, v = inputs(rng, M, N, heads, dtype)
    wrapper = nk.BlockSparseAttentionWrapper()
    plan = wrapper.plan(indptr, indices, M, N, R, C, *heads, logits_soft_cap=1.2, sm_scale=0.4)
    assert plan is wrapper.current
    np.testing.assert_array_equal(plan.kv_lens, np.diff(indptr) * C)
    want = reference.single_prefill_with_kv_cache(
        q, k, v, custom_mask=dense(indptr, indices, None, (M, N, R, C)), logits_soft_cap=1.2,
        sm_scale=0.4,
    )  # fmt: skip
    np.testing.assert_allclose(wrapper.run(q, k, v), want, rtol=0, atol=ATOL)


def test_half_precision_queries_give_half_precision_results(rng: np.random.Generator) -> None:
    (M, N, R, C), heads, dtype = SIZES["wide"]
    indptr, indices = random_bsr(rng, M, N, R, C)
    q, k, v = inputs(rng, M, N, heads, dtype)
    q = q.astype(np.float16)
    wrapper = nk.BlockSparseAttentionWrapper()
    wrapper.plan(indptr, indices, M, N, R, C, *heads)
    out = wrapper.run(q, k, v)
    assert out.dtype == np.float16
    seen = dense(indptr, indices, None, (M, N, R, C))
    want = reference.single_prefill_with_kv_cache(q, k, v, custom_mask=seen)
    np.testing.assert_allclose(out, want, rtol=2.0**-11, atol=ATOL)  # one rounding to float16
    _, G, _ = heads
    variable = nk.VariableBlockSparseAttentionWrapper()
    variable.plan(np.ones((G, 1, 1), bool), *(np.full((G, 1), n, np.int32) for n in (M, N)), *heads)
    keys = [np.ascontiguousarray(a.swapaxes(0, 1)) for a in (q, k, v)]
    full = variable.run(*keys)
    assert full.dtype == np.float16
    want = reference.single_prefill_with_kv_cache(q, k, v)
    np.testing.assert_allclose(full.swapaxes(0, 1), want, rtol=2.0**-11, atol=ATOL)


@pytest.mark.usefixtures("split_everything")
def test_bitwise_the_same_with_two_threads(rng: np.random.Generator) -> None:
    (M, N, R, C), heads, dtype = SIZES["wide"]
    indptr, indices = random_bsr(rng, M, N, R, C)
    q, k, v = inputs(rng, M, N, heads, dtype)
    found = []
    for n in (1, 2):
        parallel_for.set_num_threads(n)
        wrapper = nk.BlockSparseAttentionWrapper()
        wrapper.plan(indptr, indices, M, N, R, C, *heads)
        found.append(wrapper.run(q, k, v))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"N": 65}, UsageError, "N must be a multiple of C = 16, got 65"),
        ({"R": 0}, UsageError, "R must be at least 1, got 0"),
        ({"M": 50}, UsageError, r"indptr must have ceil\(M / R\) \+ 1 = 5 entries, got 4"),
        ({"indices": ints(0, 1)}, UsageError, r"indices must have indptr\[-1\] = 3 entries, got 2"),
        ({"indices": ints(0, 4, 1)}, UsageError, r"block columns 0..3, got 4"),
        ({"indices": ints(0, 0, 1)}, UsageError, "got column 0 twice in row 0"),
        ({"indptr": ints(0, 3, 2, 3)}, UsageError, "indptr must start at 0 and never fall"),
        ({"mask": np.ones((3, 16, 8), bool)}, UsageError, r"mask must have shape \(3, 16, 16\)"),
        (
            {"packed_mask": np.zeros(95, np.uint8)},
            UsageError,
            r"packed_mask must have shape \(96\)",
        ),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, UsageError, "must be 'NONE' here"),
        ({"num_qo_heads": 3}, UsageError, "multiple of"),
    ],
)
def test_wrong_matrices_are_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    call = {
        "indptr": ints(0, 2, 2, 3), "indices": ints(0, 3, 1), "M": 48, "N": 64, "R": 16, "C": 16,
        "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    }  # fmt: skip
    wrapper = nk.BlockSparseAttentionWrapper()
    with pytest.raises(error, match=words):
        wrapper.plan(**{**call, **change})


def test_wrong_runs_are_named(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, 3, 4, (2, 1, 16), np.float32)
    wrapper = nk.BlockSparseAttentionWrapper()
    with pytest.raises(UsageError, match=r"run needs a plan: call plan\(...\)"):
        wrapper.run(q, k, v)
    wrapper.plan(ints(0, 1), ints(0), 3, 4, 3, 4, 2, 1, 16)
    with pytest.raises(UsageError, match=r"k must have shape \(4, 1, 16\)"):
        wrapper.run(q, k[:3], v)
    with pytest.raises(TypeError, match="v must have dtype float32, got float16"):
        wrapper.run(q, k, v.astype(np.float16))


# ---- blocks of unequal sizes ---------------------------------------------------------------------


def random_sizes(rng: np.random.Generator, n: int, total: int, unit: int) -> np.ndarray:
    """Return n sizes, multiples of `unit` (the last may be empty) that add up to `total`."""
    edges = np.sort(rng.integers(0, total // unit + 1, n - 1)) * unit
    return np.diff([0, *edges, total]).astype(np.int32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("M", "N", "heads", "blocks", "unit"),
    [
        (40, 60, (4, 2, 32), (3, 5), 1),
        (33, 96, (6, 3, 20), (4, 4), 8),
        (6, 6, (1, 1, 16), (3, 3), 1),
        (64, 128, (4, 1, 64), (2, 3), 64),
    ],
)
def test_variable_blocks_are_dense_with_the_mask(
    M: int, N: int, heads: tuple[int, int, int], blocks: tuple[int, int], unit: int, causal: bool,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    H, G, D = heads
    rows = np.array([random_sizes(rng, blocks[0], M, 1) for _ in range(G)])
    columns = np.array([random_sizes(rng, blocks[1], N, unit) for _ in range(G)])
    chosen = rng.random((G, *blocks)) < 0.5
    chosen[0, 0] = False
    q = rng.standard_normal((H, M, D)).astype(np.float32)
    k, v = (rng.standard_normal((G, N, D)).astype(np.float32) for _ in "kv")
    wrapper = nk.VariableBlockSparseAttentionWrapper()
    wrapper.plan(chosen, rows, columns, H, G, D, causal=causal)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert out.shape == q.shape
    for g in range(G):
        seen = np.repeat(np.repeat(chosen[g], rows[g], axis=0), columns[g], axis=1)
        if causal:
            seen = seen & (np.arange(N) <= np.arange(M)[:, None] + N - M)
        group = slice(g * H // G, (g + 1) * H // G)
        want, want_lse = reference.single_prefill_with_kv_cache(
            q[group].swapaxes(0, 1), k[g : g + 1], v[g : g + 1], kv_layout="HND", custom_mask=seen,
            return_lse=True,
        )  # fmt: skip
        np.testing.assert_allclose(out[group].swapaxes(0, 1), want, rtol=0, atol=ATOL)
        np.testing.assert_allclose(lse[group].T, want_lse, rtol=0, atol=ATOL)
    into, into_lse = np.full_like(out, np.nan), np.full_like(lse, np.nan)
    got = wrapper.run(q, k, v, out=into, lse=into_lse, return_lse=True)
    assert got[0] is into
    assert got[1] is into_lse
    np.testing.assert_array_equal(into, out)
    np.testing.assert_array_equal(into_lse, lse)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_row_sz": ints(2, 2)[None]}, r"block_row_sz must have shape \(2, 2\)"),
        ({"block_row_sz": np.array([[2, 2], [3, 2]], np.int32)}, r"for every head, got \[4, 5\]"),
        ({"block_col_sz": np.array([[4, -2], [1, 1]], np.int32)}, "must not be negative, got -2"),
        ({"num_qo_heads": 3}, "must be a multiple of num_kv_heads, got 3 and 2"),
        ({"pos_encoding_mode": "ALIBI"}, "must be 'NONE' here"),
    ],
)
def test_wrong_block_sizes_are_named(change: dict[str, Any], words: str) -> None:
    call = {
        "block_mask_map": np.ones((2, 2, 2), bool),
        "block_row_sz": np.full((2, 2), 2, np.int32),
        "block_col_sz": np.full((2, 2), 3, np.int32),
        "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    }  # fmt: skip
    with pytest.raises(UsageError, match=words):
        nk.VariableBlockSparseAttentionWrapper().plan(**{**call, **change})
    with pytest.raises(UsageError, match=r"run needs a plan"):
        nk.VariableBlockSparseAttentionWrapper().run(*(np.zeros((1, 1, 1), np.float32),) * 3)

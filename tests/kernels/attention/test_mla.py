"""Latent attention against float64, and against the heads' own keys and values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

import nbflow_kernels as nk
from nbflow_kernels.attention import reference
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.cases import page_table
from nbflow_kernels.kv_cache.reference import decode

# A score is a float32 dot product of 576 products of unit variance before it is scaled: 36 partial
# sums in each of 16 lanes and their tree are off by sqrt(576) * sqrt(36 / 3 + 4) * 2**-24 = 6e-6,
# 5 of these at most in a test, times sm_scale = 576**-0.5: 1.3e-6.  Values up to 5 under weights
# that are off by that, their sum divided out: 5e-6.  The LSE: 1.3e-6 * log2(e), and half an ulp
# at 16.
ATOL = 5e-6


class Batch:
    """Requests with rows and tokens of latent attention on pages in random order."""

    def __init__(
        self,
        rng: np.random.Generator,
        rows: list[int],
        lens: list[int],
        sizes: tuple[int, int, int] = (4, 32, 16),
        page_size: int = 4,
        *,
        dtype: Any = np.float32,
        kv_format: str | None = None,
        joined: bool = False,
    ) -> None:
        self.sizes, self.page_size, self.kv_format = sizes, page_size, kv_format
        H, D_ckv, D_kpe = sizes
        self.indptr, self.indices, last = page_table(rng, lens, page_size)
        self.lens = np.array(lens, np.int32)
        self.qo_indptr = np.cumsum([0, *rows]).astype(np.int32)
        T = int(self.qo_indptr[-1])
        self.q_nope = rng.standard_normal((T, H, D_ckv)).astype(np.float32)
        self.q_pe = rng.standard_normal((T, H, D_kpe)).astype(np.float32)
        stored = nk.kv_format(kv_format) if kv_format else None
        lengths = [stored.row_length(D) if stored else D for D in (D_ckv, D_kpe)]
        types: Any = stored.dtype if stored else dtype
        n = len(self.indices)
        if joined:
            both = np.zeros((n, page_size, sum(lengths)), types)
            self.caches = both[..., : lengths[0]], both[..., lengths[0] :]
        else:
            self.caches = (
                np.zeros((n, page_size, lengths[0]), types),
                np.zeros((n, page_size, lengths[1]), types),
            )
        N = sum(lens)
        indptr = np.cumsum([0, *lens]).astype(np.int32)
        places = nk.get_batch_indices_positions(indptr, self.lens, N)
        new = (rng.standard_normal((N, D)).astype(np.float32) for D in (D_ckv, D_kpe))
        nk.append_paged_mla_kv_cache(
            *new, *places, *self.caches, self.indices, self.indptr, last, kv_format=kv_format
        )

    def run(self, *, causal: bool = True, **options: Any) -> Any:
        wrapper = nk.BatchMLAPagedAttentionWrapper()
        wrapper.plan(
            self.qo_indptr, self.indptr, self.indices, self.lens, *self.sizes, self.page_size,
            causal, self.scale,
        )  # fmt: skip
        return wrapper.run(
            self.q_nope, self.q_pe, *self.caches, kv_format=self.kv_format, **options
        )

    @property
    def scale(self) -> float:
        return float((self.sizes[1] + self.sizes[2]) ** -0.5)

    def tokens(self, request: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ckv and kpe of a request's tokens, decoded."""
        pages = self.indices[self.indptr[request] : self.indptr[request + 1]]
        found = []
        for cache, D in zip(self.caches, self.sizes[1:], strict=True):
            rows = np.ascontiguousarray(cache[pages])
            rows = rows.reshape(len(pages) * self.page_size, cache.shape[2])
            found.append(decode(rows[: self.lens[request]], self.kv_format, D))
        return found[0], found[1]

    def expected(self, *, causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return result and LSE in float64: one head whose key is (ckv, kpe) and value ckv."""
        q = np.concatenate([self.q_nope, self.q_pe], axis=2).astype(np.float64)
        out, lse = np.empty(self.q_nope.shape), np.empty(self.q_nope.shape[:2])
        for request, (a, b) in enumerate(pairwise(self.qo_indptr)):
            ckv, kpe = self.tokens(request)
            scores = q[a:b] @ np.concatenate([ckv, kpe], axis=1).T * self.scale  # (rows, H, n)
            n = len(ckv)
            position = np.arange(b - a)[:, None] + n - (b - a)
            seen = (np.arange(n) <= position) if causal else np.ones((b - a, n), bool)
            scores = np.where(seen[:, None], scores, -np.inf)
            top = scores.max(axis=-1, initial=-1e300, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=-1, keepdims=True)
            out[a:b] = weights @ ckv / np.where(total == 0, 1, total)
            with np.errstate(divide="ignore"):
                lse[a:b] = (top + np.log(total))[..., 0] / np.log(2)
        return out, lse


BATCHES: dict[str, dict[str, Any]] = {
    "decode": {"rows": [1, 1, 1], "lens": [5, 130, 1]},
    "prefill_and_decode": {"rows": [7, 1, 3], "lens": [9, 70, 3]},
    "no_tokens": {"rows": [1, 2], "lens": [0, 6]},
    "deepseek": {"rows": [1, 2], "lens": [150, 70], "sizes": (16, 512, 64), "page_size": 16},
    "deepseek_half_joined": {
        "rows": [1], "lens": [200], "sizes": (16, 512, 64), "page_size": 64, "dtype": np.float16,
        "joined": True,
    },
    "odd_sizes": {"rows": [3, 2], "lens": [20, 67], "sizes": (5, 20, 7), "page_size": 3},
    "no_position": {"rows": [2], "lens": [20], "sizes": (3, 32, 0), "joined": True},
    "many_heads": {"rows": [2], "lens": [80], "sizes": (40, 48, 16)},
    "bf16": {"rows": [2, 1], "lens": [20, 67], "kv_format": "bf16"},
    "q8_0": {"rows": [2, 1], "lens": [20, 67], "sizes": (4, 64, 32), "kv_format": "q8_0"},
    "q4_padded": {"rows": [2, 1], "lens": [20, 67], "sizes": (4, 80, 20), "kv_format": "q4"},
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_latent_attention_is_the_reference(
    name: str, causal: bool, rng: np.random.Generator
) -> None:
    batch = Batch(rng, **BATCHES[name])
    out, lse = batch.run(causal=causal, return_lse=True)
    want, want_lse = batch.expected(causal=causal)
    np.testing.assert_allclose(out, want, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=ATOL)


def test_outputs_and_natural_lse(rng: np.random.Generator) -> None:
    batch = Batch(rng, **BATCHES["prefill_and_decode"])
    want, want_lse = batch.run(return_lse=True)
    out, lse = np.full_like(want, np.nan), np.full_like(want_lse, np.nan)
    assert batch.run(out=out) is out
    np.testing.assert_array_equal(out, want)
    batch.run(lse=lse)
    np.testing.assert_array_equal(lse, want_lse)
    _, natural = batch.run(return_lse=True, return_lse_base_on_e=True)
    np.testing.assert_allclose(natural, want_lse * np.log(2), rtol=2e-7)  # two roundings


def test_half_precision_queries_give_half_precision_results(rng: np.random.Generator) -> None:
    batch = Batch(rng, **BATCHES["prefill_and_decode"], dtype=np.float16)
    batch.q_nope, batch.q_pe = batch.q_nope.astype(np.float16), batch.q_pe.astype(np.float16)
    out = np.full(batch.q_nope.shape, np.nan, np.float16)
    assert batch.run(out=out) is out
    # one rounding to float16 more
    np.testing.assert_allclose(out, batch.expected()[0], rtol=2.0**-11, atol=ATOL)
    np.testing.assert_array_equal(batch.run(), out)


def test_planned_types_are_checked(rng: np.random.Generator) -> None:
    batch = Batch(rng, [1], [5])
    for types, words in (
        ((np.float16, None), "q_nope was planned as float16, got an array of float32"),
        ((None, np.float16), "ckv_cache was planned as float16, got an array of float32"),
    ):
        wrapper = nk.BatchMLAPagedAttentionWrapper()
        wrapper.plan(
            batch.qo_indptr, batch.indptr, batch.indices, batch.lens, *batch.sizes, 4, True, 1.0,
            *types,
        )  # fmt: skip
        with pytest.raises(TypeError, match=words):
            wrapper.run(batch.q_nope, batch.q_pe, *batch.caches)


def test_absorbed_form_is_attention_of_the_heads_own_keys(rng: np.random.Generator) -> None:
    """Up-projections before the attention, as a model without the absorption computes it."""
    batch = Batch(rng, [3], [40], (4, 32, 16))
    H, D_ckv, D_kpe = batch.sizes
    d = 24  # size of a head's keys without position, and of its values
    up_k, up_v = (rng.standard_normal((H, d, D_ckv)) / 6 for _ in "kv")
    q = rng.standard_normal((3, H, d))
    batch.q_nope = np.einsum("thd,hdc->thc", q, up_k).astype(np.float32)
    absorbed = np.einsum("thc,hdc->thd", batch.run(), up_v)
    ckv, kpe = batch.tokens(0)
    k = np.einsum("nc,hdc->nhd", ckv, up_k)
    k = np.concatenate([k, np.broadcast_to(kpe[:, None], (40, H, D_kpe))], axis=2)
    v = np.einsum("nc,hdc->nhd", ckv, up_v)
    v = np.concatenate([v, np.zeros((40, H, D_kpe))], axis=2)  # the reference has one size
    want = reference.single_prefill_with_kv_cache(
        np.concatenate([q, batch.q_pe], axis=2), k, v, causal=True, sm_scale=batch.scale
    )[..., :d]
    # absorbed queries are rounded to float32, and up_v adds 32 numbers of size 1/6 * ATOL
    np.testing.assert_allclose(absorbed, want, rtol=0, atol=2 * ATOL)


@pytest.mark.usefixtures("split_everything")
def test_bitwise_the_same_in_any_batch_layout_page_size_and_team(rng: np.random.Generator) -> None:
    batch = Batch(rng, [3, 1], [90, 2200], (4, 32, 16), 4)
    first = batch.run()
    parallel_for.set_num_threads(2)
    np.testing.assert_array_equal(batch.run(), first)
    a = slice(0, 3)
    alone = Batch(rng, [3], [90], batch.sizes, 16, joined=True)
    tokens = batch.tokens(0)
    for cache, values in zip(alone.caches, tokens, strict=True):
        for n in range(90):
            cache[alone.indices[n // 16], n % 16] = values[n]
    alone.q_nope, alone.q_pe = batch.q_nope[a], batch.q_pe[a]
    np.testing.assert_array_equal(alone.run(), first[a])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_heads": 0}, UsageError, "num_heads must be at least 1, got 0"),
        ({"head_dim_kpe": -1}, UsageError, "head_dim_kpe must be at least 0, got -1"),
        ({"sm_scale": np.inf}, UsageError, "sm_scale must be finite, got inf"),
        ({"kv_len_arr": ints(5, 9)}, UsageError, "request 1 must be 0..8, .* 2 pages, got 9"),
        ({"kv_len_arr": ints(5)}, UsageError, r"kv_len_arr must have shape \(2\), got \(1,\)"),
        ({"qo_indptr": ints(0, 2, 1)}, UsageError, "qo_indptr must start at 0 and never fall"),
        ({"qo_indptr": np.array([0.0, 1, 2])}, TypeError, "qo_indptr must have dtype int32"),
    ],
)
def test_wrong_plans_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    call = {
        "qo_indptr": ints(0, 1, 2), "kv_indptr": ints(0, 2, 4), "kv_indices": ints(0, 1, 2, 3),
        "kv_len_arr": ints(5, 8), "num_heads": 2, "head_dim_ckv": 16, "head_dim_kpe": 4,
        "page_size": 4, "causal": True, "sm_scale": 0.3,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        nk.BatchMLAPagedAttentionWrapper().plan(**{**call, **change})


def test_wrong_runs_are_named(rng: np.random.Generator) -> None:
    batch = Batch(rng, [1], [5])
    with pytest.raises(UsageError, match=r"run needs a plan: call plan\(...\)"):
        nk.BatchMLAPagedAttentionWrapper().run(batch.q_nope, batch.q_pe, *batch.caches)
    ckv, kpe = batch.caches
    for change, words in (
        ({"q_pe": batch.q_pe[:, :, :3]}, r"q_pe must have shape \(1, 4, 16\)"),
        ({"caches": (ckv[..., :8], kpe)}, r"ckv_cache must have shape \(pages, 4, 32\)"),
        ({"caches": (ckv[:1], kpe[:1])}, r"kv_indices must name pages 0..0"),
    ):
        wrong = Batch(rng, [1], [5])
        for name, value in change.items():
            setattr(wrong, name, value)
        with pytest.raises(UsageError, match=words):
            wrong.run()
    with pytest.raises(UsageError, match="out must have shape"):
        batch.run(out=np.zeros((2, 4, 32), np.float32))

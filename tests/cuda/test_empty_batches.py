"""Paged functions without requests, rows, keys or pages: on the CPU and on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

import nbflow_kernels as nk

H, G, D, PAGE = 4, 2, 32, 16
Put = Callable[[Any], Any]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


# indptr of the pages, pages, tokens on the last page, tokens, pages of the cache
BATCHES = {
    "no_requests": (ints(0), ints(), ints(), ints(), 0),
    "no_requests_but_pages": (ints(0), ints(), ints(), ints(), 3),
    "no_pages": (ints(0, 0, 0), ints(), ints(0, 0), ints(0, 0), 0),
    "one_is_empty": (ints(0, 0, 1), ints(1), ints(0, 3), ints(0, 3), 2),
}


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def put(request: pytest.FixtureRequest, xp: Any) -> Put:
    """Return what puts arrays where they are to be: in host memory, on the device."""
    return xp.asarray if request.param else lambda array: array


def host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def check(result: Any, rows_of_keys: np.ndarray, value: float = 0.0) -> None:
    """Compare a result and its LSE: `value` for rows with keys, else zeros and -infinity."""
    out, lse = map(host, result)
    sees = rows_of_keys > 0
    assert len(out) == len(lse) == len(sees)
    np.testing.assert_array_equal(out[~sees], 0)
    np.testing.assert_allclose(out[sees], value, atol=1e-6)
    np.testing.assert_array_equal(lse[~sees], -np.inf)
    assert np.isfinite(lse[sees]).all()


@pytest.mark.parametrize("name", BATCHES)
def test_wrappers_over_pages(name: str, put: Put) -> None:
    indptr, indices, last, lens, n_pages = BATCHES[name]
    B = len(lens)
    rows = np.arange(B + 1, dtype=np.int32)
    q, pages = put(zeros(B, H, D)), put(zeros(n_pages, PAGE, G, D) + 2)
    decode = nk.BatchDecodeWithPagedKVCacheWrapper()
    decode.plan(indptr, indices, last, H, G, D, PAGE)
    check(decode.run(q, (pages, pages), return_lse=True), lens, 2)
    prefill = nk.BatchPrefillWithPagedKVCacheWrapper()
    prefill.plan(rows, indptr, indices, last, H, G, D, PAGE, causal=True)
    check(prefill.run(q, (pages, pages), return_lse=True), lens, 2)
    batch = nk.BatchAttention()
    batch.plan(rows, indptr, indices, lens, H, G, D, D, PAGE, causal=True)
    check(batch.run(q, (pages, pages)), lens, 2)
    prefill.plan(rows * 0, indptr, indices, last, H, G, D, PAGE, causal=True)  # no rows
    check(prefill.run(q[:0], (pages, pages), return_lse=True), lens[:0])
    cascade = nk.MultiLevelCascadeAttentionWrapper(2)
    cascade.plan([rows] * 2, [indptr] * 2, [indices] * 2, [last] * 2, H, G, D, PAGE)
    check(cascade.run(q, (pages, pages), return_lse=True), lens, 2)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("joined", [False, True])
def test_latent_attention(name: str, joined: bool, put: Put) -> None:
    indptr, indices, last, lens, n_pages = BATCHES[name]
    B = len(lens)
    rows = np.arange(B + 1, dtype=np.int32)
    both = put(zeros(n_pages, PAGE, 48))
    ckv, kpe = (both[..., :32], both[..., 32:]) if joined else (put(zeros(n_pages, PAGE, 32)), None)
    kpe = put(zeros(n_pages, PAGE, 16)) if kpe is None else kpe
    T = int(lens.sum())
    places = nk.get_batch_indices_positions(np.append(0, np.cumsum(lens)).astype(np.int32), lens, T)
    new = put(zeros(T, 32) + 2), put(zeros(T, 16))
    nk.append_paged_mla_kv_cache(*new, *places, ckv, kpe, indices, indptr, last)
    wrapper = nk.BatchMLAPagedAttentionWrapper()
    wrapper.plan(rows, indptr, indices, lens, H, 32, 16, PAGE, True, 0.2)
    q = put(zeros(B, H, 32)), put(zeros(B, H, 16))
    check(wrapper.run(*q, ckv, kpe, return_lse=True), lens, 2)


def test_places_are_written_to_given_arrays(put: Put) -> None:
    indptr, lens = np.array([0, 1, 3], np.int32), np.array([4, 2], np.int32)
    given = put(np.full(3, 9, np.int32)), put(np.full(3, 9, np.int32))
    found = nk.get_batch_indices_positions(put(indptr), put(lens), 3, *given)
    assert found[0] is given[0]
    wanted = nk.get_batch_indices_positions(indptr, lens, 3)
    for one, other in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(one.get() if hasattr(one, "get") else one, other)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kv_format", [None, "q8_0"])
def test_appending_and_gathering(name: str, kv_format: str | None, put: Put) -> None:
    indptr, indices, last, lens, n_pages = BATCHES[name]
    T = int(lens.sum())
    np.testing.assert_array_equal(nk.get_seq_lens(indptr, last, PAGE), lens)
    places = nk.get_batch_indices_positions(np.append(0, np.cumsum(lens)).astype(np.int32), lens, T)
    row = D if kv_format is None else nk.kv_format(kv_format).row_length(D)
    dtype = np.float32 if kv_format is None else np.uint8
    cache = tuple(put(zeros(n_pages, PAGE, G, row, dtype=dtype)) for _ in "kv")
    new = put(zeros(T, G, D) + 2)
    nk.append_paged_kv_cache(new, new, *places, cache, indices, indptr, last, kv_format=kv_format)
    for found in nk.gather_paged_kv_cache(
        cache, indices, indptr, last, kv_format=kv_format, head_dim=D
    ):
        np.testing.assert_allclose(host(found), zeros(T, G, D) + 2, rtol=1e-2)


def test_keys_in_rows(put: Put) -> None:
    q, keys = put(zeros(2, H, D)), put(zeros(3, G, D) + 2)
    ragged = nk.BatchPrefillWithRaggedKVCacheWrapper()
    for rows, starts in (
        (ints(0), ints(0)),
        (ints(0, 1, 2), ints(0, 0, 3)),
        (ints(0, 2), ints(0, 0)),
    ):
        ragged.plan(rows, starts, H, G, D)
        kv = keys[: starts[-1]]
        lens = np.repeat(np.diff(starts), np.diff(rows))
        check(ragged.run(q[: rows[-1]], kv, kv, return_lse=True), lens, 2)
    for T, N in ((0, 3), (2, 0), (0, 0)):
        found = nk.single_prefill_with_kv_cache(q[:T], keys[:N], keys[:N], return_lse=True)
        check(found, np.full(T, N), 2)
    out, lse = nk.single_decode_with_kv_cache(q[0], keys[:0], keys[:0], return_lse=True)
    check((host(out)[None], host(lse)[None]), ints(0))


def test_block_sparse(put: Put) -> None:
    q, keys = put(zeros(2, H, D)), put(zeros(3, G, D) + 2)
    sparse = nk.BlockSparseAttentionWrapper()
    for indptr, indices, M, N in (
        (ints(0), ints(), 0, 3), (ints(0, 0, 0), ints(), 2, 3), (ints(0, 0, 0), ints(), 2, 0),
        (ints(0, 1, 1), ints(2), 2, 3),
    ):  # fmt: skip
        sparse.plan(indptr, indices, M, N, 1, 1, H, G, D)
        found = sparse.run(q[:M], keys[:N], keys[:N], return_lse=True)
        check(found, np.diff(indptr), 2)
    variable = nk.VariableBlockSparseAttentionWrapper()
    heads, kv = put(zeros(H, 2, D)), put(zeros(G, 3, D) + 2)
    sizes = np.array([[2], [2]], np.int32), np.array([[3], [3]], np.int32)
    for shown in (False, True):
        variable.plan(np.full((G, 1, 1), shown), *sizes, H, G, D)
        out, lse = variable.run(heads, kv, kv, return_lse=True)
        check((host(out).reshape(8, D), host(lse).ravel()), np.full(8, 3 * shown), 2)
    empty = np.zeros((G, 0), np.int32)
    variable.plan(np.zeros((G, 0, 0), bool), empty, empty, H, G, D)
    out = variable.run(put(zeros(H, 0, D)), put(zeros(G, 0, D)), put(zeros(G, 0, D)))
    assert out.shape == (H, 0, D)

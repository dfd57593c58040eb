"""Cases of the cache operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.opcase import OpCase

COPY = "copies, rounded once to the cache's dtype"
INTEGERS = "integers"


def page_table(
    rng: np.random.Generator, lens: list[int], page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (indptr, indices, last_page_len) of sequences on pages in random order."""
    counts = [-(-n // page_size) for n in lens]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = rng.permutation(sum(counts)).astype(np.int32)
    last = [n - max(c - 1, 0) * page_size for n, c in zip(lens, counts, strict=True)]
    return indptr, indices, np.array(last, np.int32)


def _append(
    lens: list[int],
    new: list[int],
    G: int,
    D: int,
    page_size: int,
    *,
    dtype: Any = np.float32,
    kv_layout: str = "NHD",
    joined: bool = False,
) -> Callable[[np.random.Generator], dict[str, Any]]:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        indptr, indices, last = page_table(rng, lens, page_size)
        inner = (page_size, G, D) if kv_layout == "NHD" else (G, page_size, D)
        pages = rng.standard_normal((len(indices), 2, *inner)).astype(dtype)
        pair = (pages[:, 0].copy(), pages[:, 1].copy())
        runs = [np.arange(n - m, n) for n, m in zip(lens, new, strict=True)]
        T = sum(new)
        return {
            "append_key": rng.standard_normal((T, G, D)).astype(np.float32),
            "append_value": rng.standard_normal((T, G, D)).astype(np.float32),
            "batch_indices": np.repeat(np.arange(len(lens)), new).astype(np.int32),
            "positions": np.concatenate(runs).astype(np.int32),
            "paged_kv_cache": pages if joined else pair,
            "kv_indices": indices,
            "kv_indptr": indptr,
            "kv_last_page_len": last,
            "kv_layout": kv_layout,
        }

    return inputs


def _case(name: str, lens: list[int], new: list[int], *sizes: int, **options: Any) -> OpCase:
    timed = options.pop("timed", False)
    G, D, page_size = sizes
    itemsize = np.dtype(options.get("dtype", np.float32)).itemsize
    return OpCase(
        "append_paged_kv_cache",
        name,
        _append(lens, new, G, D, page_size, **options),
        rtol=0.0,
        atol=0.0,
        reason=COPY,
        exact=True,
        mutates=("paged_kv_cache",),
        n_bytes=2 * sum(new) * G * D * (4 + itemsize),
        timed=timed,
    )


CASES = [
    _case("prefill_and_decode", [5, 1, 9], [5, 1, 1], 2, 20, 4),
    _case("half", [5, 8], [2, 8], 3, 36, 4, dtype=np.float16),
    _case("heads_first", [5, 8], [2, 8], 3, 16, 4, kv_layout="HND"),
    _case("one_array", [5, 8], [2, 8], 3, 16, 4, joined=True),
    _case(
        "one_array_half_heads_first",
        [3],
        [1],
        2,
        100,
        1,
        joined=True,
        dtype=np.float16,
        kv_layout="HND",
    ),
    _case("nothing_new", [3, 0], [0, 0], 2, 16, 2),
    _case("llama2_7b", [512], [512], 32, 128, 16, dtype=np.float16, timed=True),
    OpCase(
        "get_seq_lens",
        "with_an_empty_request",
        lambda rng: {
            "kv_indptr": np.array([0, 3, 3, 4], np.int32),
            "kv_last_page_len": np.array([2, 0, 16], np.int32),
            "page_size": 16,
        },
        rtol=0.0,
        atol=0.0,
        reason=INTEGERS,
        exact=True,
    ),
    OpCase(
        "get_batch_indices_positions",
        "ragged",
        lambda rng: {
            "append_indptr": np.array([0, 3, 3, 4], np.int32),
            "seq_lens": np.array([3, 7, 20], np.int32),
            "nnz": 4,
        },
        rtol=0.0,
        atol=0.0,
        reason=INTEGERS,
        exact=True,
    ),
]

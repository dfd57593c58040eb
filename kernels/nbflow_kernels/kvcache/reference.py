"""The paged key/value cache in plain NumPy, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np


def append_paged_kv_cache(
    append_key: np.ndarray,
    append_value: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    paged_kv_cache: Any,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_last_page_len: np.ndarray,
    kv_layout: str = "NHD",
) -> None:
    """See `nbflow_kernels.append_paged_kv_cache`."""
    if isinstance(paged_kv_cache, tuple):
        caches = paged_kv_cache
    else:
        caches = (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
    for rows, cache in zip((append_key, append_value), caches, strict=True):
        pages = cache if kv_layout == "NHD" else cache.transpose(0, 2, 1, 3)  # a view
        for row, request, position in zip(rows, batch_indices, positions, strict=True):
            page, slot = divmod(int(position), pages.shape[1])
            with np.errstate(over="ignore"):  # beyond 65504, float16 is infinite
                pages[kv_indices[kv_indptr[request] + page], slot] = row


def get_seq_lens(kv_indptr: np.ndarray, kv_last_page_len: np.ndarray, page_size: int) -> np.ndarray:
    """See `nbflow_kernels.get_seq_lens`."""
    lens = [
        max(int(b - a) - 1, 0) * page_size + int(last)
        for a, b, last in zip(kv_indptr[:-1], kv_indptr[1:], kv_last_page_len, strict=True)
    ]
    return np.array(lens, np.int32)


def get_batch_indices_positions(
    append_indptr: np.ndarray, seq_lens: np.ndarray, nnz: int
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.get_batch_indices_positions`."""
    pairs = [
        (request, int(seq_lens[request]) - n + i)
        for request, n in enumerate(np.diff(append_indptr).tolist())
        for i in range(n)
    ]
    table = np.array(pairs, np.int32).reshape(nnz, 2)
    return table[:, 0], table[:, 1]

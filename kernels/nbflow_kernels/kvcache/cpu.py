"""Writing new keys and values into pages, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import njit
from nbflow_kernels.lanes import address_of, read_f32, store_f16, write_f16, write_f32
from nbflow_kernels.threads import split_rows


def append_paged_kv_cache(
    key: np.ndarray,
    value: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_layout: str,
) -> None:
    """See `nbflow_kernels.append_paged_kv_cache`; keys and values have equal strides."""
    T, G, D = key.shape
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    strides = k_cache.strides
    split_rows(
        _append,
        T,
        2.0 * T * G * D,
        address_of(key),
        address_of(value),
        key.strides[0],
        value.strides[0],
        batch_indices,
        positions,
        address_of(k_cache),
        address_of(v_cache),
        strides[0],
        strides[token],
        strides[head],
        k_cache.itemsize,
        kv_indices,
        kv_indptr,
        k_cache.shape[token],
        G,
        D,
    )


@njit
def _write_row(source: Any, n: Any, target: Any, itemsize: Any) -> None:
    """Write n float32 to a row of float32 or float16."""
    d = 0
    while d + 16 <= n:
        if itemsize == 2:
            store_f16(target + 2 * d, simd.load_f32(source + 4 * d))
        else:
            simd.store_f32(target + 4 * d, simd.load_f32(source + 4 * d))
        d += 16
    while d < n:
        if itemsize == 2:
            write_f16(target + 2 * d, read_f32(source + 4 * d))
        else:
            write_f32(target + 4 * d, read_f32(source + 4 * d))
        d += 1


@njit
def _append(
    key: Any,
    value: Any,
    key_row_bytes: Any,
    value_row_bytes: Any,
    batch_indices: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    page_bytes: Any,
    token_bytes: Any,
    head_bytes: Any,
    itemsize: Any,
    kv_indices: Any,
    kv_indptr: Any,
    page_size: Any,
    G: Any,
    D: Any,
    start: Any,
    stop: Any,
) -> None:
    for row in range(start, stop):
        position = np.int64(positions[row])
        page = kv_indices[kv_indptr[batch_indices[row]] + position // page_size]
        place = page * page_bytes + position % page_size * token_bytes
        for g in range(G):
            offset = place + g * head_bytes
            _write_row(key + row * key_row_bytes + 4 * g * D, D, k_cache + offset, itemsize)
            _write_row(value + row * value_row_bytes + 4 * g * D, D, v_cache + offset, itemsize)

"""Append and gather of the paged KV cache on the CPU."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.kv_cache.cpu_codec import (
    F16,
    F32,
    FIRST_BLOCK_KIND,
    decode_row,
    encode_row,
    write_floats,
)
from nbflow_kernels.kv_cache.page_table import strides

BLOCK_COST = 4.0  # cost of encoding a number into a block, in float copies


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
    kinds: tuple[int, int],
) -> None:
    """See `nbflow_kernels.append_paged_kv_cache`; `kinds` are the KINDS of keys and of values."""
    T, G, D = key.shape
    is_float = max(kinds) < FIRST_BLOCK_KIND
    parallel_for(
        _append_floats if is_float else _append_blocks, T,
        (2.0 if is_float else 2.0 * BLOCK_COST) * T * G * D, *kinds,
        address_of(key), address_of(value), key.strides[0], value.strides[0], batch_indices,
        positions, address_of(k_cache), address_of(v_cache),
        (*strides(k_cache, kv_layout), *strides(v_cache, kv_layout)), kv_indices, kv_indptr,
        k_cache.shape[1 if kv_layout == "NHD" else 2], G, D, value.shape[2],
    )  # fmt: skip


def gather_paged_kv_cache(
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_layout: str,
    kinds: tuple[int, int],
    key: np.ndarray,
    value: np.ndarray,
) -> None:
    """See `nbflow_kernels.gather_paged_kv_cache`; the outputs are float32 or float16."""
    T, G, D = key.shape
    parallel_for(
        _gather, T, 2.0 * T * G * D, *kinds, F32 if key.itemsize == 4 else F16, address_of(key),
        address_of(value), batch_indices, positions, address_of(k_cache), address_of(v_cache),
        (*strides(k_cache, kv_layout), *strides(v_cache, kv_layout)), kv_indices, kv_indptr,
        k_cache.shape[1 if kv_layout == "NHD" else 2], G, D, value.shape[2],
    )  # fmt: skip


@jit.device_function(inline="always")
def _append_rows(
    write, k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices, positions,
    k_cache, v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value, start, stop
):  # fmt: skip
    """Append rows [start, stop) with ``write(kind, source, n, target)``."""
    for row in range(start, stop):
        position = np.int64(positions[row])
        page = np.int64(kv_indices[kv_indptr[batch_indices[row]] + position // page_size])
        slot = position % page_size
        k_to = k_cache + page * strides[0] + slot * strides[1]
        v_to = v_cache + page * strides[3] + slot * strides[4]
        for g in range(G):
            write(k_kind, key + row * key_row_bytes + 4 * g * D, D, k_to + g * strides[2])
            from_value = value + row * value_row_bytes + 4 * g * D_value
            write(v_kind, from_value, D_value, v_to + g * strides[5])


@jit.kernel
def _append_floats(
    k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices, positions, k_cache,
    v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value, start, stop
):  # fmt: skip
    _append_rows(
        write_floats, k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices,
        positions, k_cache, v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value,
        start, stop,
    )  # fmt: skip


@jit.kernel
def _append_blocks(
    k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices, positions, k_cache,
    v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value, start, stop
):  # fmt: skip
    _append_rows(
        encode_row, k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices,
        positions, k_cache, v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value,
        start, stop,
    )  # fmt: skip


@jit.kernel
def _gather(
    k_kind, v_kind, out_kind, key, value, batch_indices, positions, k_cache, v_cache, strides,
    kv_indices, kv_indptr, page_size, G, D, D_value, start, stop
):  # fmt: skip
    scratch = np.empty(max(D, D_value), np.float32)
    itemsize = 4 if out_kind == F32 else 2
    for row in range(start, stop):
        position = np.int64(positions[row])
        page = np.int64(kv_indices[kv_indptr[batch_indices[row]] + position // page_size])
        slot = position % page_size
        k_from = k_cache + page * strides[0] + slot * strides[1]
        v_from = v_cache + page * strides[3] + slot * strides[4]
        for g in range(G):
            at = row * G + g
            k_to, v_to = key + itemsize * at * D, value + itemsize * at * D_value
            _copy(k_kind, k_from + g * strides[2], D, out_kind, k_to, scratch)
            _copy(v_kind, v_from + g * strides[5], D_value, out_kind, v_to, scratch)


@jit.device_function
def _copy(kind, source, n, out_kind, target, scratch):
    """Decode one head vector to float32 or, through `scratch`, to float16."""
    if out_kind == F32:
        decode_row(kind, source, n, np.float32(1), target, n)
    else:
        between = simd.address(scratch)
        decode_row(kind, source, n, np.float32(1), between, n)
        write_floats(out_kind, between, n, target)

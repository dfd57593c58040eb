"""Append and gather of the paged KV cache on the CPU."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_int8 import store_narrow
from nbflow_kernels.cpu.simd_memory import (
    address_of,
    allocate,
    read_f32,
    read_u8,
    release,
    write_f32,
)
from nbflow_kernels.cpu.simd_narrow import write_u8
from nbflow_kernels.kv_cache.cpu_codec import (
    F16,
    F32,
    FIRST_BLOCK_KIND,
    decode_row,
    encode_row,
    write_floats,
)
from nbflow_kernels.kv_cache.page_table import strides
from nbflow_kernels.position.cpu import rotate_head

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
    *,
    cos_sin: np.ndarray | None = None,
    interleave: bool = False,
) -> None:
    """See `nbflow_kernels.append_paged_kv_cache`; `kinds` are the KINDS of keys and of values."""
    T, G, D = key.shape
    rotation = None
    if cos_sin is not None:  # address of the table, pairs of a head, and which elements form one
        hold(cos_sin)
        rotation = (address_of(cos_sin), cos_sin.shape[1] // 2, not interleave)
    is_float = max(kinds) < FIRST_BLOCK_KIND
    parallel_for(
        _append_floats if is_float else _append_blocks, T,
        (2.0 if is_float else 2.0 * BLOCK_COST) * T * G * D, *kinds,
        address_of(key), address_of(value), key.strides[0], value.strides[0], batch_indices,
        positions, address_of(k_cache), address_of(v_cache),
        (*strides(k_cache, kv_layout), *strides(v_cache, kv_layout)), kv_indices, kv_indptr,
        k_cache.shape[1 if kv_layout == "NHD" else 2], G, D, value.shape[2], rotation,
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


def convert_paged_kv_cache(
    caches: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    layouts: tuple[str, str],
    kinds: tuple[tuple[int, int], tuple[int, int]],
    tables: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    rows: tuple[np.ndarray, np.ndarray],
    sizes: tuple[int, int],
) -> None:
    """See `nbflow_kernels.convert_paged_kv_cache`.

    `caches` are keys and values of the source, then of the target; `kinds` the formats of keys
    before and after, then those of values; `tables` the page numbers and offsets of the source,
    then of the target; `rows` the request and position of each token; `sizes` the head sizes.
    """
    G = caches[0].shape[2 if layouts[0] == "NHD" else 1]
    page_sizes = [
        cache.shape[1 if layout == "NHD" else 2]
        for cache, layout in zip(caches[::2], layouts, strict=True)
    ]
    steps = [
        step
        for cache, layout in zip(
            caches, (layouts[0], layouts[0], layouts[1], layouts[1]), strict=True
        )
        for step in strides(cache, layout)
    ]
    row_bytes = [cache.shape[3] * cache.itemsize for cache in caches[:2]]
    same = all(before == after for before, after in kinds)
    T = len(rows[0])
    parallel_for(
        _convert, T, (1.0 if same else BLOCK_COST) * T * G * sum(sizes), *kinds, *rows,
        tuple(map(address_of, caches)), tuple(steps), *tables, *page_sizes, G, *sizes, *row_bytes,
    )  # fmt: skip


@jit.device_function(inline="always")
def _append_rows(
    write, k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices, positions,
    k_cache, v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value, rotation, start,
    stop
):  # fmt: skip
    """Append rows [start, stop) with ``write(kind, source, n, target)``."""
    scratch = _allocate_for(rotation, D)
    for row in range(start, stop):
        if batch_indices[row] < 0:
            continue  # padding
        position = np.int64(positions[row])
        page = np.int64(kv_indices[kv_indptr[batch_indices[row]] + position // page_size])
        slot = position % page_size
        k_to = k_cache + page * strides[0] + slot * strides[1]
        v_to = v_cache + page * strides[3] + slot * strides[4]
        for g in range(G):
            from_key = key + row * key_row_bytes + 4 * g * D
            from_key = _rotated(rotation, from_key, D, position, scratch)
            write(k_kind, from_key, D, k_to + g * strides[2])
            from_value = value + row * value_row_bytes + 4 * g * D_value
            write(v_kind, from_value, D_value, v_to + g * strides[5])
    if scratch != 0:
        release(scratch)


@jit.device_function
def _allocate_for(rotation, n):
    """Return the address of `n` float32 for rotated keys, or 0 without a rotation."""
    return np.int64(0) if rotation is None else allocate(4 * n)


@jit.device_function
def _rotated(rotation, source, n, position, scratch):
    """Return the address of the key at `source` after its rotation, if any."""
    if rotation is None:
        return source
    cos_sin, half, is_neox = rotation
    for d in range(0, 4 * n, 4):
        write_f32(scratch + d, read_f32(source + d))
    rotate_head(scratch, cos_sin + 8 * half * position, half, is_neox)
    return scratch


@jit.kernel(unroll=False)
def _append_floats(
    k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices, positions, k_cache,
    v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value, rotation, start, stop
):  # fmt: skip
    _append_rows(
        write_floats, k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices,
        positions, k_cache, v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value,
        rotation, start, stop,
    )  # fmt: skip


@jit.kernel
def _append_blocks(
    k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices, positions, k_cache,
    v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value, rotation, start, stop
):  # fmt: skip
    _append_rows(
        encode_row, k_kind, v_kind, key, value, key_row_bytes, value_row_bytes, batch_indices,
        positions, k_cache, v_cache, strides, kv_indices, kv_indptr, page_size, G, D, D_value,
        rotation, start, stop,
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


@jit.kernel
def _convert(
    k_kinds, v_kinds, batch_indices, positions, caches, strides, from_indices, from_indptr,
    to_indices, to_indptr, from_size, to_size, G, D, D_value, k_bytes, v_bytes, start, stop
):  # fmt: skip
    scratch = np.empty(max(D, D_value), np.float32)
    for row in range(start, stop):
        position, request = np.int64(positions[row]), batch_indices[row]
        page = np.int64(from_indices[from_indptr[request] + position // from_size])
        slot = position % from_size
        k_from = caches[0] + page * strides[0] + slot * strides[1]
        v_from = caches[1] + page * strides[3] + slot * strides[4]
        page = np.int64(to_indices[to_indptr[request] + position // to_size])
        slot = position % to_size
        k_to = caches[2] + page * strides[6] + slot * strides[7]
        v_to = caches[3] + page * strides[9] + slot * strides[10]
        for g in range(G):
            k_at, v_at = k_from + g * strides[2], v_from + g * strides[5]
            _convert_row(k_kinds, k_at, D, k_bytes, k_to + g * strides[8], scratch)
            _convert_row(v_kinds, v_at, D_value, v_bytes, v_to + g * strides[11], scratch)


@jit.device_function
def _convert_row(kinds, source, n, n_bytes, target, scratch):
    """Copy a head vector to another format, through float32; the same format byte for byte."""
    if kinds[0] == kinds[1]:
        at = np.int64(0)
        while at + 16 <= n_bytes:
            store_narrow(target + at, simd.load_u8(source + at))
            at += 16
        while at < n_bytes:
            write_u8(target + at, read_u8(source + at))
            at += 1
    else:
        between = simd.address(scratch)
        decode_row(kinds[0], source, n, between, n)
        encode_row(kinds[1], between, n, target)


@jit.device_function
def _copy(kind, source, n, out_kind, target, scratch):
    """Decode one head vector to float32 or, through `scratch`, to float16."""
    if out_kind == F32:
        decode_row(kind, source, n, target, n)
    else:
        between = simd.address(scratch)
        decode_row(kind, source, n, between, n)
        write_floats(out_kind, between, n, target)

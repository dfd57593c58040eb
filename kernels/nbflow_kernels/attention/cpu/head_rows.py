"""Rows of keys and values: their addresses in the pages, and float32 copies of rows.

The types of the scalars `source` select how rows are copied: float32 for floats, uint8 for any
format; other types mean that rows are read in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.core.extending import overload

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_memory import read_i32, read_i64, read_word, write_i64
from nbflow_kernels.kv_cache.cpu_codec import copy_floats, decode_row
from nbflow_kernels.position.cpu import rotate_halves, rotate_head

TABLE = 8 * CHUNK
"""Bytes of the row addresses of a chunk."""


def copy_row(source: Any, kind: Any, row: Any, n: Any, target: Any, padded: Any) -> None:
    """Decode one head vector to float32; the type of the scalar `source` selects the decoder."""
    if isinstance(source, np.float32):
        copy_floats(kind, row, n, 1.0, target, padded)
    elif isinstance(source, np.uint8):
        decode_row(kind, row, n, 1.0, target, padded)


@overload(copy_row, inline="always", strict=False)
def _copy_row_overload(source, kind, row, n, target, padded):
    if source == types.float32:
        return lambda source, kind, row, n, target, padded: copy_floats(
            kind, row, n, 1.0, target, padded
        )
    if source == types.uint8:
        return lambda source, kind, row, n, target, padded: decode_row(
            kind, row, n, 1.0, target, padded
        )
    return lambda source, kind, row, n, target, padded: None  # rows are read in place


def rotate(source: Any, row: Any, cos_sin: Any, half: Any) -> None:
    """Apply RoPE to a float32 row; a no-op in kernels that read rows in place."""
    if isinstance(source, np.float32 | np.uint8):
        rotate_halves(row, cos_sin, half)


@overload(rotate, inline="always", strict=False)
def _rotate_overload(source, row, cos_sin, half):
    if source in (types.float32, types.uint8):
        return lambda source, row, cos_sin, half: rotate_halves(row, cos_sin, half)
    return lambda source, row, cos_sin, half: None


def finish_keys(
    source: Any, header: Any, head: Any, base: Any, first: Any, last: Any, rows: Any, row_bytes: Any
) -> None:
    """Add the bias and apply the RoPE of keys that are stored before them; see `_finish_keys`."""
    if isinstance(source, np.float32 | np.uint8):
        _finish_keys(header, head, base, first, last, rows, row_bytes)


@overload(finish_keys, inline="always", strict=False)
def _finish_keys_overload(source, header, head, base, first, last, rows, row_bytes):
    if source in (types.float32, types.uint8):
        return lambda source, header, head, base, first, last, rows, row_bytes: _finish_keys(
            header, head, base, first, last, rows, row_bytes
        )
    return lambda source, header, head, base, first, last, rows, row_bytes: None


@jit.device_function
def _finish_keys(header, head, base, first, last, rows, row_bytes):
    """Make keys [first, last) of the chunk at key `base` from float32 rows before bias and RoPE."""
    table, bias = read_word(header, at.KEY_ROPE), read_word(header, at.KEY_BIAS)
    dim, is_neox = read_word(header, at.KEY_ROPE_DIM), read_word(header, at.KEY_ROPE_NEOX) != 0
    added = bias + head * row_bytes
    for j in range(first, last):
        row = rows + j * row_bytes
        if bias != 0:
            for d in range(0, row_bytes, 64):
                x = simd.add(simd.load_f32(row + d), simd.load_f32(added + d))
                simd.store_f32(row + d, x)
        rotate_head(row, table + 4 * dim * (base + j), dim // 2, is_neox)


# ---- row addresses ------------------------------------------------------------------------------


@jit.device_function
def row_addresses(pages, page_size, first, last, k, v, strides, table):
    """Write the addresses of keys [first, last) of a chunk, followed by those of the values."""
    key_at = first
    while key_at < last:
        page = key_at // page_size
        slot = key_at - page * page_size
        number = read_i32(pages + 4 * page)
        key = k + number * strides[0] + slot * strides[1]
        value = v + number * strides[4] + slot * strides[5]
        count = min(page_size - slot, last - key_at)
        place = table + 8 * (key_at % CHUNK)
        for i in range(count):
            write_i64(place + 8 * i, key + i * strides[1])
            write_i64(place + TABLE + 8 * i, value + i * strides[5])
        key_at += count


@jit.device_function
def unpack_rows(source, kind, table, first, last, n, target, padded):
    """Decode rows [first, last) to float32 at `target` and redirect the table there."""
    for j in range(first, last):
        place = target + 4 * padded * j
        copy_row(source, kind, read_word(table, j), n, place, padded)
        write_i64(table + 8 * j, place)


@jit.device_function
def join_latent_rows(source, kind, tables, first, last, n, n_more, target, padded):
    """Decode latent keys as (ckv, kpe) rows, and redirect both tables there."""
    for j in range(first, last):
        place, key, value = target + 4 * padded * j, tables + 8 * j, tables + TABLE + 8 * j
        copy_row(source, kind, read_i64(key), n, place, n)
        copy_row(source, kind, read_i64(value), n_more, place + 4 * n, padded - n)
        write_i64(key, place)
        write_i64(value, place)


@jit.device_function
def unpack_chunk(key_reader, value_reader, table, first, last, sizes, latent, target):
    """Decode the keys and values of a chunk that are not read in place."""
    k_source, _, k_kind, k_pack = key_reader
    v_source, _, v_kind, v_pack = value_reader
    D_qk, D_vo = sizes
    wide_qk, wide_vo = (D_qk + 15) // 16 * 16, (D_vo + 15) // 16 * 16
    if k_pack and latent:
        join_latent_rows(k_source, k_kind, table, first, last, D_vo, D_qk - D_vo, target, wide_qk)
    elif k_pack:
        unpack_rows(k_source, k_kind, table, first, last, D_qk, target, wide_qk)
    if v_pack and not latent:
        values = target + 4 * CHUNK * wide_qk
        unpack_rows(v_source, v_kind, table + TABLE, first, last, D_vo, values, wide_vo)


@jit.device_function
def pad_table(table, first, last):
    """Fill addresses next to [first, last), which tiles of four keys may read."""
    for j in range(first // 4 * 4, first):
        write_i64(table + 8 * j, read_word(table, first))
    for j in range(last, (last + 3) // 4 * 4):
        write_i64(table + 8 * j, read_i64(table + 8 * (last - 1)))
    for j in range(first // 16 * 16, first):
        write_i64(table + 8 * j, read_word(table, first))

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
from nbflow_kernels.cpu.nvfp4 import decode_nvfp4_row
from nbflow_kernels.cpu.simd_memory import prefetch, read_i32, read_i64, read_word, write_i64
from nbflow_kernels.kv_cache.cpu_codec import copy_float_rows, decode_rows
from nbflow_kernels.kv_cache.nvfp4 import NVFP4_KIND
from nbflow_kernels.position.cpu import rotate_halves, rotate_head

TABLE = 8 * CHUNK
"""Bytes of the row addresses of a chunk."""
SCALE_TABLES = 4 * TABLE
"""Bytes from a table to that of the addresses of its rows' scales, in NVFP4 caches."""


def copy_rows(
    source: Any, kind: Any, table: Any, first: Any, last: Any, n: Any, target: Any, padded: Any,
    stride: Any,
) -> None:  # fmt: skip
    """Decode head vectors to float32 (`decode_rows`); the type of `source` selects the decoder."""
    if isinstance(source, np.float32):
        copy_float_rows(kind, table, first, last, n, target, padded, stride)
    elif isinstance(source, np.uint8):
        _decode_rows(kind, table, first, last, n, target, padded, stride)


@overload(copy_rows, inline="always", strict=False)
def _copy_rows_overload(source, kind, table, first, last, n, target, padded, stride):
    if source == types.float32:
        return lambda source, kind, table, first, last, n, target, padded, stride: copy_float_rows(
            kind, table, first, last, n, target, padded, stride
        )
    if source == types.uint8:
        return lambda source, kind, table, first, last, n, target, padded, stride: _decode_rows(
            kind, table, first, last, n, target, padded, stride
        )
    # rows are read in place
    return lambda source, kind, table, first, last, n, target, padded, stride: None


@jit.device_function
def _decode_rows(kind, table, first, last, n, target, padded, stride):
    """Decode rows of a block format, or of NVFP4, to float32."""
    if kind == NVFP4_KIND:
        for j in range(first, last):
            row, scales = read_i64(table + 8 * j), read_i64(table + SCALE_TABLES + 8 * j)
            decode_nvfp4_row(row, scales, n, target + stride * j)
    else:
        decode_rows(kind, table, first, last, n, target, padded, stride)


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
def prefetch_item(header, item, page_size, k, v, strides):
    """Prefetch the keys and values of the first chunk of an item."""
    fields = read_word(header, at.ITEMS) + at.ITEM_BYTES * item
    request, head = read_word(fields, at.ITEM_REQUEST), read_word(fields, at.ITEM_HEAD)
    key, end = read_word(fields, at.ITEM_FIRST_KEY), read_word(fields, at.ITEM_END_KEY)
    end = min(end, read_i32(read_word(header, at.KV_LENS) + 4 * request))
    end = min(end, key // CHUNK * CHUNK + CHUNK)
    pages = read_word(header, at.KV_INDICES)
    pages += 4 * read_i32(read_word(header, at.KV_INDPTR) + 4 * request)
    while key < end:
        page, slot = read_i32(pages + 4 * (key // page_size)), key % page_size
        count = min(page_size - slot, end - key)
        row = k + page * strides[0] + slot * strides[1] + head * strides[2]
        value = v + page * strides[4] + slot * strides[5] + head * strides[6]
        for i in range(count):
            for d in range(0, strides[3], 64):
                prefetch(row + i * strides[1] + d)
            for d in range(0, strides[7], 64):
                prefetch(value + i * strides[5] + d)
        key += count


@jit.device_function
def scale_addresses(source, header, pages, page_size, head, first, last, table):
    """Write the addresses of the scales of keys [first, last) and of values, if there are any."""
    if read_word(header, at.SCALES) == 0:
        return
    for key in range(first, last):
        page, slot = read_i32(pages + 4 * (key // page_size)), key % page_size
        place = table + SCALE_TABLES + 8 * (key % CHUNK)
        for i in range(2):
            n = at.SCALES + 4 * i
            row = read_word(header, n) + page * read_word(header, n + 1)
            row += slot * read_word(header, n + 2) + head * read_word(header, n + 3)
            write_i64(place + i * TABLE, row)


@jit.device_function
def redirect(table, first, last, target, stride):
    """Write the addresses of rows `stride` bytes apart to entries [first, last) of a table."""
    for j in range(first, last):
        write_i64(table + 8 * j, target + stride * j)


@jit.device_function
def copies(pack):
    """Return whether a reader copies rows; `pack` is None where it never does."""
    if pack is None:
        return False
    return pack


@jit.device_function
def unpack_keys(source, kind, pack, header, head, base, table, first, last, target):
    """Decode the keys of the chunk at key `base` to float32, unless they are read in place."""
    if pack is not None and pack:
        _unpack_keys(source, kind, header, head, base, table, first, last, target)


@jit.device_function
def _unpack_keys(source, kind, header, head, base, table, first, last, target):
    """Decode keys to rows at `target`; rotate them, or add their bias, if the plan says so.

    A latent key is a row (ckv, kpe), of which the first part is the value.
    """
    D_qk, D_vo = read_word(header, at.DIM_QK), read_word(header, at.DIM_VO)
    latent, rope = read_word(header, at.LATENT), read_word(header, at.ROPE)
    padded = (D_qk + 15) // 16 * 16
    stride = 4 * padded
    n = D_vo if latent else D_qk
    copy_rows(source, kind, table, first, last, n, target, n if latent else padded, stride)
    if latent:
        values, more, rest = table + TABLE, D_qk - n, padded - n
        copy_rows(source, kind, values, first, last, more, target + 4 * n, rest, stride)
        redirect(values, first, last, target, stride)
    redirect(table, first, last, target, stride)
    if rope != 0:
        for j in range(first, last):
            rotate_halves(target + j * stride, rope + 4 * D_qk * (base + j), D_qk // 2)
    if read_word(header, at.KEY_ROPE) != 0:
        _finish_keys(header, head, base, first, last, target, stride)


@jit.device_function
def unpack_values(source, kind, pack, table, first, last, n, target):
    """Decode the values of a chunk to float32 at `target`, unless they are read in place."""
    if pack is not None and pack:
        padded = (n + 15) // 16 * 16
        copy_rows(source, kind, table, first, last, n, target, padded, 4 * padded)
        redirect(table, first, last, target, 4 * padded)


@jit.device_function
def pad_table(table, first, last):
    """Fill addresses next to [first, last), which tiles of four or sixteen keys may read."""
    for j in range(first // 4 * 4, first):
        write_i64(table + 8 * j, read_word(table, first))
    for j in range(last, (last + 15) // 16 * 16):
        write_i64(table + 8 * j, read_i64(table + 8 * (last - 1)))
    for j in range(first // 16 * 16, first):
        write_i64(table + 8 * j, read_word(table, first))

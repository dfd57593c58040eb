"""Position embeddings on CUDA devices: launches of `position.cu`.

Positions outside a table give NaN: checking them would synchronize.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.formats.cuda_gather import KINDS, POINTERS
from nbflow_kernels.formats.float8 import Float8, Float8Codec
from nbflow_kernels.position import cpu

_THREADS = 128


@functools.cache
def _rope(neox: bool, wide: bool) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "position.cu", f"rope<{str(neox).lower()}, {str(wide).lower()}>",
        "i32*? positions, f32* query, f32* key, f32* cache, i32 H, i32 G, i32 D, i32 half, "
        "i64 query_row, i64 key_row, i32 max_pos, i32 n_blocks",
    )  # fmt: skip


@functools.cache
def _add_rows(kind: int, wide: bool) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "position.cu", f"add_rows<{kind}, {str(wide).lower()}>",
        f"f32* x, i32* positions, {POINTERS[kind]} table, f32* out, i32 E, i32 n_rows, i32 offset",
    )  # fmt: skip


def _plain(entry: str, parameters: str) -> cuda.Kernel:
    return cuda.cpp_kernel(__file__, "position.cu", entry, parameters)


_cos_sin = _plain(
    "cos_sin",
    "i32* positions, f64* frequencies, f32* cache, i32 T, i32 half, f64 scale, f64 factor",
)
_ragged_positions = _plain(
    "ragged_positions", "i32* indptr, i32* offsets, i32* positions, i32 n_segments, i32 T"
)
_alibi = _plain("alibi", "f32* slopes, f32* out, i32 Tq, i32 Tk, i32 symmetric")
_bucket = _plain(
    "bucket",
    "i32* relative, i32* near, i32* out, i64 n, i32 last, i32 n_buckets, i32 bidirectional",
)
_bucket_bias = _plain("bucket_bias", "f32* table, i32* buckets, f32* out, i32 H, i32 Tq, i32 Tk")
_temperature = _plain(
    "temperature", "i32* positions, f32* query, i64 row, i32 E, f64 scale, i32 floor, i32 offset"
)
_sinusoidal = _plain(
    "sinusoidal",
    "i32* positions, f64* frequencies, f32* out, i32 dim, i32 half, i32 interleave, i32 offset, "
    "i32 padded, i32 padding",
)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Any, query: Any, key: Any, cos_sin_cache: Any, is_neox: bool
) -> None:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache_inplace`; positions default to 0, 1, 2, ...

    Queries and keys must have the same head stride if both have several heads.
    """
    T, H, _ = query.shape
    G, half = key.shape[1], cos_sin_cache.shape[1] // 2
    D = (query if H > 1 else key).strides[1] // 4
    if not T * (H + G) * half:
        return
    rows = [x.strides[0] // 4 for x in (query, key)]
    whole = (half if is_neox else 2 * half) % 4 == 0 and D % 4 == 0
    wide = whole and all(
        cuda.address(x) % 16 == 0 and row % 4 == 0
        for x, row in ((query, rows[0]), (key, rows[1]), (cos_sin_cache, 0))
    )
    pairs = (4 if is_neox else 2) if wide else 1
    n_blocks = cuda.ceil_div((H + G) * half // pairs, _THREADS)
    args = (
        positions, query, key, cos_sin_cache, H, G, D, half, *rows, len(cos_sin_cache), n_blocks
    )  # fmt: skip
    _rope(is_neox, wide)(T * n_blocks, _THREADS, args)


@functools.cache
def _encode(neox: bool, type: Float8) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "position.cu",
        f"encode_heads<{str(neox).lower()}, {', '.join(map(str, type))}>",
        "i32*? positions, f32* x, f32*? cache, u8* codes, i32 T, i32 H, i32 n, i32 half, "
        "i64 x_row, i64 x_head, i64 code_row, i64 code_head, i32 max_pos, f32 factor",
    )  # fmt: skip


def encode_heads(
    x: Any, positions: Any, cos_sin: Any, is_neox: bool, codec: Float8Codec, codes: Any,
    n_numbers: int,
) -> None:  # fmt: skip
    """See `nbflow_kernels.position.cpu_float8.encode_heads`."""
    T, H, n = x.shape
    max_pos, half = (0, 0) if cos_sin is None else (len(cos_sin), cos_sin.shape[1] // 2)
    args = (
        positions, x, cos_sin, codes, T, H, n, half, x.strides[0] // 4, x.strides[1] // 4,
        codes.strides[0], codes.strides[1], max_pos, codec.factor,
    )  # fmt: skip
    n_threads = n_numbers // 2 if half else n_numbers
    _encode(is_neox, codec.type)(cuda.ceil_div(n_threads, _THREADS), _THREADS, args)


def apply_attention_temperature_inplace(
    positions: Any, query: Any, scale: float, floor: int, offset: int
) -> None:
    """See `nbflow_kernels.apply_attention_temperature_inplace`; heads are contiguous."""
    T, H, D = query.shape
    if query.size:
        args = (positions, query, query.strides[0] // 4, H * D, scale, floor, offset)
        _temperature(T, _THREADS, args)


def apply_rope_with_frequencies(
    positions: Any, query: Any, key: Any, frequencies: Any, scale: float, is_neox: bool
) -> None:
    """Apply RoPE with angles computed on the device in float64."""
    per_position, factor = frequencies
    T, half = len(positions), len(per_position)
    if not T:
        return
    device = cuda.device_of(query)
    cache = device.empty((T, 2 * half), np.float32)
    n_blocks = cuda.ceil_div(T * half, _THREADS)
    args = (positions, _constant(device, per_position), cache, T, half, scale, factor)
    _cos_sin(n_blocks, _THREADS, args)
    apply_rope_with_cos_sin_cache_inplace(None, query, key, cache, is_neox)


def ragged_positions(indptr: Any, offsets: Any, T: int) -> Any:
    """Return the positions of T ragged rows, counted from the offset of each segment."""
    out = cuda.device_of(indptr).empty((T,), np.int32)
    if T:
        args = (indptr, offsets, out, len(offsets), T)
        _ragged_positions(cuda.ceil_div(T, _THREADS), _THREADS, args)
    return out


def alibi_bias(slopes: Any, symmetric: bool, out: Any) -> None:
    """See `nbflow_kernels.alibi_bias`."""
    H, Tq, Tk = out.shape
    if out.size:
        _alibi(H * Tq, _THREADS, (slopes, out, Tq, Tk, symmetric))


def relative_position_bucket(
    relative_position: Any, bidirectional: bool, n: int, max_distance: int, out: Any
) -> None:
    """See `nbflow_kernels.relative_position_bucket`.

    The CPU computes the bucket table, as bucket limits depend on the last bit of a logarithm.
    """
    if not out.size:
        return
    near = np.empty(max_distance + 1, np.int32)
    cpu.relative_position_bucket(
        -np.arange(max_distance + 1, dtype=np.int32), False, n, max_distance, near
    )
    near = _constant(cuda.device_of(relative_position), near)
    args = (relative_position, near, out, out.size, max_distance, n, bidirectional)
    _bucket(cuda.ceil_div(out.size, _THREADS), _THREADS, args)


def relative_position_bias(table: Any, buckets: Any, out: Any) -> None:
    """See `nbflow_kernels.relative_position_bias`."""
    H, Tq, Tk = out.shape
    if out.size:
        args = (table, cuda.to_device(buckets, table), out, H, Tq, Tk)
        _bucket_bias(H * Tq, _THREADS, args)


def sinusoidal_position_embedding(
    positions: Any, frequencies: Any, interleave: bool, offset: int, padding_idx: Any, out: Any
) -> None:
    """See `nbflow_kernels.sinusoidal_position_embedding`."""
    if not out.size:
        return
    found = _constant(cuda.device_of(positions), frequencies)
    padding = -1 if padding_idx is None else padding_idx
    args = (
        positions, found, out, out.shape[1], len(frequencies), interleave, offset,
        padding_idx is not None, padding,
    )  # fmt: skip
    _sinusoidal(len(positions), _THREADS, args)


def add_learned_positions(x: Any, positions: Any, table: Any, offset: int, out: Any) -> None:
    """See `nbflow_kernels.add_learned_positions`."""
    T, E = x.shape
    if T * E:
        wide = E % 4 == 0 and all(cuda.address(a) % 16 == 0 for a in (x, table, out))
        args = (x, positions, table, out, E, len(table), offset)
        _add_rows(KINDS[table.dtype.name], wide)(T, _THREADS, args)


def _constant(device: cuda.KernelDevice, array: np.ndarray) -> Any:
    """Return the cached device copy of a small array."""
    key = ("position", array.dtype.char, array.tobytes())
    found = device.constants.get(key)
    if found is None:
        found = device.constants[key] = device.asarray(array)
    return found

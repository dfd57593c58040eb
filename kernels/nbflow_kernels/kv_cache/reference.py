"""Reference of the paged key/value cache in NumPy, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.float8 import FLOAT8, decode_float8, encode_float8
from nbflow_kernels.formats.ggml.mxfp4_nvfp4 import LEVELS
from nbflow_kernels.kv_cache.codebooks import CODEBOOKS, decode_codebook, encode_codebook
from nbflow_kernels.kv_cache.formats import split_names
from nbflow_kernels.position.reference import rope_quantize_fp8, rotate_pairs
from nbflow_kernels.quantizers import quantize


def encode(rows: np.ndarray, dtype: Any, kv_format: str | None) -> np.ndarray:
    """Return head vectors (..., D) encoded for a cache of this dtype."""
    if kv_format is None or np.dtype(dtype).kind == "f":
        with np.errstate(over="ignore"):  # above 65504, float16 is infinite
            return rows.astype(dtype)
    if kv_format in FLOAT8:
        return encode_float8(rows, kv_format).view(dtype)
    if kv_format in CODEBOOKS:
        return encode_codebook(rows, kv_format)
    flat = quantize(rows.reshape(-1, rows.shape[-1]), kv_format, quantizer="reference")
    stored: np.ndarray = flat.data.view(dtype).reshape(*rows.shape[:-1], -1)
    return stored


def decode(rows: np.ndarray, kv_format: str | None, head_dim: int | None) -> np.ndarray:
    """Return decoded head vectors (..., row) of a cache as float64 (..., D)."""
    if kv_format is None or rows.dtype.kind == "f":
        return rows.astype(np.float64)
    if kv_format in FLOAT8:
        return decode_float8(rows, kv_format)
    if kv_format in CODEBOOKS:
        return decode_codebook(rows, kv_format)[..., :head_dim]
    format = FORMATS[kv_format]
    blocks = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, format.block_bytes)
    values: np.ndarray = format.dequantize_blocks(blocks).astype(np.float64)
    return values.reshape(*rows.shape[:-1], -1)[..., :head_dim]


def encode_nvfp4(rows: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (..., D / 2) and scales (..., D / 16) of head vectors (..., D)."""
    blocks = np.asarray(rows, np.float32).reshape(*rows.shape[:-1], -1, 16)
    with np.errstate(invalid="ignore"):
        largest = np.abs(blocks).max(-1) * np.float32(1 / (6 * np.float32(global_scale)))
    largest = np.where(np.isfinite(blocks).all(-1), largest, np.nan)
    scales = encode_float8(largest, "f8_e4m3")
    steps = decode_float8(scales, "f8_e4m3") * global_scale
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    with np.errstate(all="ignore"):
        x = np.nan_to_num(np.abs(blocks) / np.where(steps > 0, steps, np.inf)[..., None])
    middles = (values[1:] + values[:-1]) / 2
    below = np.searchsorted(middles, x, side="left")
    tie = np.searchsorted(middles, x, side="right") != below
    codes = np.where(tie, below + (below & 1), below) | np.where(np.signbit(blocks), 8, 0)
    codes = codes.reshape(*rows.shape[:-1], -1, 2).astype(np.uint8)
    return codes[..., 0] | codes[..., 1] << 4, scales


def decode_nvfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers (..., D) without the global scale, float64."""
    both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    factors = np.repeat(decode_float8(scales, "f8_e4m3"), 16, axis=-1)
    return np.asarray(np.array(LEVELS)[both] / 2 * factors)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: np.ndarray,
    append_value: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_last_page_len: np.ndarray,
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
) -> None:
    """See `nbflow_kernels.nvfp4_quantize_append_paged_kv_cache`."""
    page_size = _pages(_split(paged_kv_cache)[0], kv_layout).shape[1]
    slots = [
        kv_indices[kv_indptr[b] + p // page_size] * page_size + p % page_size if b >= 0 else -1
        for b, p in zip(batch_indices, positions, strict=True)
    ]
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        append_key, append_value, np.array(slots), paged_kv_cache, kv_cache_sf, k_scale, v_scale,
        kv_layout,
    )  # fmt: skip


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: np.ndarray,
    append_value: np.ndarray,
    slot_mapping: np.ndarray,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
) -> None:
    """See `nbflow_kernels.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping`."""
    parts = zip(
        (append_key, append_value), _split(paged_kv_cache), _split(kv_cache_sf), (k_scale, v_scale),
        strict=True,
    )  # fmt: skip
    for rows, cache, cache_sf, scale in parts:
        pages, pages_sf = _pages(cache, kv_layout), _pages(cache_sf, kv_layout)
        for row, slot in zip(rows[: len(slot_mapping)], slot_mapping, strict=True):
            page, token = divmod(int(slot), pages.shape[1])
            if 0 <= page < len(pages):
                pages[page, token], pages_sf[page, token] = encode_nvfp4(row, scale)


def _pages(cache: np.ndarray, kv_layout: str) -> np.ndarray:
    """Return a view (pages, page_size, G, row)."""
    return cache if kv_layout == "NHD" else cache.transpose(0, 2, 1, 3)


def _split(paged_kv_cache: Any) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(paged_kv_cache, tuple):
        return paged_kv_cache
    return paged_kv_cache[:, 0], paged_kv_cache[:, 1]


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
    *,
    kv_format: str | None = None,
    cos_sin: np.ndarray | None = None,
    interleave: bool = False,
) -> None:
    """See `nbflow_kernels.append_paged_kv_cache`."""
    if cos_sin is not None:
        append_key = rotate_pairs(append_key, cos_sin[positions], interleave)
    caches, names = _split(paged_kv_cache), split_names(kv_format)
    for rows, cache, name in zip((append_key, append_value), caches, names, strict=True):
        pages = _pages(cache, kv_layout)
        for row, request, position in zip(rows, batch_indices, positions, strict=True):
            if request < 0:
                continue  # padding
            page, slot = divmod(int(position), pages.shape[1])
            for g, vector in enumerate(row):
                stored = encode(vector, cache.dtype, name)
                pages[kv_indices[kv_indptr[request] + page], slot, g] = stored


def append_paged_mla_kv_cache(
    append_ckv: np.ndarray,
    append_kpe: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    ckv_cache: np.ndarray,
    kpe_cache: np.ndarray,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_last_page_len: np.ndarray,
    *,
    kv_format: str | None = None,
) -> None:
    """See `nbflow_kernels.append_paged_mla_kv_cache`; a cache with one head."""
    append_paged_kv_cache(
        append_ckv[:, None],
        append_kpe[:, None],
        batch_indices,
        positions,
        (ckv_cache[:, :, None], kpe_cache[:, :, None]),
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_format=kv_format,
    )


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: np.ndarray,
    k_rope: np.ndarray,
    q_nope: Any,
    k_nope: Any,
    v: Any,
    cos_sin_cache: np.ndarray,
    pos_ids: np.ndarray,
    paged_kv_cache: Any,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    is_neox: bool = True,
    quantize_dtype: str = "f8_e4m3",
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Any = None,
    q_nope_out: Any = None,
) -> tuple[Any, Any]:
    """See `nbflow_kernels.rope_quantize_fp8_append_paged_kv_cache`."""
    codes = rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype,
        quant_scale_q, quant_scale_kv, q_rope_out, None, q_nope_out,
    )  # fmt: skip
    key_parts = [decode_float8(part, quantize_dtype) for part in (codes[1], codes[3])]
    tables = (kv_indices, kv_indptr, kv_indptr)  # the last page lengths are not read
    if v is None:
        ckv, kpe = paged_kv_cache
        append_paged_mla_kv_cache(
            key_parts[1], key_parts[0], batch_indices, positions, ckv, kpe, *tables,
            kv_format=quantize_dtype,
        )  # fmt: skip
    else:
        key = np.concatenate(key_parts, axis=-1)
        append_paged_kv_cache(
            key, v * quant_scale_kv, batch_indices, positions, paged_kv_cache, *tables, kv_layout,
            kv_format=quantize_dtype,
        )  # fmt: skip
    assert page_size in _pages(_split(paged_kv_cache)[0], kv_layout).shape
    return codes[0], codes[2]


def gather_paged_kv_cache(
    paged_kv_cache: Any,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_last_page_len: np.ndarray,
    kv_layout: str = "NHD",
    *,
    head_dim: int | None = None,
    kv_format: str | None = None,
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.gather_paged_kv_cache`."""
    found = []
    for cache, name in zip(_split(paged_kv_cache), split_names(kv_format), strict=True):
        pages = _pages(cache, kv_layout)
        lens = get_seq_lens(kv_indptr, kv_last_page_len, pages.shape[1])
        rows = [
            pages[kv_indices[kv_indptr[request] + n // pages.shape[1]], n % pages.shape[1]]
            for request, length in enumerate(lens)
            for n in range(length)
        ]
        stored = np.array(rows, cache.dtype).reshape(-1, *pages.shape[2:])
        with np.errstate(over="ignore"):
            found.append(decode(stored, name, head_dim).astype(dtype))
    return found[0], found[1]


def convert_paged_kv_cache(
    paged_kv_cache: Any,
    page_table: tuple[np.ndarray, np.ndarray, np.ndarray],
    out: Any,
    out_page_table: tuple[np.ndarray, np.ndarray, np.ndarray],
    kv_layout: str = "NHD",
    out_kv_layout: str = "NHD",
    *,
    head_dim: int | None = None,
    kv_format: str | None = None,
    out_kv_format: str | None = None,
) -> None:
    """See `nbflow_kernels.convert_paged_kv_cache`."""
    sides = zip(
        _split(paged_kv_cache), _split(out), split_names(kv_format), split_names(out_kv_format),
        strict=True,
    )  # fmt: skip
    for cache, target, name, out_name in sides:
        pages, out_pages = _pages(cache, kv_layout), _pages(target, out_kv_layout)
        indices, indptr, last = page_table
        for request, length in enumerate(get_seq_lens(indptr, last, pages.shape[1])):
            for n in range(length):
                page, slot = divmod(n, pages.shape[1])
                stored = pages[indices[indptr[request] + page], slot]
                if (name, cache.dtype) != (out_name, target.dtype):
                    numbers = decode(stored, name, head_dim)
                    stored = np.array([encode(x, target.dtype, out_name) for x in numbers])
                page, slot = divmod(n, out_pages.shape[1])
                out_pages[out_page_table[0][out_page_table[1][request] + page], slot] = stored


def get_seq_lens(kv_indptr: np.ndarray, kv_last_page_len: np.ndarray, page_size: int) -> np.ndarray:
    """See `nbflow_kernels.get_seq_lens`."""
    lens = [
        max(int(b - a) - 1, 0) * page_size + int(last)
        for a, b, last in zip(kv_indptr[:-1], kv_indptr[1:], kv_last_page_len, strict=True)
    ]
    return np.array(lens, np.int32)


def get_batch_indices_positions(
    append_indptr: np.ndarray,
    seq_lens: np.ndarray,
    nnz: int,
    batch_indices: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.get_batch_indices_positions`."""
    pairs = [
        (request, int(seq_lens[request]) - n + i)
        for request, n in enumerate(np.diff(append_indptr).tolist())
        for i in range(n)
    ]
    pairs += [(-1, 0)] * (nnz - len(pairs))  # padding
    table = np.array(pairs, np.int32).reshape(nnz, 2)
    for out, column in ((batch_indices, table[:, 0]), (positions, table[:, 1])):
        if out is not None:
            out[...] = column
    return table[:, 0], table[:, 1]

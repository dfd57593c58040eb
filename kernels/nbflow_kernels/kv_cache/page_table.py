"""CSR page tables (indptr, indices, last_page_len): checks and sequence lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_indptr, check_range, is_cuda, on_host
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.kv_cache.formats import KVFormat, format_of, formats_of

LAYOUTS = ("NHD", "HND")
PAGE_NUMBERS = "kv_indices must name pages {} of the cache"
"""Message of `check_range` for a page table."""


def check_layout(kv_layout: str) -> None:
    """Raise unless the layout is known."""
    if kv_layout not in LAYOUTS:
        raise unknown_name("kv_layout", kv_layout, LAYOUTS)


def count_tokens(kv_indptr: np.ndarray, kv_last_page_len: np.ndarray, page_size: int) -> np.ndarray:
    """Return the number of tokens of each request, int32 (B,); 0 without pages."""
    full = kv_indptr[1:] - kv_indptr[:-1] - np.int32(1)
    lens: np.ndarray = np.maximum(full, 0) * np.int32(page_size) + kv_last_page_len
    return lens


def check_page_table(
    kv_indptr: np.ndarray,
    kv_indices: np.ndarray | None,
    kv_last_page_len: np.ndarray,
    page_size: int,
) -> None:
    """Raise unless the arrays are a page table of `page_size`; `kv_indices` may be None."""
    if page_size < 1:
        raise UsageError(f"page_size must be positive, got {page_size}")
    check_indptr("kv_indptr", kv_indptr)
    if kv_indices is not None:
        check_array("kv_indices", kv_indices, (None,), np.int32)
        if kv_indptr[-1] > len(kv_indices):
            raise UsageError(
                f"kv_indptr must end within kv_indices ({len(kv_indices)} entries), got "
                f"{kv_indptr[-1]}"
            )
    check_array("kv_last_page_len", kv_last_page_len, (len(kv_indptr) - 1,), np.int32)
    counts = kv_indptr[1:] - kv_indptr[:-1]
    wrong = (kv_last_page_len > page_size) | ((kv_last_page_len > 0) != (counts > 0))
    if wrong.any():
        request = int(np.flatnonzero(wrong)[0])
        raise UsageError(
            f"kv_last_page_len of request {request} must be 1..{page_size} (0 without pages), "
            f"got {kv_last_page_len[request]} with {counts[request]} pages"
        )


def check_kv_lens(
    kv_indptr: np.ndarray, kv_indices: np.ndarray, kv_lens: np.ndarray, page_size: int
) -> None:
    """Raise unless the pages of each request hold its tokens; unused pages are allowed."""
    check_array("kv_indptr", kv_indptr, (None,), np.int32)
    check_array("kv_len_arr", kv_lens, (max(len(kv_indptr) - 1, 0),), np.int32)
    counts = (kv_indptr[1:] - kv_indptr[:-1]).astype(np.int64)
    full = np.where(counts > 0, page_size, 0).astype(np.int32)
    check_page_table(kv_indptr, kv_indices, full, page_size)
    wrong = np.flatnonzero((kv_lens < 0) | (kv_lens > counts * page_size))
    if len(wrong):
        b = int(wrong[0])
        raise UsageError(
            f"kv_len_arr of request {b} must be 0..{counts[b] * page_size}, the capacity of its "
            f"{counts[b]} pages, got {kv_lens[b]}"
        )


def strides(cache: Any, kv_layout: str) -> tuple[int, int, int]:
    """Return the page, token and head strides of a cache in bytes."""
    page, first, second, _ = cache.strides
    return (page, first, second) if kv_layout == "NHD" else (page, second, first)


def split_cache(paged_kv_cache: Any, name: str = "paged_kv_cache") -> tuple[Any, Any]:
    """Return the key and the value cache of a tuple or of one 5-D array."""
    if isinstance(paged_kv_cache, tuple):
        if len(paged_kv_cache) != 2:
            raise UsageError(
                f"{name} must be a pair (keys, values), got {len(paged_kv_cache)} arrays"
            )
        return paged_kv_cache
    if getattr(paged_kv_cache, "ndim", 0) != 5 or paged_kv_cache.shape[1] != 2:
        raise UsageError(
            f"{name} must be a pair of 4-D arrays or one 5-D array (pages, 2, ...), got "
            f"{getattr(paged_kv_cache, 'shape', type(paged_kv_cache).__name__)}"
        )
    return paged_kv_cache[:, 0], paged_kv_cache[:, 1]


def one_token_pages(array: Any, kv_layout: str) -> Any:
    """Return rows (pages, G, row) as pages of one token; other arrays as they are."""
    if getattr(array, "ndim", 4) != 3:
        return array
    return array[:, None] if kv_layout == "NHD" else array[:, :, None]


def check_cache(
    paged_kv_cache: Any,
    page_size: int | None,
    G: int,
    D: int,
    kv_layout: str,
    kv_format: str | None = None,
    *,
    D_value: int | None = None,
) -> tuple[Any, Any]:
    """Return the checked key and value caches: same pages, tokens and heads, contiguous rows.

    `D` is the head size, `D_value` that of values if different.  Arrays of a pair may have three
    axes, for pages of one token.
    """
    k, v = split_cache(paged_kv_cache)
    if page_size in (None, 1) and isinstance(paged_kv_cache, tuple):
        k, v = (one_token_pages(array, kv_layout) for array in (k, v))
    formats = formats_of(k, v, kv_format)
    sizes = (D, D if D_value is None else D_value)
    for name, array, format, size in zip(("keys", "values"), (k, v), formats, sizes, strict=True):
        row = format.row_length(size)
        shape = (None, page_size, G, row) if kv_layout == "NHD" else (None, G, page_size, row)
        free = not is_cuda(array)  # kernels of devices copy rows of pages at a time
        check_array(
            f"paged_kv_cache ({name})", array, shape, array.dtype, rows=True, any_stride=free
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise UsageError(
            f"paged_kv_cache: keys and values must have the same pages, got {k.shape} and {v.shape}"
        )
    return k, v


def check_mla_cache(
    ckv_cache: Any, kpe_cache: Any, page_size: int | None, sizes: tuple[int, int], kv_format: Any
) -> KVFormat:
    """Return the format of two checked caches (pages, page_size, row), with any token stride."""
    if isinstance(kv_format, str) and "/" in kv_format:
        raise UsageError(
            f"kv_format={kv_format!r}: a latent cache has one format, as its values are part of "
            "its keys; pass one name"
        )
    format = format_of(ckv_cache, kv_format)
    caches = (("ckv_cache", ckv_cache, sizes[0]), ("kpe_cache", kpe_cache, sizes[1]))
    for name, array, size in caches:
        row = format.row_length(size)
        if array.dtype != ckv_cache.dtype:
            raise TypeError(
                f"{name} must have dtype {ckv_cache.dtype.name}, got {array.dtype.name}"
            )
        fits = array.ndim == 3 and array.shape[2] == row and page_size in (None, array.shape[1])
        if not fits:
            raise UsageError(
                f"{name} must have shape (pages, {page_size or 'page_size'}, {row}), "
                f"got {array.shape}"
            )
        if array.size and array.shape[2] > 1 and array.strides[2] != array.itemsize:
            raise UsageError(f"{name}: the last axis must be contiguous")
    if ckv_cache.shape[:2] != kpe_cache.shape[:2]:
        raise UsageError(
            "ckv_cache and kpe_cache must have the same pages, got "
            f"{ckv_cache.shape[:2]} and {kpe_cache.shape[:2]}"
        )
    return format


def check_tables(
    batch_indices: Any,
    positions: Any,
    T: int,
    tables: tuple[Any, Any, Any],
    page_size: int,
    n_pages: int,
) -> None:
    """Raise unless the page table is valid and covers the rows."""
    kv_indices, kv_indptr, kv_last_page_len = tables
    check_array("batch_indices", batch_indices, (T,), np.int32)
    check_array("positions", positions, (T,), np.int32)
    if any(is_cuda(table) for table in (batch_indices, positions, *tables)):
        # values on a device are not read
        check_array("kv_indptr", kv_indptr, (None,), np.int32)
        check_array("kv_indices", kv_indices, (None,), np.int32)
        check_array("kv_last_page_len", kv_last_page_len, (len(kv_indptr) - 1,), np.int32)
        return
    check_page_table(kv_indptr, kv_indices, kv_last_page_len, page_size)
    check_range(PAGE_NUMBERS, kv_indices[: kv_indptr[-1]], n_pages)
    lens = count_tokens(kv_indptr, kv_last_page_len, page_size)
    if (batch_indices < -1).any():
        raise UsageError(f"batch_indices must be -1 for padding, got {batch_indices.min()}")
    used = batch_indices >= 0
    check_range("batch_indices must name requests {}", batch_indices[used], len(lens))
    lens = np.append(lens, np.int32(0))  # of request -1
    wrong = used & ((positions < 0) | (positions >= lens[batch_indices]))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UsageError(
            f"positions[{row}] must be below the length of its sequence, "
            f"{lens[batch_indices[row]]} by the page table, got {positions[row]}"
        )


def full_pages(kv_indptr: Any, page_size: int) -> np.ndarray:
    """Return the last page lengths of requests that may write to all slots of their pages."""
    counts = np.diff(on_host(kv_indptr))
    return np.where(counts > 0, page_size, 0).astype(np.int32)

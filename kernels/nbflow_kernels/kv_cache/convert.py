"""Conversion of a paged KV cache to another layout, page size or format."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import (
    check_array,
    check_range,
    check_together,
    is_cuda,
    on_host,
    overlap,
)
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache import cpu, cuda
from nbflow_kernels.kv_cache.formats import KVFormat, format_of, kinds_of, split_names
from nbflow_kernels.kv_cache.page_table import (
    PAGE_NUMBERS,
    check_cache,
    check_layout,
    check_page_table,
    count_tokens,
    split_cache,
)

PageTable = tuple[Any, Any, Any]
"""`kv_indices`, `kv_indptr` and `kv_last_page_len`, in the order of `append_paged_kv_cache`."""


def convert_paged_kv_cache(
    paged_kv_cache: Any,
    page_table: PageTable,
    out: Any,
    out_page_table: PageTable,
    kv_layout: str = "NHD",
    out_kv_layout: str = "NHD",
    *,
    head_dim: int | None = None,
    kv_format: str | None = None,
    out_kv_format: str | None = None,
) -> None:
    """Copy all requests of a paged cache to another one, of any layout, page size and format.

    Parameters
    ----------
    paged_kv_cache : pair of arrays, or one array
        The cache to read, as in `append_paged_kv_cache`.
    page_table : tuple of arrays
        Its page table ``(kv_indices, kv_indptr, kv_last_page_len)``.
    out : pair of arrays, or one array
        The cache to write, with as many heads; other memory than `paged_kv_cache`.  Slots outside
        `out_page_table` keep their bytes.
    out_page_table : tuple of arrays
        Page table of `out`: the same lengths in tokens, and every page at most once.
    kv_layout, out_kv_layout : str
        ``"NHD"`` or ``"HND"``.
    head_dim : int, optional
        Head size of keys and values; needed if the last block of a block format is padded, else
        derived from the cache.
    kv_format, out_kv_format : str, optional
        Storage formats, as in `append_paged_kv_cache`.

    Raises
    ------
    UsageError, TypeError
        If the caches and page tables do not fit each other.

    Notes
    -----
    Keys (or values) whose format stays are copied byte for byte.  Others are decoded to float32,
    which is exact, and encoded as `append_paged_kv_cache` does.

    Examples
    --------
    Two pages of two tokens, heads last, become one page of four with heads first:

    >>> import numpy as np
    >>> from nbflow_kernels.kv_cache import convert_paged_kv_cache
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> keys = np.arange(8, dtype=np.float32).reshape(2, 2, 2, 1)
    >>> out = tuple(np.full((1, 2, 4, 1), np.nan, np.float16) for _ in "kv")
    >>> convert_paged_kv_cache(
    ...     (keys, -keys), (ints(1, 0), ints(0, 2), ints(1)),
    ...     out, (ints(0), ints(0, 1), ints(3)), "NHD", "HND",
    ... )
    >>> out[0][0, :, :, 0]  # tokens of page 1, then one of page 0
    array([[ 4.,  6.,  0., nan],
           [ 5.,  7.,  1., nan]], dtype=float16)
    """
    check_layout(kv_layout)
    check_layout(out_kv_layout)
    k, v, sizes = _check_source(paged_kv_cache, kv_layout, head_dim, kv_format)
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    out_k, out_v = check_cache(
        out, None, k.shape[head], sizes[0], out_kv_layout, out_kv_format, D_value=sizes[1]
    )
    _check_memory((k, v), (out_k, out_v))
    out_size = out_k.shape[1 if out_kv_layout == "NHD" else 2]
    indices, indptr, lens = _check_table("page_table", page_table, k.shape[token], len(k))
    to_indices, to_indptr, to_lens = _check_table(
        "out_page_table", out_page_table, out_size, len(out_k)
    )
    if not np.array_equal(lens, to_lens):
        raise UsageError(
            "out_page_table must have the lengths of page_table in tokens, "
            f"{_first(lens)}, got {_first(to_lens)}"
        )
    used = to_indices[: to_indptr[-1]]
    if len(np.unique(used)) < len(used):
        raise UsageError("out_page_table must have every page at most once: requests share one")
    before, after = kinds_of(k, v, kv_format), kinds_of(out_k, out_v, out_kv_format)
    n_tokens = int(lens.astype(np.int64).sum())
    requests = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    starts = np.cumsum(lens, dtype=np.int64) - lens
    positions = (np.arange(n_tokens) - starts[requests]).astype(np.int32)
    (cuda if is_cuda(k) else cpu).convert_paged_kv_cache(
        (k, v, out_k, out_v), (kv_layout, out_kv_layout),
        ((before[0], after[0]), (before[1], after[1])),
        (indices, indptr, to_indices, to_indptr), (requests, positions), sizes,
    )  # fmt: skip


def _check_memory(caches: tuple[Any, Any], outs: tuple[Any, Any]) -> None:
    """Raise unless all caches are on one device, and no output is a part of an input."""
    arrays = dict(zip(("paged_kv_cache (keys)", "paged_kv_cache (values)"), caches, strict=True))
    outputs = dict(zip(("out (keys)", "out (values)"), outs, strict=True))
    check_together(**arrays, **outputs)
    for name, array in outputs.items():
        for other, source in arrays.items():
            if overlap(array, source):
                raise UsageError(f"{name} must not share memory with {other}; pass another array")


def _check_source(
    paged_kv_cache: Any, kv_layout: str, head_dim: int | None, kv_format: str | None
) -> tuple[Any, Any, tuple[int, int]]:
    """Return the checked key and value caches, and their head sizes."""
    caches = split_cache(paged_kv_cache)
    sizes = []
    for name, array, part in zip(("keys", "values"), caches, split_names(kv_format), strict=True):
        format = format_of(array, part)
        if array.ndim != 4:
            raise UsageError(
                f"paged_kv_cache ({name}) must have 4 axes, got shape {tuple(array.shape)}"
            )
        sizes.append(whole_blocks(format, array.shape[3]) if head_dim is None else head_dim)
    G = caches[0].shape[2 if kv_layout == "NHD" else 1]
    k, v = check_cache(paged_kv_cache, None, G, sizes[0], kv_layout, kv_format, D_value=sizes[1])
    return k, v, (sizes[0], sizes[1])


def whole_blocks(format: KVFormat, row_length: int) -> int:
    """Return the head size of a row without padding."""
    return row_length * format.dtype.itemsize // format.block_bytes * format.block_size


def _check_table(
    name: str, table: PageTable, page_size: int, n_pages: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the page numbers, offsets and lengths in tokens of a checked page table."""
    if not isinstance(table, tuple) or len(table) != 3:
        raise UsageError(
            f"{name} must be a tuple (kv_indices, kv_indptr, kv_last_page_len), got "
            f"{type(table).__name__}"
        )
    indices, indptr, last = map(on_host, table)
    for part, array in zip(("kv_indices", "kv_indptr", "kv_last_page_len"), table, strict=True):
        check_array(f"{name}: {part}", array, (None,), np.int32)
    try:
        check_page_table(indptr, indices, last, page_size)
        check_range(PAGE_NUMBERS, indices[: indptr[-1]], n_pages)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return indices, indptr, count_tokens(indptr, last, page_size)


def _first(lens: np.ndarray) -> str:
    """Return the first lengths as text."""
    shown = ", ".join(map(str, lens[:8]))
    return f"[{shown}{', ...' if len(lens) > 8 else ''}]"

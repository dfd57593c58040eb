"""Paged key/value cache: append, gather, convert, and formats, float or block-quantized.

The page table of a batch is a CSR triple: the pages of request b are
``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``, and its last page holds ``kv_last_page_len[b]``
tokens.  The caller owns the page table and the pages.

======================  =========================================================================
`formats.py`            `kv_format`: names, dtypes and row sizes
`page_table.py`         checks and lengths of page tables
`cpu.py`, `cuda.py`     append and gather kernels; `cuda_append_gather.cu`
`cpu_codec.py`          encode and decode one head vector; `cuda_codec.cuh` on a device
`codebooks.py`          Lloyd-Max codebooks; `cpu_codebook.py` in kernels
`formats/float8.py`     float8 codes; `cpu/float8.py` in kernels
`append_float8.py`      RoPE and append to a float8 cache
`nvfp4.py`              append to a cache of NVFP4 codes and scales
`convert.py`            another layout, page size or format
======================  =========================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import (
    check_array,
    check_indptr,
    check_range,
    check_together,
    check_writable,
    empty,
    is_cuda,
    on_device,
    on_host,
)
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.kv_cache import cpu, cuda
from nbflow_kernels.kv_cache.append_float8 import rope_quantize_fp8_append_paged_kv_cache
from nbflow_kernels.kv_cache.convert import convert_paged_kv_cache, whole_blocks
from nbflow_kernels.kv_cache.formats import (
    KVFormat,
    format_of,
    kinds_of,
    kv_format,
    kv_formats,
    split_names,
)
from nbflow_kernels.kv_cache.nvfp4 import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from nbflow_kernels.kv_cache.page_table import (
    PAGE_NUMBERS,
    check_cache,
    check_layout,
    check_mla_cache,
    check_page_table,
    check_tables,
    count_tokens,
    split_cache,
)

__all__ = [
    "KVFormat",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "convert_paged_kv_cache",
    "gather_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "kv_format",
    "kv_formats",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "rope_quantize_fp8_append_paged_kv_cache",
]

OUT_DTYPES = ("float32", "float16")


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    kv_format: str | None = None,
    cos_sin: Any = None,
    interleave: bool = False,
) -> None:
    """Append new keys and values to their pages, in place.

    Parameters
    ----------
    append_key, append_value : array of float32, shape (nnz, G, D)
        One row per new token, with any row stride (columns of a wider matrix).  Values may have
        another head size than keys if the cache is a pair.
    batch_indices : array of int32, shape (nnz,)
        Request of each row; see `get_batch_indices_positions`.  -1 is padding, which is skipped.
    positions : array of int32, shape (nnz,)
        Position of each row in its sequence; unique within a request.
    paged_kv_cache : pair of arrays, or one array
        Keys and values, (pages, page_size, G, row) each for ``"NHD"`` or (pages, G, page_size, row)
        for ``"HND"``; or both in one 5-D array (pages, 2, ...).  A pair of arrays (pages, G, row)
        has pages of one token.  A row is D floats, or for a
        quantized cache ``kv_format(name).row_length(D)`` bytes (uint8).
    kv_indices : array of int32, shape (n_pages,)
        Page numbers of all requests.
    kv_indptr : array of int32, shape (B + 1,)
        Offset of each request's pages in `kv_indices`.
    kv_last_page_len : array of int32, shape (B,)
        Tokens on each request's last page, the new ones included.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    kv_format : str, optional
        Storage format of the cache: a name of `kv_format`, e.g. ``"q8_0"``, or two, keys first,
        e.g. ``"q8_0/q4_0"`` (see `kv_formats`).  By default that of the arrays' dtypes: float32,
        float16, uint16 as the bits of bfloat16, or bfloat16 and float8 where a package provides the
        dtype (``kv_format="f8_e4m3"`` is uint8).
    cos_sin : array of float32, shape (n_positions, rotary_dim), optional
        Table of `rope_cos_sin_cache`: the first `rotary_dim` columns of the keys are rotated by
        their positions before they are stored, as `apply_rope_with_cos_sin_cache_inplace` does it.
    interleave : bool
        Rotate pairs of neighbours (2j, 2j + 1) instead of (j, j + rotary_dim / 2).

    Raises
    ------
    UsageError, TypeError
        If shapes do not fit, the format is unknown, or the page table lacks a row's request or
        position, or if an argument is not an array or has another dtype.

    Notes
    -----
    For caches on a CUDA device, index arrays may be on the device or the host.  Device index arrays
    are not checked, as that would synchronize: rows missing in the page table or in `cos_sin` are
    skipped.

    Floats are rounded to nearest even; values above 65504 become infinite in float16.  A head
    vector in a block format has the bits of ``quantize(row, kv_format, quantizer="reference")``
    (except the sign of a zero base); a block with NaN or infinity decodes to NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kv_cache import append_paged_kv_cache
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> cache = np.zeros((2, 2, 2, 1, 1), np.float32)  # 2 pages of keys and values, 2 tokens each
    >>> row = np.full((1, 1, 1), 5, np.float32)
    >>> append_paged_kv_cache(row, -row, ints(0), ints(2), cache, ints(1, 0), ints(0, 2), ints(1))
    >>> cache[0].ravel()  # position 2 is the first slot of the request's second page, page 0
    array([ 5.,  0., -5.,  0.], dtype=float32)
    """
    check_layout(kv_layout)
    check_array("append_key", append_key, (None, None, None), rows=True)
    T, G, D = append_key.shape
    check_array("append_value", append_value, (T, G, None), rows=True)
    k, v = check_cache(
        paged_kv_cache, None, G, D, kv_layout, kv_format, D_value=append_value.shape[2]
    )
    page_size = k.shape[1 if kv_layout == "NHD" else 2]
    tables = (kv_indices, kv_indptr, kv_last_page_len)
    check_tables(batch_indices, positions, T, tables, page_size, k.shape[0])
    _check_rotation(cos_sin, interleave, append_key, positions)
    variant = cuda if is_cuda(append_key) else cpu
    variant.append_paged_kv_cache(
        append_key, append_value, batch_indices, positions, k, v, kv_indices, kv_indptr, kv_layout,
        kinds_of(k, v, kv_format), cos_sin=cos_sin, interleave=interleave,
    )  # fmt: skip


def append_paged_mla_kv_cache(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    *,
    kv_format: str | None = None,
) -> None:
    """Append compressed keys and values of multi-head latent attention to their pages.

    Parameters
    ----------
    append_ckv : array of float32, shape (nnz, D_ckv)
        Compressed key and value of each new token (size 512 in DeepSeek-V2 and -V3).
    append_kpe : array of float32, shape (nnz, D_kpe)
        Rotated part of the key, shared by all heads (size 64 there).
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : array of int32
        As in `append_paged_kv_cache`.
    ckv_cache : array, shape (pages, page_size, D_ckv)
        Pages in float32, float16 or `kv_format`, with any token stride: both caches may be slices
        of one array (pages, page_size, D_ckv + D_kpe).
    kpe_cache : array, shape (pages, page_size, D_kpe)
        As `ckv_cache`, in the same format.
    kv_format : str, optional
        One name, as in `append_paged_kv_cache`, for both caches, whose last axes then have
        ``row_length`` elements.

    Raises
    ------
    UsageError, TypeError
        As `append_paged_kv_cache`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kv_cache import append_paged_mla_kv_cache
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> both = np.zeros((1, 2, 3), np.float32)  # one page of 2 tokens, 2 + 1 numbers each
    >>> row = np.array([[1, 2]], np.float32)
    >>> append_paged_mla_kv_cache(
    ...     row, row[:, :1], ints(0), ints(1), both[..., :2], both[..., 2:], ints(0), ints(0, 1),
    ...     ints(2)
    ... )
    >>> both[0, 1]
    array([1., 2., 1.], dtype=float32)
    """
    check_array("append_ckv", append_ckv, (None, None), rows=True)
    T = append_ckv.shape[0]
    check_array("append_kpe", append_kpe, (T, None), rows=True)
    sizes = (append_ckv.shape[1], append_kpe.shape[1])
    format = check_mla_cache(ckv_cache, kpe_cache, None, sizes, kv_format)
    n_pages, page_size = ckv_cache.shape[:2]
    tables = (kv_indices, kv_indptr, kv_last_page_len)
    check_tables(batch_indices, positions, T, tables, page_size, n_pages)
    variant = cuda if is_cuda(append_ckv) else cpu
    variant.append_paged_kv_cache(  # one head, whose key and value sizes differ
        append_ckv[:, None], append_kpe[:, None], batch_indices, positions, ckv_cache[:, :, None],
        kpe_cache[:, :, None], kv_indices, kv_indptr, "NHD", (format.kind, format.kind),
    )  # fmt: skip


def gather_paged_kv_cache(
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    head_dim: int | None = None,
    kv_format: str | None = None,
    dtype: str = "float32",
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Return the decoded keys and values of all requests, concatenated.

    Parameters
    ----------
    paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout, kv_format
        The cache and its page table, as in `append_paged_kv_cache`.
    head_dim : int, optional
        D; needed for block formats with a padded last block, else derived from the cache.
    dtype : {"float32", "float16"}
        dtype of the result.
    out : pair of arrays, shape (N, G, D) each, optional
        Output arrays of keys and values, of type `dtype`.

    Returns
    -------
    keys, values : array, shape (N, G, D)
        Tokens in request order; N is the sum of `get_seq_lens`.

    Raises
    ------
    UsageError, TypeError
        If the arrays do not fit each other, as in `append_paged_kv_cache`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kv_cache import gather_paged_kv_cache
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> pages = np.arange(4, dtype=np.float32).reshape(2, 2, 1, 1)  # 2 pages of 2 tokens
    >>> keys, values = gather_paged_kv_cache((pages, -pages), ints(1, 0), ints(0, 2), ints(1))
    >>> keys.ravel(), values.ravel()  # page 1, then one token of page 0
    (array([2., 3., 0.], dtype=float32), array([-2., -3., -0.], dtype=float32))
    """
    check_layout(kv_layout)
    if dtype not in OUT_DTYPES:
        raise unknown_name("dtype", dtype, OUT_DTYPES)
    k, v, D = _check_gathered(paged_kv_cache, kv_layout, head_dim, kv_format)
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    page_size, G = k.shape[token], k.shape[head]
    kv_indices, kv_indptr, kv_last_page_len = map(
        on_host, (kv_indices, kv_indptr, kv_last_page_len)
    )
    check_page_table(kv_indptr, kv_indices, kv_last_page_len, page_size)
    check_range(PAGE_NUMBERS, kv_indices[: kv_indptr[-1]], k.shape[0])
    lens = count_tokens(kv_indptr, kv_last_page_len, page_size)
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=indptr[1:])
    rows = get_batch_indices_positions(indptr, lens, int(indptr[-1]))
    shape = (int(indptr[-1]), G, D)
    if out is None:
        out = (empty(k, shape, np.dtype(dtype)), empty(k, shape, np.dtype(dtype)))
    for name, array in zip(("out (keys)", "out (values)"), out, strict=True):
        check_array(name, array, shape, np.dtype(dtype))
    kinds = kinds_of(k, v, kv_format)
    variant = cuda if is_cuda(k) else cpu
    variant.gather_paged_kv_cache(k, v, *rows, kv_indices, kv_indptr, kv_layout, kinds, *out)
    return out


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Return the number of tokens of each request.

    Parameters
    ----------
    kv_indptr, kv_last_page_len : array of int32, shapes (B + 1,) and (B,)
        The page table, as in `append_paged_kv_cache`.
    page_size : int
        Tokens per page.

    Returns
    -------
    array of int32, shape (B,)
        ``(pages - 1) * page_size + last_page_len``.

    Raises
    ------
    UsageError, TypeError
        If the arrays are not a page table of this page size.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kv_cache import get_seq_lens
    >>> get_seq_lens(np.array([0, 2, 3], np.int32), np.array([1, 4], np.int32), 4)
    array([5, 4], dtype=int32)
    """
    indptr, last = on_host(kv_indptr), on_host(kv_last_page_len)
    check_page_table(indptr, None, last, page_size)
    lens = count_tokens(indptr, last, page_size)
    return on_device(np.asarray(lens), kv_indptr) if is_cuda(kv_indptr) else lens


def get_batch_indices_positions(
    append_indptr: Any,
    seq_lens: Any,
    nnz: int,
    batch_indices: Any = None,
    positions: Any = None,
) -> tuple[Any, Any]:
    """Return the request and the position of every appended row.

    Parameters
    ----------
    append_indptr : array of int32, shape (B + 1,)
        New rows of request b are ``append_indptr[b]:append_indptr[b + 1]``.
    seq_lens : array of int32, shape (B,)
        Length of each sequence including the new rows; see `get_seq_lens`.
    nnz : int
        Number of new rows, ``append_indptr[-1]``, or more: rows of padding follow.
    batch_indices, positions : arrays of int32, shape (nnz,), optional
        Destination of the results.

    Returns
    -------
    batch_indices, positions : arrays of int32, shape (nnz,)
        The arrays given, or new ones.  The new rows of a request take its last positions.  Rows of
        padding have the request -1 and position 0.

    Raises
    ------
    UsageError, TypeError
        If `nnz` is too small, or a sequence is shorter than its new rows, or if an argument is not
        an int32 array.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kv_cache import get_batch_indices_positions
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> get_batch_indices_positions(ints(0, 1, 3), ints(10, 2), 3)
    (array([0, 1, 1], dtype=int32), array([9, 0, 1], dtype=int32))
    """
    given = append_indptr
    append_indptr, seq_lens = on_host(append_indptr), on_host(seq_lens)
    check_indptr("append_indptr", append_indptr)
    n_rows = int(append_indptr[-1])
    if nnz < n_rows:
        raise UsageError(f"nnz must be at least append_indptr[-1] = {n_rows}, got {nnz}")
    check_array("seq_lens", seq_lens, (len(append_indptr) - 1,), np.int32)
    counts = append_indptr[1:] - append_indptr[:-1]
    if (counts > seq_lens).any():
        request = int(np.flatnonzero(counts > seq_lens)[0])
        raise UsageError(
            f"seq_lens of request {request} must count its {counts[request]} new rows too, "
            f"got {seq_lens[request]}"
        )
    requests = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    start = (seq_lens - append_indptr[1:])[requests]  # position minus row number
    found = {"batch_indices": requests, "positions": start + np.arange(n_rows, dtype=np.int32)}
    if nnz > n_rows:
        for name, padding in (("batch_indices", -1), ("positions", 0)):
            rest = np.full(nnz - n_rows, padding, np.int32)
            found[name] = np.concatenate([found[name], rest])
    wanted = {"batch_indices": batch_indices, "positions": positions}
    check_together(append_indptr=given, **wanted)
    for name, out in wanted.items():
        if is_cuda(given):
            found[name] = on_device(found[name], given)
        if out is not None:
            check_array(name, out, (nnz,), np.int32)
            check_writable(name, out)
            out[...] = found[name]
            found[name] = out
    return found["batch_indices"], found["positions"]


def _check_gathered(
    paged_kv_cache: Any, kv_layout: str, head_dim: int | None, kv_format: str | None
) -> tuple[Any, Any, int]:
    """Return the checked key and value caches, and D."""
    k, _ = split_cache(paged_kv_cache)
    format = format_of(k, split_names(kv_format)[0])
    if k.ndim != 4:
        raise UsageError(f"paged_kv_cache (keys) must have 4 axes, got shape {tuple(k.shape)}")
    D = whole_blocks(format, k.shape[3]) if head_dim is None else head_dim
    G = k.shape[2 if kv_layout == "NHD" else 1]
    k, v = check_cache(paged_kv_cache, None, G, D, kv_layout, kv_format)
    return k, v, D


def _check_rotation(cos_sin: Any, interleave: bool, key: Any, positions: Any) -> None:
    """Raise unless the table of rotations, if any, fits the keys and has their positions."""
    if cos_sin is None:
        if interleave:
            raise UsageError("interleave is for cos_sin, the table of rotations: pass both")
        return
    check_array("cos_sin", cos_sin, (None, None))
    check_together(append_key=key, cos_sin=cos_sin)
    n_positions, rotary_dim = cos_sin.shape
    if rotary_dim % 2 or not 0 < rotary_dim <= key.shape[2]:
        raise UsageError(
            f"cos_sin must have an even number of columns up to the head size, {key.shape[2]}, got "
            f"{rotary_dim}"
        )
    if not is_cuda(positions) and len(positions) and positions.max() >= n_positions:
        raise UsageError(
            f"cos_sin must have a row for position {positions.max()}, got {n_positions} rows"
        )

"""RoPE, float8 encoding, and append to a paged float8 cache in one call."""

from __future__ import annotations

from typing import Any

from nbflow_kernels.arrays import check_array, empty, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.float8 import float8_format, number_of
from nbflow_kernels.kv_cache import cpu, cuda
from nbflow_kernels.kv_cache.cpu_codec import KINDS
from nbflow_kernels.kv_cache.page_table import (
    check_cache,
    check_layout,
    check_mla_cache,
    check_tables,
    full_pages,
)
from nbflow_kernels.norm import linear_norm
from nbflow_kernels.position import apply_rope_with_cos_sin_cache_inplace
from nbflow_kernels.position.rope_float8 import rope_quantize_fp8


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Any,
    k_rope: Any,
    q_nope: Any,
    k_nope: Any,
    v: Any,
    cos_sin_cache: Any,
    pos_ids: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    batch_indices: Any,
    positions: Any,
    is_neox: bool = True,
    quantize_dtype: str | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Any = None,
    q_nope_out: Any = None,
) -> tuple[Any, Any]:
    """Rotate queries and keys, encode them in float8, and append keys and values to their pages.

    Parameters
    ----------
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q
        As in `rope_quantize_fp8`.
    v : array of float32, shape (T, G, d + n); or None
        Values; None for latent attention, where `k_rope` and `k_nope` have no axis of heads.
    paged_kv_cache : pair of arrays of float8, or one array
        Keys and values as in `append_paged_kv_cache`, a key being its rotated columns, then the
        others; for latent attention the caches of `k_nope` and of `k_rope`, as in
        `append_paged_mla_kv_cache`.
    kv_indices, kv_indptr, batch_indices, positions, kv_layout
        As in `append_paged_kv_cache`.  All slots of a request's pages may be written; rows with a
        batch index of -1 are padding and are skipped.
    quant_scale_kv : float
        Positive factor of keys and values before they are encoded.
    page_size : int
        Tokens per page of the cache.
    q_rope_out, q_nope_out : arrays of float8, optional
        Output arrays of the encoded queries.

    Returns
    -------
    q_rope, q_nope : arrays of float8
        The encoded queries, as `rope_quantize_fp8` returns them.

    Raises
    ------
    UsageError, TypeError
        As `rope_quantize_fp8` and `append_paged_kv_cache`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import rope_cos_sin_cache, rope_quantize_fp8_append_paged_kv_cache
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> row, table = np.ones((1, 1, 2), np.float32), rope_cos_sin_cache(4, 2, theta=1e4)
    >>> pages = np.zeros((1, 2, 2, 1, 2), np.uint8)  # one page of 2 tokens
    >>> _ = rope_quantize_fp8_append_paged_kv_cache(
    ...     row, row, None, None, row, table, ints(0), pages, ints(0), ints(0, 1), ints(0), ints(1),
    ...     page_size=2, quantize_dtype="f8_e4m3",
    ... )
    >>> pages[0, :, 1, 0].tolist()  # the key and the value of the second token: 1.0
    [[56, 56], [56, 56]]
    """
    latent = getattr(k_rope, "ndim", 3) == 2
    if latent and v is not None:
        raise UsageError("v must be None for latent attention (k_rope of two axes)")
    outs = [out for out in (q_rope_out, q_nope_out) if out is not None]
    name = float8_format(quantize_dtype, outs[0] if outs else None, "f8_e4m3")
    no_keys = (k_rope[:, None] if latent else k_rope)[:, :0]
    q_codes, _, q_rest, _ = rope_quantize_fp8(
        q_rope, no_keys, q_nope, None, cos_sin_cache, pos_ids, is_neox, name, quant_scale_q, 1.0,
        q_rope_out, None, q_nope_out,
    )  # fmt: skip
    key = _rotated_keys(k_rope, k_nope, cos_sin_cache, pos_ids, is_neox)
    d, factor = k_rope.shape[-1], number_of("quant_scale_kv", quant_scale_kv)
    T, G, D = key.shape
    if latent:
        first, second, k, v_cache = _latent_parts(key, d, paged_kv_cache, page_size, name)
        kv_layout = "NHD"
    else:
        check_layout(kv_layout)
        check_array("v", v, (T, G, None), rows=True)
        k, v_cache = check_cache(
            paged_kv_cache, page_size, G, D, kv_layout, name, D_value=v.shape[2]
        )
        first, second = key, v
    tables = (kv_indices, kv_indptr, full_pages(kv_indptr, page_size))
    check_tables(batch_indices, positions, T, tables, page_size, k.shape[0])
    if factor != 1.0:
        first, second = linear_norm(first, factor), linear_norm(second, factor)
    variant = cuda if is_cuda(key) else cpu
    variant.append_paged_kv_cache(
        first, second, batch_indices, positions, k, v_cache, kv_indices, kv_indptr, kv_layout,
        (KINDS[name], KINDS[name]),
    )  # fmt: skip
    return q_codes, q_rest


def _rotated_keys(k_rope: Any, k_nope: Any, cos_sin: Any, pos_ids: Any, is_neox: bool) -> Any:
    """Return a new array (T, G, d + n) of the rotated columns of keys, then the others."""
    if k_rope.ndim == 2:
        k_rope, k_nope = k_rope[:, None], None if k_nope is None else k_nope[:, None]
    T, G, d = k_rope.shape
    n = 0 if k_nope is None else k_nope.shape[-1]
    if k_nope is not None:
        check_array("k_nope", k_nope, (T, G, n), any_stride=True)
    key = empty(k_rope, (T, G, d + n))
    key[..., :d] = k_rope
    if n:
        key[..., d:] = k_nope
    none = key[:, :0]
    apply_rope_with_cos_sin_cache_inplace(pos_ids, key, none, None, cos_sin, is_neox)
    return key


def _latent_parts(
    key: Any, d: int, caches: Any, page_size: int, name: str
) -> tuple[Any, Any, Any, Any]:
    """Return latent keys (T, 1, n), rotated ones (T, 1, d), and their caches with a head axis."""
    if not isinstance(caches, tuple | list) or len(caches) != 2:
        raise UsageError("paged_kv_cache must be a pair (ckv_cache, kpe_cache)")
    n = key.shape[2] - d
    if not n:
        raise UsageError("k_nope must have the latent columns, got None")
    ckv, kpe = caches
    check_mla_cache(ckv, kpe, page_size, (n, d), name)
    parts = empty(key, (len(key), 1, n)), empty(key, (len(key), 1, d))
    parts[0][...], parts[1][...] = key[..., d:], key[..., :d]
    return *parts, ckv[:, :, None], kpe[:, :, None]

"""NVFP4 caches: packed E2M1 codes, and E4M3 scales in a second pair of arrays (`kv_cache_sf`).

===================  ==============  ===============================================
array                row             number i
===================  ==============  ===============================================
keys, values         D / 2 bytes     bits 4 * (i % 2) of byte i / 2, an E2M1 code
`kv_cache_sf`        D / 16 bytes    byte i / 16, an E4M3 code
===================  ==============  ===============================================

number = value(code) * scale * global scale, with the values 0 0.5 1 1.5 2 3 4 6 and the negatives
(`formats.ggml.mxfp4_nvfp4`).  The global scale is the `k_scale` or `v_scale` of appends and of
`run`.  The layout is FlashInfer's; scales are not swizzled.  4.5 bits for a number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_together, check_writable, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.float8 import float8_codes, number_of
from nbflow_kernels.kv_cache import cpu_nvfp4, cuda_nvfp4
from nbflow_kernels.kv_cache.cpu_codec import KINDS
from nbflow_kernels.kv_cache.page_table import (
    check_layout,
    check_tables,
    split_cache,
)

NVFP4_KIND = len(KINDS)
"""Number of the format in attention kernels, after those of `KINDS`: its rows have two parts."""
BLOCK = 16
"""Numbers with one scale."""


def nvfp4_quantize_append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
) -> None:
    """Encode keys and values in NVFP4 and append them to their pages, in place.

    Parameters
    ----------
    append_key, append_value : array of float32, shapes (nnz, G, D) and (nnz, G, D_v)
        One row per new token, with any row stride; head sizes are multiples of 16.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As in `append_paged_kv_cache`.
    paged_kv_cache : pair of arrays of uint8, or one array
        Codes of keys and values, (pages, page_size, G, D / 2) each for ``"NHD"`` or
        (pages, G, page_size, D / 2) for ``"HND"``; or both in one 5-D array (pages, 2, ...).
    kv_cache_sf : pair of arrays of uint8 or float8_e4m3fn, or one array
        Scales, in the layout of `paged_kv_cache` with rows of D / 16.
    k_scale, v_scale : float or array of one number
        Global scales, positive: a decoded number is ``value * scale * k_scale``.  Use the largest
        magnitude of the keys (values) over 2688, or 1.0 if no scale of a block exceeds 448.

    Raises
    ------
    UsageError, TypeError
        As `append_paged_kv_cache`, or if a global scale is not positive and finite.

    Notes
    -----
    The scale of 16 numbers is the largest magnitude over ``6 * k_scale``, rounded to E4M3; codes
    are rounded to nearest, ties to even.  NaN and infinity make their block NaN.

    References
    ----------
    .. [1] NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import nvfp4_quantize_append_paged_kv_cache
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> pages, scales = np.zeros((1, 2, 2, 1, 8), np.uint8), np.zeros((1, 2, 2, 1, 1), np.uint8)
    >>> row = np.full((1, 1, 16), 6, np.float32)
    >>> nvfp4_quantize_append_paged_kv_cache(
    ...     row, -row, ints(0), ints(1), pages, scales, ints(0), ints(0, 1), ints(2), 1.0, 1.0
    ... )
    >>> pages[0, :, 1, 0, 0], scales[0, :, 1, 0, 0]  # codes 7 and 15, scales of 1.0
    (array([119, 255], dtype=uint8), array([56, 56], dtype=uint8))
    """
    caches, sizes, page_size, n_pages, numbers = _check_append(
        append_key, append_value, paged_kv_cache, kv_cache_sf, kv_layout, k_scale, v_scale
    )
    T = append_key.shape[0]
    tables = (kv_indices, kv_indptr, kv_last_page_len)
    check_tables(batch_indices, positions, T, tables, page_size, n_pages)
    rows = (batch_indices, positions, kv_indices, kv_indptr)
    _append(append_key, append_value, T, rows, None, caches, kv_layout, sizes, numbers)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Any,
    append_value: Any,
    slot_mapping: Any,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    k_scale: Any,
    v_scale: Any,
    kv_layout: str = "NHD",
) -> None:
    """Encode keys and values in NVFP4 and write them to slots of the cache, in place.

    Parameters
    ----------
    append_key, append_value : array of float32, shapes (T, G, D) and (T, G, D_v)
        Rows; those from ``len(slot_mapping)`` on are padding.
    slot_mapping : array of int32, shape (nnz,)
        ``page * page_size + token`` of each row.  Rows with a negative slot, or one beyond the
        cache, are skipped.
    paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout
        As in `nvfp4_quantize_append_paged_kv_cache`; so are the errors.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    >>> pages, scales = np.zeros((1, 2, 2, 1, 8), np.uint8), np.zeros((1, 2, 2, 1, 1), np.uint8)
    >>> rows = np.full((2, 1, 16), 6, np.float32)
    >>> nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    ...     rows, rows, np.array([-1, 1], np.int32), pages, scales, 1.0, 1.0
    ... )
    >>> scales[0, 0].ravel()  # the first row is padding
    array([ 0, 56], dtype=uint8)
    """
    caches, sizes, _, _, numbers = _check_append(
        append_key, append_value, paged_kv_cache, kv_cache_sf, kv_layout, k_scale, v_scale
    )
    check_array("slot_mapping", slot_mapping, (None,), np.int32)
    n = len(slot_mapping)
    if n > len(append_key):
        raise UsageError(
            f"slot_mapping must have at most a slot per row, {len(append_key)}, got {n}"
        )
    _append(append_key, append_value, n, None, slot_mapping, caches, kv_layout, sizes, numbers)


def _check_append(
    key: Any, value: Any, paged_kv_cache: Any, kv_cache_sf: Any, kv_layout: str, k_scale: Any,
    v_scale: Any,
) -> Any:  # fmt: skip
    """Return the checked arrays of a cache, head sizes, page size, pages and global scales."""
    check_layout(kv_layout)
    check_array("append_key", key, (None, None, None), rows=True)
    T, G, D = key.shape
    check_array("append_value", value, (T, G, None), rows=True)
    sizes = (D, value.shape[2])
    caches = check_nvfp4_cache(paged_kv_cache, kv_cache_sf, None, G, sizes, kv_layout)
    for name, array in zip(("paged_kv_cache",) * 2 + ("kv_cache_sf",) * 2, caches, strict=True):
        check_writable(name, array)
    if is_cuda(key) != is_cuda(caches[0]):
        check_together(append_key=key, paged_kv_cache=caches[0])
    numbers = tuple(
        np.float32(number_of(name, scale, "a positive finite global decode scale"))
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    )
    page_size = caches[0].shape[1 if kv_layout == "NHD" else 2]
    return caches, sizes, page_size, len(caches[0]), numbers


def _append(
    key: Any, value: Any, n: int, rows: Any, slots: Any, caches: Any, kv_layout: str,
    sizes: tuple[int, int], numbers: Any,
) -> None:  # fmt: skip
    """Encode the first n rows of keys and of values."""
    variant = cuda_nvfp4 if is_cuda(key) else cpu_nvfp4
    for i, x in enumerate((key, value)):
        if n and x.size:
            variant.append(x[:n], rows, slots, caches[i], caches[2 + i], kv_layout, numbers[i])


def check_nvfp4_cache(
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    page_size: int | None,
    G: int,
    sizes: tuple[int, int],
    kv_layout: str,
) -> tuple[Any, Any, Any, Any]:
    """Return the checked codes of keys and values, and their scales as uint8; any strides."""
    codes, scales = split_cache(paged_kv_cache), split_cache(kv_cache_sf, "kv_cache_sf")
    found = []
    for name, arrays, divisor in (
        ("paged_kv_cache", codes, 2), ("kv_cache_sf", scales, BLOCK)
    ):  # fmt: skip
        for part, array, D in zip(("keys", "values"), arrays, sizes, strict=True):
            if D % BLOCK:
                raise UsageError(f"NVFP4 needs head sizes that are multiples of {BLOCK}, got {D}")
            inner = (page_size, G) if kv_layout == "NHD" else (G, page_size)
            wanted = (None, *inner, D // divisor)
            found.append(float8_codes(f"{name} ({part})", array, wanted, any_stride=True))
    if any(array.shape[:3] != found[0].shape[:3] for array in found):
        shapes = ", ".join(str(array.shape[:3]) for array in found)
        raise UsageError(f"codes and scales must have the same pages, got {shapes}")
    return found[0], found[1], found[2], found[3]


def nvfp4_cache(
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    page_size: int,
    heads: tuple[int, int, int, int],
    kv_layout: str,
    kv_format: str | None,
) -> tuple[Any, Any, tuple[int, int], tuple[Any, Any]]:
    """Return checked keys and values, their kinds, and the scales; `heads` is (H, G, D, D_v)."""
    if kv_format is not None:
        raise UsageError(f"kv_cache_sf is for NVFP4 caches, got kv_format={kv_format!r} too")
    _, G, D_qk, D_vo = heads
    k, v, *scales = check_nvfp4_cache(
        paged_kv_cache, kv_cache_sf, page_size, G, (D_qk, D_vo), kv_layout
    )
    return k, v, (NVFP4_KIND, NVFP4_KIND), (scales[0], scales[1])


def nvfp4_rows(
    rows: tuple[Any, Any],
    kv_cache_sf: Any,
    n: int | None,
    G: int | None,
    sizes: tuple[int, int],
    kv_layout: str,
    kv_format: str | None,
) -> tuple[Any, Any, tuple[int, int], tuple[Any, Any]]:
    """Return checked keys and values of rows (n, G, D / 2) or heads first, kinds, and scales."""
    if kv_format is not None:
        raise UsageError(f"kv_cache_sf is for NVFP4 caches, got kv_format={kv_format!r} too")
    if not isinstance(kv_cache_sf, tuple | list) or len(kv_cache_sf) != 2:
        raise UsageError("kv_cache_sf must be a pair of the scales of keys and of values")
    found: list[Any] = []
    for part, codes, scales, D in zip("kv", rows, kv_cache_sf, sizes, strict=True):
        if D % BLOCK:
            raise UsageError(f"NVFP4 needs head sizes that are multiples of {BLOCK}, got {D}")
        shape = (n, G) if kv_layout == "NHD" else (G, n)
        codes = float8_codes(part, codes, (*shape, D // 2), any_stride=True)
        name, shape = f"kv_cache_sf ({part})", codes.shape[:2]
        found += [codes, float8_codes(name, scales, (*shape, D // BLOCK), any_stride=True)]
    return found[0], found[2], (NVFP4_KIND, NVFP4_KIND), (found[1], found[3])

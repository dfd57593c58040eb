"""RoPE whose results are float8 codes: rotation, a factor, one rounding, without a float32 copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import (
    check_array,
    check_range,
    check_writable,
    empty,
    is_cuda,
)
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.float8 import (
    FLOAT8,
    Float8Codec,
    float8_codes,
    float8_format,
    number_of,
)
from nbflow_kernels.position import cpu_float8, cuda


def rope_quantize_fp8(
    q_rope: Any,
    k_rope: Any,
    q_nope: Any,
    k_nope: Any,
    cos_sin_cache: Any,
    pos_ids: Any,
    is_neox: bool = True,
    quantize_dtype: str | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Any = None,
    k_rope_out: Any = None,
    q_nope_out: Any = None,
    k_nope_out: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Rotate queries and keys, and encode them and their unrotated columns in float8.

    Parameters
    ----------
    q_rope, k_rope : array of float32, shapes (T, H, d) and (T, G, d), or (T, d) for one key head
        Columns that are rotated, with any strides of rows and heads.
    q_nope, k_nope : array of float32, shapes (T, H, n) and (T, G, n) or (T, n); or None
        Columns that are not rotated; None for none.
    cos_sin_cache : array of float32, shape (max_pos, d)
        Cosines, then sines; see `rope_cos_sin_cache`.
    pos_ids : array of int32, shape (T,)
        Row of `cos_sin_cache` for each token.
    is_neox : bool
        True rotates the pairs (j, j + d/2), False the pairs (2j, 2j + 1).
    quantize_dtype : {"f8_e4m3", "f8_e5m2"}, optional
        Format of the results; by default that of the outputs' dtype, else ``f8_e4m3``.
    quant_scale_q, quant_scale_kv : float
        Positive factors of queries and of keys before they are encoded.
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : arrays of float8, optional
        Output arrays of the inputs' shapes, uint8 or of a float8 dtype, with any strides of rows
        and heads.

    Returns
    -------
    q_rope, k_rope, q_nope, k_nope : arrays of float8
        The output arrays, or new ones of uint8 codes (0 columns where the input is None).

    Raises
    ------
    UsageError, TypeError
        If shapes do not fit, a position is not in the cache, or the format is unknown.

    Notes
    -----
    Numbers are rounded to nearest even; beyond the largest number they become the largest one.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import rope_cos_sin_cache, rope_quantize_fp8
    >>> q, k = np.ones((1, 1, 2), np.float32), np.zeros((1, 2), np.float32)
    >>> cache, at = rope_cos_sin_cache(4, 2, theta=1e4), np.array([0], np.int32)
    >>> codes, _, _, _ = rope_quantize_fp8(q, k, None, None, cache, at, quant_scale_q=4.0)
    >>> codes  # of 4
    array([[[72, 72]]], dtype=uint8)
    """
    T, H, d = _check_rope(q_rope, k_rope, cos_sin_cache, pos_ids)
    outs = {
        "q_rope_out": q_rope_out, "k_rope_out": k_rope_out,
        "q_nope_out": q_nope_out, "k_nope_out": k_nope_out,
    }  # fmt: skip
    name = quantize_dtype
    for out in outs.values():
        if out is not None:
            name = float8_format(name, out, "f8_e4m3")
    type = FLOAT8[float8_format(name, None, "f8_e4m3")]
    scales = {
        "q": float(np.float32(number_of("quant_scale_q", quant_scale_q))),
        "k": float(np.float32(number_of("quant_scale_kv", quant_scale_kv))),
    }
    heads = {"q": (T, H), "k": k_rope.shape[:-1]}
    results = []
    parts = (q_rope, k_rope, q_nope, k_nope)
    for (out_name, out), x in zip(outs.items(), parts, strict=True):
        shape = (*heads[out_name[0]], d)
        rotation = (pos_ids, cos_sin_cache, is_neox)
        if "nope" in out_name:
            n = 0 if x is None else x.shape[-1]
            shape, rotation = (*shape[:-1], n), (None, None, True)
            if x is not None:
                check_array(out_name.removesuffix("_out"), x, shape, any_stride=True)
        found = empty(q_rope, shape, np.uint8) if out is None else out
        codes = float8_codes(out_name, found, shape, any_stride=True)
        check_writable(out_name, codes)
        if n_numbers := int(np.prod(shape)):
            codec = Float8Codec(type, scales[out_name[0]])
            encode = cuda.encode_heads if is_cuda(x) else cpu_float8.encode_heads
            encode(_three_axes(x), *rotation, codec, _three_axes(codes), n_numbers)
        results.append(found)
    return results[0], results[1], results[2], results[3]


def _check_rope(q: Any, k: Any, cos_sin: Any, pos_ids: Any) -> tuple[int, int, int]:
    """Raise unless the rotated columns fit the table and the positions; return T, H and d."""
    check_array("q_rope", q, (None, None, None), any_stride=True)
    T, H, d = q.shape
    shape = (T, d) if getattr(k, "ndim", 3) == 2 else (T, None, d)
    check_array("k_rope", k, shape, any_stride=True)
    check_array("cos_sin_cache", cos_sin, (None, d))
    check_array("pos_ids", pos_ids, (T,), np.int32)
    if d % 2:
        raise UsageError(f"q_rope must have an even number of columns, got {d}")
    if not is_cuda(pos_ids):
        check_range("pos_ids must be {}, the rows of cos_sin_cache", pos_ids, len(cos_sin))
    return T, H, d


def _three_axes(x: Any) -> Any:
    """Return rows of one head (T, n) as (T, 1, n)."""
    return x[:, None] if x.ndim == 2 else x

"""Reference position embeddings in NumPy float64, pair by pair, head by head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbflow_kernels.formats.float8 import encode_float8
from nbflow_kernels.position.rope_scaling import (
    DynamicNtkRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    YarnRopeScaling,
)


def rope_frequencies(
    rotary_dim: int, *, theta: float, scaling: Any = None, seq_len: int | None = None
) -> tuple[np.ndarray, float]:
    """See `nbflow_kernels.rope_frequencies`."""
    length = seq_len or 0
    if isinstance(scaling, DynamicNtkRopeScaling) and length > scaling.original_max_position:
        stretch = scaling.factor * length / scaling.original_max_position - scaling.factor + 1.0
        theta = theta * stretch ** (rotary_dim / (rotary_dim - 2))
    frequencies = [
        _stretch(theta ** (-2.0 * j / rotary_dim), j, rotary_dim, theta, scaling, length)
        for j in range(rotary_dim // 2)
    ]
    return np.array(frequencies), _attention_factor(scaling, length)


def _stretch(w: float, j: int, d: int, theta: float, scaling: Any, length: int) -> float:
    """Return frequency w of pair j after scaling."""
    if isinstance(scaling, LinearRopeScaling):
        return w / scaling.factor
    if isinstance(scaling, ProportionalRopeScaling):
        n_rotated = math.floor(scaling.partial_rotary_factor * d / 2.0)
        return w / scaling.factor if j < n_rotated else 0.0
    if isinstance(scaling, LongRopeScaling):
        is_long = length > scaling.original_max_position
        return w / (scaling.long_factor if is_long else scaling.short_factor)[j]
    if isinstance(scaling, Llama3RopeScaling):
        wavelength = 2.0 * math.pi / w
        if wavelength > scaling.original_max_position / scaling.low_freq_factor:
            return w / scaling.factor
        if wavelength < scaling.original_max_position / scaling.high_freq_factor:
            return w
        smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
        smooth /= scaling.high_freq_factor - scaling.low_freq_factor
        return (1.0 - smooth) * w / scaling.factor + smooth * w
    if isinstance(scaling, YarnRopeScaling):
        # real-valued index of the pair with beta turns over the trained length
        period = scaling.original_max_position / (2.0 * math.pi)
        low, high = (
            d * math.log(period / beta) / 2.0 / math.log(theta)
            for beta in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp = min(max((j - low) / ((high - low) or 0.001), 0.0), 1.0)
        return ramp * w / scaling.factor + (1.0 - ramp) * w
    return w


def _attention_factor(scaling: Any, length: int) -> float:
    given = getattr(scaling, "attention_factor", None)
    if isinstance(scaling, LongRopeScaling):
        is_long = length > scaling.original_max_position
        mscale = scaling.long_mscale if is_long else scaling.short_mscale
        given = given if mscale is None else mscale
    if given is not None:
        return float(given)
    if isinstance(scaling, LongRopeScaling) and scaling.factor > 1.0:
        return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_max_position))
    if isinstance(scaling, YarnRopeScaling) and scaling.factor > 1.0:
        growth = 0.1 * math.log(scaling.factor)
        if scaling.mscale and scaling.mscale_all_dim:
            return (growth * scaling.mscale + 1.0) / (growth * scaling.mscale_all_dim + 1.0)
        return growth + 1.0
    return 1.0


def rope_cos_sin_cache(
    max_pos: int,
    rotary_dim: int,
    *,
    theta: float,
    scale: float = 1.0,
    scaling: Any = None,
    seq_len: int | None = None,
) -> np.ndarray:
    """See `nbflow_kernels.rope_cos_sin_cache`."""
    length = max_pos if seq_len is None else seq_len
    frequencies, factor = rope_frequencies(rotary_dim, theta=theta, scaling=scaling, seq_len=length)
    cache = np.empty((max_pos, rotary_dim), np.float64)
    for j in range(rotary_dim // 2):
        angles = np.arange(max_pos) / scale * frequencies[j]
        cache[:, j] = factor * np.cos(angles)
        cache[:, rotary_dim // 2 + j] = factor * np.sin(angles)
    return cache


def _rotate(x: np.ndarray, cos_sin: np.ndarray, halves: bool) -> np.ndarray:
    """Rotate (T, H, D) rows by cosines and sines (T, rotary_dim)."""
    y = x.astype(np.float64)
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a = slice(0, half) if halves else slice(0, 2 * half, 2)
    b = slice(half, 2 * half) if halves else slice(1, 2 * half, 2)
    first, second = y[..., a].copy(), y[..., b].copy()
    y[..., a] = first * cos - second * sin
    y[..., b] = second * cos + first * sin
    return y


def apply_rope_with_cos_sin_cache(
    positions: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    head_size: int | None = None,
    cos_sin_cache: Any = None,
    is_neox: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache`."""
    cos_sin = cos_sin_cache.astype(np.float64)[positions]
    rotated = []
    for x in (query, key):
        size = x.shape[-1] if head_size is None else head_size
        heads = x.reshape(len(x), x[:1].size // size if len(x) else 1, size)
        rotated.append(_rotate(heads, cos_sin, is_neox).reshape(x.shape))
    return rotated[0], rotated[1]


def rope_quantize_fp8(
    q_rope: np.ndarray,
    k_rope: np.ndarray,
    q_nope: Any,
    k_nope: Any,
    cos_sin_cache: np.ndarray,
    pos_ids: np.ndarray,
    is_neox: bool = True,
    quantize_dtype: str = "f8_e4m3",
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Any = None,
    k_rope_out: Any = None,
    q_nope_out: Any = None,
    k_nope_out: Any = None,
) -> tuple[Any, ...]:
    """See `nbflow_kernels.rope_quantize_fp8`."""
    parts = [
        _rotate(x if x.ndim == 3 else x[:, None], cos_sin_cache[pos_ids], is_neox).reshape(x.shape)
        for x in (q_rope, k_rope)
    ]
    parts += [x[..., :0] if y is None else y for x, y in zip(parts, (q_nope, k_nope), strict=True)]
    found = []
    outs = (q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    for x, scale, out in zip(parts, 2 * (quant_scale_q, quant_scale_kv), outs, strict=True):
        codes = encode_float8(x * scale, quantize_dtype)
        if out is not None:
            out[...] = codes
        found.append(codes if out is None else out)
    return tuple(found)


def apply_rope_with_cos_sin_cache_inplace(
    positions: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    head_size: int | None = None,
    cos_sin_cache: Any = None,
    is_neox: bool = True,
) -> None:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache_inplace`."""
    query[...], key[...] = apply_rope_with_cos_sin_cache(
        positions, query, key, head_size, cos_sin_cache, is_neox
    )


def apply_rope_pos_ids(
    q: np.ndarray,
    k: np.ndarray,
    pos_ids: np.ndarray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.apply_rope_pos_ids`."""
    scaling = LinearRopeScaling(factor=rope_scale)
    return _turn(q, k, pos_ids, rotary_dim, interleave, rope_theta, scaling)


def apply_llama31_rope_pos_ids(
    q: np.ndarray,
    k: np.ndarray,
    pos_ids: np.ndarray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8.0,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int = 8192,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.apply_llama31_rope_pos_ids`."""
    scaling = Llama3RopeScaling(
        factor=rope_scale,
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        original_max_position=old_context_len,
    )
    return _turn(q, k, pos_ids, rotary_dim, interleave, rope_theta, scaling)


def _turn(
    q: np.ndarray,
    k: np.ndarray,
    pos_ids: np.ndarray,
    rotary_dim: int | None,
    interleave: bool,
    theta: float,
    scaling: Any,
) -> tuple[np.ndarray, np.ndarray]:
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    steps = np.abs(pos_ids)
    n = int(steps.max(initial=0)) + 1
    cache = rope_cos_sin_cache(n, width, theta=theta, scaling=scaling)[steps]
    cache[:, width // 2 :] *= np.where(pos_ids < 0, -1.0, 1.0)[:, None]
    return _rotate(q, cache, not interleave), _rotate(k, cache, not interleave)


def _positions(indptr: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the position of each row of requests that start at `offsets`."""
    runs = [
        offset + np.arange(b - a)
        for a, b, offset in zip(indptr[:-1], indptr[1:], offsets, strict=True)
    ]
    return np.concatenate([*runs, np.zeros(0, np.int64)]).astype(np.int64)


def _ragged(function: Any) -> Any:
    """Return the function for ragged rows, with `indptr` and `offsets` instead of `pos_ids`."""

    def apply(q: Any, k: Any, indptr: Any, offsets: Any, **options: Any) -> Any:
        return function(q, k, _positions(indptr, offsets), **options)

    return apply


def _in_place(function: Any) -> Any:
    """Return the function that writes the results to `q` and `k`."""

    def apply(q: Any, k: Any, **options: Any) -> None:
        q[...], k[...] = function(q, k, **options)

    return apply


apply_rope = _ragged(apply_rope_pos_ids)
apply_llama31_rope = _ragged(apply_llama31_rope_pos_ids)
apply_rope_pos_ids_inplace = _in_place(apply_rope_pos_ids)
apply_llama31_rope_pos_ids_inplace = _in_place(apply_llama31_rope_pos_ids)
apply_rope_inplace = _in_place(apply_rope)
apply_llama31_rope_inplace = _in_place(apply_llama31_rope)


def apply_attention_temperature_inplace(
    positions: np.ndarray, query: np.ndarray, *, scale: float, floor: int, offset: int = 0
) -> None:
    """See `nbflow_kernels.apply_attention_temperature_inplace`."""
    for t, position in enumerate(positions):
        query[t] *= 1.0 + scale * math.log(1 + (int(position) + offset) // floor)


def alibi_slopes(n_heads: int) -> np.ndarray:
    """See `nbflow_kernels.alibi_slopes`; the recursion of the authors' code."""
    n = 2 ** math.floor(math.log2(n_heads))
    slopes = np.array([2.0 ** (-8.0 / n * (h + 1)) for h in range(n)])
    if n == n_heads:
        return slopes
    return np.concatenate([slopes, alibi_slopes(2 * n)[0::2][: n_heads - n]])


def alibi_bias(
    slopes: np.ndarray, n_queries: int, n_keys: int, *, symmetric: bool = False
) -> np.ndarray:
    """See `nbflow_kernels.alibi_bias`."""
    bias = np.empty((len(slopes), n_queries, n_keys))
    for i in range(n_queries):
        distance = np.arange(n_keys) - (i + n_keys - n_queries)
        bias[:, i] = np.outer(slopes, -np.abs(distance) if symmetric else distance)
    return bias


def relative_position_bucket(
    relative_position: np.ndarray,
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> np.ndarray:
    """See `nbflow_kernels.relative_position_bucket`."""
    n = num_buckets // 2 if bidirectional else num_buckets

    def bucket(distance: int) -> int:
        base = n if bidirectional and distance > 0 else 0
        r = abs(distance) if bidirectional else max(-distance, 0)
        near = n // 2
        if r < near:
            return base + r
        share = math.log(r / near) / math.log(max_distance / near)
        return base + min(n - 1, near + math.floor(share * (n - near)))

    flat = [bucket(int(distance)) for distance in relative_position.ravel()]
    return np.array(flat, np.int32).reshape(relative_position.shape)


def relative_position_bias(
    table: np.ndarray,
    n_queries: int,
    n_keys: int,
    *,
    bidirectional: bool,
    max_distance: int = 128,
) -> np.ndarray:
    """See `nbflow_kernels.relative_position_bias`."""
    distance = np.arange(n_keys) - np.arange(n_keys - n_queries, n_keys)[:, None]
    buckets = relative_position_bucket(
        distance, bidirectional=bidirectional, num_buckets=len(table), max_distance=max_distance
    )
    return np.asarray(np.moveaxis(table[buckets], 2, 0), np.float64)


def sinusoidal_position_embedding(
    positions: np.ndarray,
    dim: int,
    *,
    form: str = "fairseq",
    interleave: bool | None = None,
    base: float = 1e4,
    offset: int = 0,
    padding_idx: int | None = None,
) -> np.ndarray:
    """See `nbflow_kernels.sinusoidal_position_embedding`."""
    alternate = form == "paper" if interleave is None else interleave
    half = dim // 2
    table = np.zeros((len(positions), dim))
    for t, p in enumerate(positions.astype(np.int64) + offset):
        if p == padding_idx:
            continue
        for c in range(half):
            angle = p * base ** (-c / (half - 1) if form == "fairseq" else -2.0 * c / dim)
            table[t, 2 * c if alternate else c] = math.sin(angle)
            table[t, 2 * c + 1 if alternate else half + c] = math.cos(angle)
    return table


def add_learned_positions(
    x: np.ndarray, positions: np.ndarray, table: np.ndarray, *, offset: int = 0
) -> np.ndarray:
    """See `nbflow_kernels.add_learned_positions`."""
    if table.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        table = (table.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(x + table.astype(np.float64)[positions + offset])


def rotate_pairs(keys: np.ndarray, cos_sin: np.ndarray, interleave: bool) -> np.ndarray:
    """Return keys (T, G, D) rotated by a row of a table each, float64.

    `cos_sin` (T, rotary_dim) has cosines, then sines; pairs are neighbours with `interleave`.
    """
    half = cos_sin.shape[1] // 2
    first = np.arange(0, 2 * half, 2) if interleave else np.arange(half)
    second = first + (1 if interleave else half)
    cos, sin = (part[:, None].astype(np.float64) for part in np.split(cos_sin, 2, axis=1))
    rotated = keys.astype(np.float64)
    x, y = rotated[..., first], rotated[..., second]
    rotated[..., first], rotated[..., second] = x * cos - y * sin, y * cos + x * sin
    return rotated

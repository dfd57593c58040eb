"""Reference attention in NumPy float64, with the full score matrix."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from nbflow_kernels.attention.variants import with_position
from nbflow_kernels.kv_cache.formats import split_names
from nbflow_kernels.kv_cache.reference import decode, decode_nvfp4
from nbflow_kernels.position.reference import alibi_slopes, rotate_pairs
from nbflow_kernels.quantized_matmul.reference import int8_values


def single_prefill_with_kv_cache(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
) -> Any:
    """See `nbflow_kernels.single_prefill_with_kv_cache`; the result is float64."""
    return attend(q, k, v, **options)


def attend_with_int8_scores(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    """Return `attend` of queries rounded to int8, in blocks of 32, after the factor of scores."""
    factor = np.float32(options.pop("sm_scale", None) or 1 / np.sqrt(q.shape[-1]))
    rounded = int8_values((q.astype(np.float32) * factor).reshape(-1, q.shape[-1]))
    return attend(rounded.reshape(q.shape), k, v, sm_scale=1.0, **options)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: np.ndarray | None = None,
    packed_custom_mask: np.ndarray | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: np.ndarray | None = None,
    kv_format: str | None = None,
    variant: Any = None,
    lse_base: str = "2",
    attention_chunk: int = 0,
    key_cos_sin: np.ndarray | None = None,
    key_interleave: bool = False,
    key_bias: np.ndarray | None = None,
    kv_cache_sf: Any = None,
    bias: np.ndarray | None = None,
) -> Any:
    """See `nbflow_kernels.single_prefill_with_kv_cache`; adds `bias` (H, T, n) to the scores."""
    T, H, D = q.shape
    names, q = split_names(kv_format), q.astype(np.float64)
    if kv_cache_sf is None:
        k, v = _decode(k, names[0], D), _decode(v, names[1], None)
    else:
        k, v = map(decode_nvfp4, (k, v), kv_cache_sf)
    if kv_layout == "HND":
        k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    n, G, _ = k.shape
    q = q * _per_head(scale_q)
    if key_bias is not None:
        k = k + key_bias
    if key_cos_sin is not None:
        k = rotate_pairs(k, key_cos_sin[:n], key_interleave)
    k = k * _per_head(scale_k) * (1.0 if k_scale is None else k_scale)
    v = v * _per_head(scale_v) * (1.0 if v_scale is None else v_scale)
    position = np.arange(T) + n - T  # row T - 1 is at the last key
    if pos_encoding_mode == "ROPE_LLAMA":
        q, k = (
            rotate(x, p, 1.0 if rope_scale is None else rope_scale, rope_theta or 1e4)
            for x, p in ((q, np.maximum(position, 0)), (k, np.arange(n)))
        )
    k, v = (np.repeat(a, H // G, axis=1) for a in (k, v))  # (n, H, D)
    scores = np.einsum("thd,nhd->thn", q, k) * (D**-0.5 if sm_scale is None else sm_scale)
    if pos_encoding_mode == "ALIBI":
        scores += alibi_slopes(H)[:, None] * (np.arange(n) - position[:, None, None])
    if bias is not None:
        scores += bias.transpose(1, 0, 2)
    if logits_soft_cap:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
    visible = see(T, n, position, causal, window_left, custom_mask, packed_custom_mask)
    if attention_chunk:
        chunk_of_row = np.maximum(position, 0)[:, None] // attention_chunk
        visible = visible & (np.arange(n) // attention_chunk == chunk_of_row)
    shown = np.repeat(visible[:, None, :], H, axis=1)
    if variant is not None:
        scores, shown = _transform(variant, scores, shown, G)
    out, natural = _mix(scores, shown, v, sinks, getattr(variant, "use_softmax", True))
    out = _transform_output(variant, out, n)
    if not return_lse:
        return out
    return out, natural if lse_base == "e" else natural / np.log(2)


def see(
    T: int,
    n: int,
    position: np.ndarray,
    causal: bool,
    window_left: int,
    custom_mask: np.ndarray | None,
    packed_custom_mask: np.ndarray | None,
) -> np.ndarray:
    """Return the mask (T, n) of visible keys."""
    visible = np.ones((T, n), bool)
    if packed_custom_mask is not None:
        bits = np.unpackbits(packed_custom_mask, bitorder="little")[: T * n]
        visible = bits.reshape(T, n) != 0
    elif custom_mask is not None:
        visible = custom_mask.reshape(T, n) != 0
    elif causal:
        visible = np.arange(n) <= position[:, None]
    if window_left >= 0:
        visible = visible & (np.arange(n) >= position[:, None] - window_left)
    return visible


def rotate(x: np.ndarray, positions: np.ndarray, scale: float, theta: float) -> np.ndarray:
    """Apply RoPE to the pairs (j, j + D / 2) of each row's heads."""
    half = x.shape[2] // 2
    angle = positions[:, None, None] / scale * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _decode(x: np.ndarray, kv_format: str | None, D: int | None) -> np.ndarray:
    """Return decoded keys or values as float64; D is the head size of padded rows."""
    return np.asarray(decode(x, kv_format, D), np.float64)


def _per_head(scale):
    """Return a factor that broadcasts to (rows, heads, D)."""
    return 1.0 if scale is None else np.asarray(scale, np.float64).reshape(-1, 1)


def _mix(
    scores: np.ndarray,
    shown: np.ndarray,
    v: np.ndarray,
    sinks: np.ndarray | None,
    use_softmax: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the softmax-weighted mean of values for scores (T, H, n), and the natural LSE."""
    if not use_softmax:
        return np.einsum("thn,nhd->thd", np.where(shown, scores, 0.0), v), scores.sum(axis=-1)
    scores = np.where(shown, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-1e300)
    if sinks is not None:
        top = np.maximum(top, sinks[None, :, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)  # (T, H, 1)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None] - top)
    out = np.einsum("thn,nhd->thd", weights / np.where(total == 0, 1, total), v)
    with np.errstate(divide="ignore"):
        return out, (top + np.log(total))[..., 0]


def _transform(
    variant: Any, scores: np.ndarray, shown: np.ndarray, G: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and mask after a variant's functions, called score by score."""
    scores, shown = scores.copy(), shown.copy()
    params, group = tuple(getattr(variant, "params", ())), scores.shape[1] // G
    mask, transform = (_hook(variant, name) for name in ("logits_mask", "logits_transform"))
    before = scores.shape[2] - len(scores)  # keys before that of the first query
    for t, h, n in np.ndindex(*scores.shape):
        where = (0, t, n, h, h // group, before + t)
        if mask is not None:
            shown[t, h, n] &= bool(mask(params, *where))
        if transform is not None:
            scores[t, h, n] = transform(params, scores[t, h, n], *where)
    return scores, shown


def _hook(variant: Any, name: str) -> Any:
    """Return a function of a variant in the form that takes `qo_pos`, or None."""
    function = getattr(variant, name, None)
    return None if function is None else with_position(name, function, function)


def _transform_output(variant: Any, out: np.ndarray, n_keys: int) -> np.ndarray:
    """Return the result after a variant's function, called element by element."""
    transform = _hook(variant, "output_transform")
    if transform is None:
        return out
    params, done = tuple(getattr(variant, "params", ())), np.empty_like(out)
    for t, h, d in np.ndindex(*out.shape):
        done[t, h, d] = transform(params, out[t, h, d], 0, t, h, n_keys - len(out) + t)
    return done


def single_decode_with_kv_cache(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    """See `nbflow_kernels.single_decode_with_kv_cache`."""
    if "q_scale" in options:
        options["scale_q"] = options.pop("q_scale")
    result = single_prefill_with_kv_cache(q[None], k, v, **options)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


def merge_states(v: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.merge_states`."""
    s = s.astype(np.float64)
    top = np.maximum(s.max(axis=1, keepdims=True), -1e300)  # finite, also where all are -inf
    weights = 2.0 ** (s - top)
    total = weights.sum(axis=1)  # (T, H)
    mixed = (weights[..., None] * v).sum(axis=1)
    with np.errstate(divide="ignore"):
        return mixed / np.where(total == 0, 1, total)[..., None], top[:, 0] + np.log2(total)


def merge_state(
    v_a: np.ndarray, s_a: np.ndarray, v_b: np.ndarray, s_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.merge_state`."""
    return merge_states(np.stack([v_a, v_b], axis=1), np.stack([s_a, s_b], axis=1))


def merge_state_in_place(
    v: np.ndarray,
    s: np.ndarray,
    v_other: np.ndarray,
    s_other: np.ndarray,
    mask: np.ndarray | None = None,
) -> None:
    """See `nbflow_kernels.merge_state_in_place`."""
    chosen = np.ones(len(v), bool) if mask is None else mask
    v_new, s_new = merge_state(v, s, v_other, s_other)
    v[chosen], s[chosen] = v_new[chosen], s_new[chosen]


class BatchPrefillWithPagedKVCacheWrapper:
    """See `nbflow_kernels.BatchPrefillWithPagedKVCacheWrapper`: one request after the other."""

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        self.kv_layout = kv_layout

    def plan(
        self,
        qo_indptr: np.ndarray,
        paged_kv_indptr: np.ndarray,
        paged_kv_indices: np.ndarray,
        paged_kv_last_page_len: np.ndarray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: np.ndarray | None = None,
        **options: Any,
    ) -> None:
        """Store the step."""
        self._rows = qo_indptr
        self._pages = [paged_kv_indices[a:b] for a, b in pairwise(paged_kv_indptr)]
        self._last = paged_kv_last_page_len
        self._page_size = page_size
        self._sizes = (head_dim_qk, head_dim_vo or head_dim_qk)
        self._names = split_names(options.pop("kv_format", None))
        self._mask = custom_mask
        self._options = options

    def _gather(self, cache: np.ndarray, request: int, name: str | None, D: int) -> np.ndarray:
        """Return the request's keys or values, (n, G, D)."""
        pages = _decode(cache[self._pages[request]], name, D)
        if self.kv_layout == "HND":
            pages = pages.transpose(0, 2, 1, 3)
        n = max(len(pages) - 1, 0) * self._page_size + self._last[request]
        tokens: np.ndarray = pages.reshape(-1, *pages.shape[2:])[:n]
        return tokens

    def run(
        self,
        q: np.ndarray,
        paged_kv_cache: Any,
        *,
        return_lse: bool = False,
        sinks: Any = None,
        key_bias: Any = None,
    ) -> Any:
        """Attend request by request."""
        if isinstance(paged_kv_cache, tuple):
            k_cache, v_cache = paged_kv_cache
        else:
            k_cache, v_cache = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
        D_qk, D_vo = self._sizes
        out, lse = np.empty((*q.shape[:2], D_vo)), np.empty(q.shape[:2])
        start = 0
        for i in range(len(self._pages)):
            rows = slice(self._rows[i], self._rows[i + 1])
            k = self._gather(k_cache, i, self._names[0], D_qk)
            v = self._gather(v_cache, i, self._names[1], D_vo)
            mask = None
            if self._mask is not None:
                size = (rows.stop - rows.start) * len(k)
                mask, start = self._mask[start : start + size], start + size
            out[rows], lse[rows] = single_prefill_with_kv_cache(
                q[rows],
                k,
                v,
                custom_mask=mask,
                return_lse=True,
                sinks=sinks,
                key_bias=key_bias,
                **self._options,
            )
        return (out, lse) if return_lse else out


def select_top_keys(
    q: np.ndarray,
    weights: np.ndarray,
    k_cache: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    *,
    top_k: int,
) -> np.ndarray:
    """See `nbflow_kernels.select_top_keys`."""
    found = np.full((len(q), top_k), -1, np.int32)
    for t, (b, position) in enumerate(zip(batch_indices, positions, strict=True)):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        keys = k_cache[pages].reshape(-1, q.shape[2])[: position + 1].astype(np.float64)
        scores = weights[t].astype(np.float64) @ np.maximum(q[t].astype(np.float64) @ keys.T, 0)
        best = np.sort(np.argsort(-scores, kind="stable")[:top_k])
        found[t, : len(best)] = best
    return found

"""Attention in NumPy float64: the whole score matrix at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np


def single_prefill_with_kv_cache(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    kv_layout: str = "NHD",
    custom_mask: np.ndarray | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """See `nbflow_kernels.single_prefill_with_kv_cache`."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    if kv_layout == "HND":
        k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    T, H, D = q.shape
    n, G, _ = k.shape
    k, v = (np.repeat(a, H // G, axis=1) for a in (k, v))  # (n, H, D)
    scores = np.einsum("thd,nhd->thn", q, k) * (D**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
    visible = np.ones((T, n), bool) if custom_mask is None else custom_mask.reshape(T, n) != 0
    position = np.arange(T)[:, None] + n - T  # row T - 1 is at the last key
    if causal:
        visible = visible & (np.arange(n) <= position)
    if window_left >= 0:
        visible = visible & (np.arange(n) >= position - window_left)
    scores = np.where(visible[:, None, :], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)  # (T, H, 1)
    out = np.einsum("thn,nhd->thd", weights / np.where(total == 0, 1, total), v)
    if not return_lse:
        return out
    with np.errstate(divide="ignore"):
        return out, ((top + np.log(total)) / np.log(2))[..., 0]


def single_decode_with_kv_cache(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    """See `nbflow_kernels.single_decode_with_kv_cache`."""
    result = single_prefill_with_kv_cache(q[None], k, v, **options)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


def merge_state(
    v_a: np.ndarray, s_a: np.ndarray, v_b: np.ndarray, s_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.merge_state`."""
    a, b = s_a.astype(np.float64), s_b.astype(np.float64)
    top = np.maximum(np.maximum(a, b), -1e300)  # finite, also where both are -inf
    weight_a, weight_b = 2.0 ** (a - top), 2.0 ** (b - top)
    total = weight_a + weight_b
    mixed = weight_a[..., None] * v_a + weight_b[..., None] * v_b
    with np.errstate(divide="ignore"):
        return mixed / np.where(total == 0, 1, total)[..., None], top + np.log2(total)


class BatchPrefillWithPagedKVCacheWrapper:
    """See `nbflow_kernels.BatchPrefillWithPagedKVCacheWrapper`: one request after the other."""

    def __init__(self, kv_layout: str = "NHD") -> None:
        self.kv_layout = kv_layout

    def plan(
        self,
        qo_indptr: np.ndarray,
        paged_kv_indptr: np.ndarray,
        paged_kv_indices: np.ndarray,
        paged_kv_last_page_len: np.ndarray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        """Remember the step."""
        self._rows = qo_indptr
        self._pages = [paged_kv_indices[a:b] for a, b in pairwise(paged_kv_indptr)]
        self._last = paged_kv_last_page_len
        self._page_size = page_size
        self._options = {"causal": True, **options}

    def _gather(self, cache: np.ndarray, request: int) -> np.ndarray:
        """Return the request's keys or values, (n, G, D)."""
        pages = cache[self._pages[request]].astype(np.float64)
        if self.kv_layout == "HND":
            pages = pages.transpose(0, 2, 1, 3)
        n = max(len(pages) - 1, 0) * self._page_size + self._last[request]
        tokens: np.ndarray = pages.reshape(-1, *pages.shape[2:])[:n]
        return tokens

    def run(self, q: np.ndarray, paged_kv_cache: Any, *, return_lse: bool = False) -> Any:
        """Attend request by request."""
        if isinstance(paged_kv_cache, tuple):
            k_cache, v_cache = paged_kv_cache
        else:
            k_cache, v_cache = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
        out, lse = np.empty(q.shape), np.empty(q.shape[:2])
        for i in range(len(self._pages)):
            rows = slice(self._rows[i], self._rows[i + 1])
            out[rows], lse[rows] = single_prefill_with_kv_cache(
                q[rows],
                self._gather(k_cache, i),
                self._gather(v_cache, i),
                return_lse=True,
                **self._options,
            )
        return (out, lse) if return_lse else out

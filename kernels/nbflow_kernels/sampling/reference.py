"""Softmax and sampling in NumPy float64, by sorting each row."""

from __future__ import annotations

from typing import Any

import numpy as np

_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return Philox4x32-10 of a counter of four and a key of two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, offset: int) -> float:
    """Return the number in [0, 1) that belongs to a seed and an offset."""
    words = philox4x32((offset & _WORD, offset >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return float(((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53)


def _streams(seed: Any, offset: Any, B: int) -> list[tuple[int, int]]:
    if np.ndim(seed) == 0 and np.ndim(offset) == 0:
        return [(int(seed), (int(offset) + i) % 2**64) for i in range(B)]
    pairs = zip(np.broadcast_to(seed, B), np.broadcast_to(offset, B), strict=True)
    return [(int(s), int(o)) for s, o in pairs]


def softmax(logits: np.ndarray, temperature: Any = None) -> np.ndarray:
    """See `nbflow_kernels.softmax`."""
    t = 1.0 if temperature is None else np.asarray(temperature, np.float64).reshape(-1, 1)
    x = logits.astype(np.float64) / t
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(axis=1, keepdims=True))
        result: np.ndarray = e / e.sum(axis=1, keepdims=True)
    return result


def argmax(logits: np.ndarray) -> np.ndarray:
    """See `nbflow_kernels.argmax`."""
    winners: np.ndarray = np.argmax(logits, axis=1).astype(np.int32)
    return winners


def _first_of_order(row: np.ndarray, n: int) -> np.ndarray:
    """Return a mask of the n largest elements, the lowest indices among equals."""
    mask = np.zeros(len(row), bool)
    mask[np.argsort(-row, kind="stable")[:n]] = True
    return mask


def _top_p_mask(row: np.ndarray, target: float) -> np.ndarray:
    """Return a mask of the fewest largest elements whose sum reaches `target`."""
    sums = np.cumsum(-np.sort(-row))
    # a sum that misses the target by rounding alone has reached it
    return _first_of_order(row, int(np.searchsorted(sums, target * (1 - 1e-13))) + 1)


def _keep(row: np.ndarray, top_k: float, top_p: float, min_p: float, k_first: bool) -> np.ndarray:
    mask = _first_of_order(row, int(min(top_k, len(row))))
    total = row[mask].sum() if k_first else row.sum()
    if top_p < 1:
        mask = mask & _top_p_mask(row, top_p * total)
    kept: np.ndarray = mask & (row >= min_p * row.max()) & (row > 0)
    return kept


def _draw(
    probs: np.ndarray,
    seed: Any,
    offset: Any,
    indices: Any,
    top_k: Any = np.inf,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    k_first: bool = True,
) -> np.ndarray:
    rows = probs.astype(np.float64)[slice(None) if indices is None else indices]
    B = len(rows)
    limits = [np.broadcast_to(limit, B) for limit in (top_k, top_p, min_p)]
    out = np.empty(B, np.int32)
    for i, (row, (s, o)) in enumerate(zip(rows, _streams(seed, offset, B), strict=True)):
        k, p, least = (float(limit[i]) for limit in limits)
        kept = np.where(_keep(row, k, p, least, k_first), row, 0.0)
        sums = np.cumsum(kept)
        out[i] = np.searchsorted(sums, uniform(s, o) * sums[-1], side="right")
    return out


def sampling_from_probs(
    probs: np.ndarray, *, seed: Any, offset: Any = 0, indices: Any = None
) -> np.ndarray:
    """See `nbflow_kernels.sampling_from_probs`."""
    return _draw(probs, seed, offset, indices)


def top_k_sampling_from_probs(
    probs: np.ndarray, top_k: Any, *, seed: Any, offset: Any = 0, indices: Any = None
) -> np.ndarray:
    """See `nbflow_kernels.top_k_sampling_from_probs`."""
    return _draw(probs, seed, offset, indices, top_k=top_k)


def top_p_sampling_from_probs(
    probs: np.ndarray, top_p: Any, *, seed: Any, offset: Any = 0, indices: Any = None
) -> np.ndarray:
    """See `nbflow_kernels.top_p_sampling_from_probs`."""
    return _draw(probs, seed, offset, indices, top_p=top_p)


def min_p_sampling_from_probs(
    probs: np.ndarray, min_p: Any, *, seed: Any, offset: Any = 0, indices: Any = None
) -> np.ndarray:
    """See `nbflow_kernels.min_p_sampling_from_probs`."""
    return _draw(probs, seed, offset, indices, min_p=min_p)


def top_k_top_p_sampling_from_probs(
    probs: np.ndarray,
    top_k: Any,
    top_p: Any,
    *,
    filter_apply_order: str = "top_k_first",
    seed: Any,
    offset: Any = 0,
    indices: Any = None,
) -> np.ndarray:
    """See `nbflow_kernels.top_k_top_p_sampling_from_probs`."""
    k_first = filter_apply_order == "top_k_first"
    return _draw(probs, seed, offset, indices, top_k=top_k, top_p=top_p, k_first=k_first)


def _renormed(probs: np.ndarray, top_k: Any, top_p: Any) -> np.ndarray:
    out = np.zeros(probs.shape)
    for i, row in enumerate(probs.astype(np.float64)):
        k, p = (float(np.broadcast_to(limit, len(probs))[i]) for limit in (top_k, top_p))
        mask = _keep(row, k, p, 0.0, False)
        out[i, mask] = row[mask] / row[mask].sum()
    return out


def top_k_renorm_probs(probs: np.ndarray, top_k: Any) -> np.ndarray:
    """See `nbflow_kernels.top_k_renorm_probs`."""
    return _renormed(probs, top_k, 1.0)


def top_p_renorm_probs(probs: np.ndarray, top_p: Any) -> np.ndarray:
    """See `nbflow_kernels.top_p_renorm_probs`."""
    return _renormed(probs, np.inf, top_p)

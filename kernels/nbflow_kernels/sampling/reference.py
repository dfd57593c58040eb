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


def uniform(seed: int, offset: int, index: int = 0) -> float:
    """Return random number `index` in [0, 1) of a seed and an offset."""
    counter = (offset & _WORD, offset >> 32, index & _WORD, index >> 32)
    words = philox4x32(counter, (seed & _WORD, seed >> 32))
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
    # tolerance for rounding of the sum
    return _first_of_order(row, int(np.searchsorted(sums, target * (1 - 1e-13))) + 1)


def _typical_mask(row: np.ndarray, typical_p: float) -> np.ndarray:
    """Return a mask of the tokens nearest to the entropy whose sum reaches `typical_p`."""
    p = row / row.sum()
    logs = np.log(np.where(p > 0, p, 1.0))
    distance = np.where(p > 0, np.abs(logs - (p * logs).sum()), np.inf)
    order = np.argsort(distance, kind="stable")
    n = int(np.searchsorted(np.cumsum(p[order]), typical_p * (1 - 1e-13))) + 1
    mask = np.zeros(len(row), bool)
    mask[order[:n]] = True
    kept: np.ndarray = mask & (p > 0)
    return kept


def _tail_free_mask(row: np.ndarray, z: float, first_counts: bool) -> np.ndarray:
    """Return a mask of the tokens before the flat tail."""
    p = -np.sort(-row) / row.sum()
    bends = np.abs(np.diff(p, 2))
    bends = bends / bends.sum() if bends.sum() > 1e-6 else np.full(len(bends), 1 / len(row))
    if not first_counts:
        bends[:1] = 0.0
    passed = np.flatnonzero(np.cumsum(bends) > z)
    return _first_of_order(row, max(int(passed[0]), 1) if len(passed) else len(row))


def _keep(
    row: np.ndarray,
    top_k: float = np.inf,
    top_p: float = 1.0,
    min_p: float = 0.0,
    filter_apply_order: str = "top_k_first",
    typical_p: float = 1.0,
    z: float = 1.0,
    first_counts: bool = True,
    floor: float = 0.0,
) -> np.ndarray:
    """Return the mask of all filters combined."""
    mask = _first_of_order(row, int(min(top_k, len(row))))
    total = row[mask].sum() if filter_apply_order == "top_k_first" else row.sum()
    if top_p < 1:
        mask = mask & _top_p_mask(row, top_p * total)
    if typical_p < 1:
        mask = mask & _typical_mask(row, typical_p)
    if z < 1:
        mask = mask & _tail_free_mask(row, z, first_counts)
    least = max(min_p * row.max(), min(floor * row.sum(), row.max()))
    kept: np.ndarray = mask & (row >= least) & (row > 0)
    return kept


def _draw(probs, seed, offset, indices, **filters):
    """Draw by inverse transform: look the random number up in the cumulative kept weights.

    Returns the tokens and their shares of the kept mass.
    """
    rows = probs.astype(np.float64)[slice(None) if indices is None else indices]
    B = len(rows)
    columns = {name: np.broadcast_to(value, B) for name, value in filters.items()}
    out, shares = np.empty(B, np.int32), np.empty(B)
    for i, (row, (s, o)) in enumerate(zip(rows, _streams(seed, offset, B), strict=True)):
        mask = _keep(row, **{name: column[i] for name, column in columns.items()})
        kept = np.where(mask, row, 0.0)
        sums = np.cumsum(kept)
        out[i] = np.searchsorted(sums, uniform(s, o) * sums[-1], side="right")
        shares[i] = kept[out[i]] / sums[-1]
    return out, shares


def sampling_from_probs(
    probs: np.ndarray, *, seed: Any, offset: Any = 0, indices: Any = None, **filters: Any
) -> np.ndarray:
    """See `nbflow_kernels.sampling_from_probs` and its forms with filters, those of `_keep`."""
    tokens: np.ndarray = _draw(probs, seed, offset, indices, **filters)[0]
    return tokens


top_k_sampling_from_probs = top_p_sampling_from_probs = sampling_from_probs
min_p_sampling_from_probs = top_k_top_p_sampling_from_probs = sampling_from_probs
typical_sampling_from_probs = tail_free_sampling_from_probs = sampling_from_probs


def mirostat_sampling_from_probs(
    probs: np.ndarray,
    mu: Any,
    *,
    tau: Any = 5.0,
    eta: Any = 0.1,
    seed: Any,
    offset: Any = 0,
    indices: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.mirostat_sampling_from_probs`."""
    floor = 2.0 ** -np.asarray(mu, np.float64)
    tokens, shares = _draw(probs, seed, offset, indices, floor=floor)
    return tokens, mu - np.asarray(eta) * (-np.log2(shares) - tau)


def sampling_from_logits(
    logits: np.ndarray,
    *,
    temperature: Any = None,
    seed: Any,
    offset: Any = 0,
    indices: Any = None,
    **filters: Any,
) -> np.ndarray:
    """See `nbflow_kernels.sampling_from_logits` and `top_k_top_p_sampling_from_logits`."""
    rows = logits[slice(None) if indices is None else indices]
    if filters.get("filter_apply_order") != "joint":
        rows = top_k_mask_logits(rows, filters.pop("top_k", np.inf))
    return sampling_from_probs(softmax(rows, temperature), seed=seed, offset=offset, **filters)


top_k_top_p_sampling_from_logits = sampling_from_logits


def top_k(
    input: np.ndarray, k: int, sorted: bool = True, deterministic: bool = False, tie_break: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.top_k`."""
    if tie_break == 2:
        order = input.shape[1] - 1 - np.argsort(-input[:, ::-1], axis=1, kind="stable")[:, :k]
    else:
        order = np.argsort(-input, axis=1, kind="stable")[:, :k]
    order = np.sort(order, axis=1)
    if sorted:
        by_value = np.argsort(-np.take_along_axis(input, order, 1), axis=1, kind="stable")
        order = np.take_along_axis(order, by_value, axis=1)
    return np.take_along_axis(input, order, axis=1), order.astype(np.int32)


def top_k_ragged_transform(
    input: np.ndarray,
    offsets: np.ndarray,
    lengths: np.ndarray,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: np.ndarray | None = None,
) -> np.ndarray:
    """See `nbflow_kernels.top_k_ragged_transform`."""
    out = np.full((len(input), k), -1, np.int32)
    for i, n in enumerate(lengths):
        first = 0 if row_starts is None else row_starts[i]
        row = input[i : i + 1, first : first + n].astype(np.float64)
        chosen = top_k(row, min(n, k), sorted=False, tie_break=tie_break)[1][0]
        out[i, : len(chosen)] = chosen + offsets[i]
    return out


def top_k_page_table_transform(
    input: np.ndarray,
    src_page_table: np.ndarray,
    lengths: np.ndarray,
    k: int,
    row_to_batch: np.ndarray | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: np.ndarray | None = None,
    page_table_row_starts: np.ndarray | None = None,
    page_size: int = 1,
    out_raw_indices: np.ndarray | None = None,
) -> np.ndarray:
    """See `nbflow_kernels.top_k_page_table_transform`."""
    zeros = np.zeros(len(input), np.int32)
    out = top_k_ragged_transform(
        input, zeros, lengths, k, tie_break=tie_break, row_starts=row_starts
    )
    if out_raw_indices is not None:
        out_raw_indices[...] = out
    firsts = row_starts if page_table_row_starts is None else page_table_row_starts
    for i, row in enumerate(out):
        table = src_page_table[i if row_to_batch is None else row_to_batch[i]]
        positions = row[row >= 0]
        pages = table[(0 if firsts is None else firsts[i]) + positions // page_size]
        row[row >= 0] = pages * page_size + positions % page_size
    return out


def top_k_mask_logits(logits: np.ndarray, top_k: Any) -> np.ndarray:
    """See `nbflow_kernels.top_k_mask_logits`."""
    counts = np.minimum(np.broadcast_to(top_k, len(logits)), logits.shape[1])
    masks = [_first_of_order(row, int(n)) for row, n in zip(logits, counts, strict=True)]
    return np.where(np.array(masks).reshape(logits.shape), logits, -np.inf)


def top_n_sigma_mask_logits(logits: np.ndarray, n: Any) -> np.ndarray:
    """See `nbflow_kernels.top_n_sigma_mask_logits`."""
    out = logits.copy()
    for row, number in zip(out, np.broadcast_to(n, len(out)), strict=True):
        finite = row[row > -np.inf]
        if number > 0 and len(finite):
            row[row < finite.max() - number * finite.std()] = -np.inf
    return out


def top_k_renorm_probs(probs: np.ndarray, **filters: Any) -> np.ndarray:
    """See `nbflow_kernels.top_k_renorm_probs` and its siblings; filters as for `_keep`."""
    out = np.zeros(probs.shape)
    columns = {name: np.broadcast_to(value, len(probs)) for name, value in filters.items()}
    for i, row in enumerate(probs.astype(np.float64)):
        own = {name: column[i] for name, column in columns.items()}
        mask = _keep(row, filter_apply_order="joint", **own)
        out[i, mask] = row[mask] / row[mask].sum()
    return out


top_p_renorm_probs = min_p_renorm_probs = top_k_renorm_probs
typical_renorm_probs = tail_free_renorm_probs = top_k_renorm_probs


def xtc_renorm_probs(
    probs: np.ndarray, probability: Any, threshold: Any, *, seed: Any, offset: Any = 0
) -> np.ndarray:
    """See `nbflow_kernels.xtc_renorm_probs`."""
    out = probs.astype(np.float64)
    B = len(out)
    chances, thresholds = (np.broadcast_to(value, B) for value in (probability, threshold))
    for i, (row, (s, o)) in enumerate(zip(out, _streams(seed, offset, B), strict=True)):
        likely = np.flatnonzero(row >= thresholds[i] * row.sum())
        if len(likely) > 1 and uniform(s, o) < chances[i]:
            row[likely[np.argsort(-row[likely], kind="stable")[:-1]]] = 0.0
        row /= row.sum()
    return out


def chain_speculative_sampling(
    draft_probs: np.ndarray,
    draft_token_ids: np.ndarray,
    target_probs: np.ndarray,
    maybe_output_accepted_token_num: Any = None,
    maybe_output_emitted_draft_token_num: Any = None,
    *,
    seed: Any,
    offset: Any = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See `nbflow_kernels.chain_speculative_sampling`."""
    B, n, _ = draft_probs.shape
    out = np.full((B, n + 1), -1, np.int32)
    accepted, emitted = np.zeros(B, np.int32), np.zeros(B, np.int32)
    for b, (s, o) in enumerate(_streams(seed, offset, B)):
        ids = draft_token_ids[b]
        p, q = draft_probs[b, np.arange(n), ids], target_probs[b, np.arange(n), ids]
        passes = np.array([uniform(s, o, i) for i in range(n)]) * p < q
        position = int(np.argmin(np.append(passes, False)))
        weights = target_probs[b, position].astype(np.float64)
        if position < n:
            excess = np.maximum(weights - draft_probs[b, position], 0.0)
            weights = excess if excess.sum() > 0 else weights
        sums = np.cumsum(weights)
        out[b, :position] = ids[:position]
        out[b, position] = np.searchsorted(sums, uniform(s, o, n) * sums[-1], side="right")
        accepted[b], emitted[b] = passes.sum(), position
    if maybe_output_accepted_token_num is not None:
        maybe_output_accepted_token_num += accepted
        accepted = maybe_output_accepted_token_num
    if maybe_output_emitted_draft_token_num is not None:
        maybe_output_emitted_draft_token_num += emitted
        emitted = maybe_output_emitted_draft_token_num
    return out, accepted, emitted

"""Logits processors in NumPy float64, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def _rows(
    logits: np.ndarray, token_ids: np.ndarray, indptr: np.ndarray, *parameters: Any
) -> Iterator[tuple[Any, ...]]:
    """Yield each row, its tokens and its parameters."""
    columns = [np.broadcast_to(parameter, len(logits)) for parameter in parameters]
    for b, row in enumerate(logits):
        tokens = token_ids[indptr[b] : indptr[b + 1]].tolist()
        yield row, tokens, *(column[b] for column in columns)


def _last(tokens: list[int], window: int) -> list[int]:
    return tokens if window < 0 else tokens[max(0, len(tokens) - window) :]


def apply_penalties(
    logits: np.ndarray,
    token_ids: np.ndarray,
    indptr: np.ndarray,
    *,
    repetition_penalty: Any = 1.0,
    frequency_penalty: Any = 0.0,
    presence_penalty: Any = 0.0,
    window: Any = -1,
    prompt_lens: Any = None,
) -> np.ndarray:
    """See `nbflow_kernels.apply_penalties`."""
    parameters = (repetition_penalty, frequency_penalty, presence_penalty, window)
    n_prompt = 0 if prompt_lens is None else prompt_lens
    for row, tokens, r, f, p, last, prompt in _rows(
        logits, token_ids, indptr, *parameters, n_prompt
    ):
        pairs = [(token, i >= prompt) for i, token in enumerate(tokens)]
        seen = pairs if last < 0 else pairs[max(0, len(pairs) - int(last)) :]
        counts = Counter(token for token, generated in seen if generated)
        for token in {token for token, _ in seen}:
            row[token] = row[token] / r if row[token] > 0 else row[token] * r
            row[token] -= f * counts[token] + p * (counts[token] > 0)
    return logits


def apply_no_repeat_ngram(
    logits: np.ndarray, token_ids: np.ndarray, indptr: np.ndarray, ngram_size: Any
) -> np.ndarray:
    """See `nbflow_kernels.apply_no_repeat_ngram`."""
    for row, tokens, size in _rows(logits, token_ids, indptr, ngram_size):
        n = int(size)
        if n and len(tokens) >= n:
            start = tokens[len(tokens) - n + 1 :]
            for i in range(len(tokens) - n + 1):
                if tokens[i : i + n - 1] == start:
                    row[tokens[i + n - 1]] = -np.inf
    return logits


def apply_dry_penalty(
    logits: np.ndarray,
    token_ids: np.ndarray,
    indptr: np.ndarray,
    *,
    multiplier: Any,
    base: Any = 1.75,
    allowed_length: Any = 2,
    window: Any = -1,
    breakers: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """See `nbflow_kernels.apply_dry_penalty`."""
    parameters = (multiplier, base, allowed_length, window)
    words = [list(breaker) for breaker in breakers]
    for row, history, m, growth, allowed, last in _rows(logits, token_ids, indptr, *parameters):
        tokens = _last(history, int(last))
        n = len(tokens)
        ends = [i + len(w) for w in words for i in range(n) if tokens[i : i + len(w)] == w]
        limit = n - max(ends, default=0)
        longest: dict[int, int] = {}
        for i in range(1, n):  # the last tokens also end before place i
            repeated = 0
            while repeated < min(i, limit) and tokens[i - 1 - repeated] == tokens[-1 - repeated]:
                repeated += 1
            if repeated >= allowed and [tokens[i]] not in words:
                longest[tokens[i]] = max(longest.get(tokens[i], 0), repeated)
        bound = np.floor(np.log(np.finfo(np.float32).max) / np.log(growth)) if growth > 1 else n
        for token, repeated in longest.items():
            row[token] -= m * growth ** min(repeated - allowed, bound)
    return logits


def apply_logit_bias(
    logits: np.ndarray, token_ids: np.ndarray, biases: np.ndarray, indptr: np.ndarray
) -> np.ndarray:
    """See `nbflow_kernels.apply_logit_bias`."""
    for b, row in enumerate(logits):
        for i in range(indptr[b], indptr[b + 1]):
            row[token_ids[i]] += biases[i]
    return logits


def mask_token_ids(
    logits: np.ndarray, token_ids: np.ndarray, indptr: np.ndarray, *, keep: bool = False
) -> np.ndarray:
    """See `nbflow_kernels.mask_token_ids`."""
    for row, tokens in _rows(logits, token_ids, indptr):
        listed = np.isin(np.arange(len(row)), tokens)
        if tokens:
            row[~listed if keep else listed] = -np.inf
    return logits


def apply_token_bitmask(logits: np.ndarray, bitmask: np.ndarray) -> np.ndarray:
    """See `nbflow_kernels.apply_token_bitmask`."""
    bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
    logits[bits[:, : logits.shape[1]] == 0] = -np.inf
    return logits

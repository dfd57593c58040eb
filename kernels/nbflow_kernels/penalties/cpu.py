"""Logits processors on the CPU: parallel over rows; time grows with the token lists."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for

LARGEST_EXPONENT = 88.72283905206835  # ln of the largest float32


def penalties(logits, token_ids, indptr, parameters, spans):
    """See `nbflow_kernels.apply_penalties`.

    `parameters` float64 (B, 3): repetition, frequency, presence; `spans` int64 (B, 2): window,
    length of the prompt.
    """
    work = 20.0 * len(token_ids) + logits.shape[1]
    parallel_for(_penalties, len(logits), work, logits, token_ids, indptr, parameters, spans)


def no_repeat_ngram(logits, token_ids, indptr, sizes):
    """See `nbflow_kernels.apply_no_repeat_ngram`; `sizes` is int64 (B,)."""
    work = 4.0 * len(token_ids)
    parallel_for(_no_repeat_ngram, len(logits), work, logits, token_ids, indptr, sizes)


def dry(logits, token_ids, indptr, parameters, spans, words, edges):
    """See `nbflow_kernels.apply_dry_penalty`.

    `parameters` float64 (B, 2): multiplier, base; `spans` int64 (B, 2): window, allowed length;
    breaker i is ``words[edges[i]:edges[i + 1]]``, int32; they are ordered by their tokens from the
    last one to the first.
    """
    work = 20.0 * len(token_ids) * (1 + len(edges)).bit_length() + logits.shape[1]
    parallel_for(
        _dry, len(logits), work, logits, token_ids, indptr, parameters, spans, words, edges
    )


def logit_bias(logits, token_ids, biases, indptr):
    """See `nbflow_kernels.apply_logit_bias`."""
    work = 4.0 * len(token_ids)
    parallel_for(_logit_bias, len(logits), work, logits, token_ids, biases, indptr)


def mask(logits, token_ids, indptr, keep):
    """See `nbflow_kernels.mask_token_ids`."""
    work = 4.0 * len(token_ids) + (logits.size if keep else 0)
    parallel_for(_mask, len(logits), work, logits, token_ids, indptr, keep)


def bitmask(logits, bits):
    """See `nbflow_kernels.apply_token_bitmask`."""
    parallel_for(_bitmask, len(logits), 2.0 * logits.size, logits, bits)


@jit.kernel
def _penalties(logits, token_ids, indptr, parameters, spans, start, stop):
    # bit 0: the token occurred; higher bits: its count after the prompt
    counts = np.zeros(logits.shape[1], np.int32)
    for b in range(start, stop):
        first, end = np.int64(indptr[b]), np.int64(indptr[b + 1])
        answer = first + spans[b, 1]
        if spans[b, 0] >= 0:
            first = max(first, end - spans[b, 0])
        for i in range(first, end):
            counts[token_ids[i]] = (counts[token_ids[i]] | 1) + (2 if i >= answer else 0)
        for i in range(first, end):
            token = token_ids[i]
            n = counts[token] >> 1
            if counts[token] > 0:
                logit = np.float64(logits[b, token])
                if logit > 0.0:
                    logit /= parameters[b, 0]
                else:
                    logit *= parameters[b, 0]
                if n > 0:
                    logit -= parameters[b, 1] * n + parameters[b, 2]
                logits[b, token] = logit
                counts[token] = 0


@jit.kernel
def _no_repeat_ngram(logits, token_ids, indptr, sizes, start, stop):
    for b in range(start, stop):
        end, n = np.int64(indptr[b + 1]), sizes[b]
        if n < 1:
            continue
        for i in range(np.int64(indptr[b]) + n - 1, end):  # i: the last of an n-gram
            same, j = True, 1
            while same and j < n:
                same = token_ids[i - j] == token_ids[end - j]
                j += 1
            if same:
                logits[b, token_ids[i]] = -np.inf


@jit.device_function
def _first_from(token, j, low, high, words, edges):
    """Return the first breaker of [low, high) whose token j from its end is not below `token`."""
    while low < high:
        middle = (low + high) // 2
        if words[edges[middle + 1] - 1 - j] < token:
            low = middle + 1
        else:
            high = middle
    return low


@jit.device_function
def _ends_breaker(tokens, i, words, edges):
    """Return whether token i is the last of a breaker contained in `tokens`."""
    low, high, j = 0, len(edges) - 1, 0
    while low < high and j <= i:
        token = np.int64(tokens[i - j])
        low = _first_from(token, j, low, high, words, edges)
        high = _first_from(token + 1, j, low, high, words, edges)
        j += 1
        # breakers with equal ends are sorted by length
        if low < high and edges[low + 1] - edges[low] == j:
            return True
    return False


@jit.device_function
def _free_tokens(tokens, words, edges):
    """Return the number of tokens after the last breaker."""
    n = len(tokens)
    for after in range(n):
        if _ends_breaker(tokens, n - 1 - after, words, edges):
            return after
    return n


@jit.device_function
def _common_suffixes(tokens, lengths):
    """Write to ``lengths[k]`` the length of the match that ends k tokens before the end; k >= 1.

    The Z algorithm on the reversed sequence: linear time.
    """
    n = len(tokens)
    left, right = 0, 0
    for k in range(1, n):
        z = 0
        if k < right:
            z = min(right - k, lengths[k - left])
        while k + z < n and tokens[n - 1 - z] == tokens[n - 1 - k - z]:
            z += 1
        lengths[k] = z
        if k + z > right:
            left, right = k, k + z


@jit.device_function
def _is_breaker(token, words, edges):
    n = len(edges) - 1
    w = _first_from(np.int64(token), 0, 0, n, words, edges)
    return w < n and edges[w + 1] - edges[w] == 1 and words[edges[w]] == token


@jit.kernel
def _dry(logits, token_ids, indptr, parameters, spans, words, edges, start, stop):
    longest = np.zeros(logits.shape[1], np.int64)
    lengths = np.zeros(len(token_ids), np.int64)
    for b in range(start, stop):
        first, end = np.int64(indptr[b]), np.int64(indptr[b + 1])
        if spans[b, 0] >= 0:
            first = max(first, end - spans[b, 0])
        multiplier, base, allowed = parameters[b, 0], parameters[b, 1], spans[b, 1]
        if multiplier == 0.0 or end - first <= allowed:
            continue
        tokens = token_ids[first:end]
        n, limit = len(tokens), _free_tokens(tokens, words, edges)
        _common_suffixes(tokens, lengths)
        for k in range(1, n):
            repeated = min(lengths[k], limit)
            if repeated >= allowed:
                token = tokens[n - k]
                longest[token] = max(longest[token], repeated)
        most = LARGEST_EXPONENT / np.log(base) if base > 1.000001 else np.inf
        for k in range(1, n):
            token = tokens[n - k]
            if longest[token] > 0:
                if not _is_breaker(token, words, edges):
                    exponent = min(np.float64(longest[token] - allowed), np.floor(most))
                    logits[b, token] -= multiplier * base**exponent
                longest[token] = 0


@jit.kernel
def _logit_bias(logits, token_ids, biases, indptr, start, stop):
    for b in range(start, stop):
        for i in range(indptr[b], indptr[b + 1]):
            logits[b, token_ids[i]] += biases[i]


@jit.kernel
def _mask(logits, token_ids, indptr, keep, start, stop):
    V = logits.shape[1]
    kept = np.empty(V if keep else 0, np.float32)
    for b in range(start, stop):
        first, end = indptr[b], indptr[b + 1]
        if keep and first < end:
            for i in range(first, end):
                kept[token_ids[i]] = logits[b, token_ids[i]]
            at, excluded = simd.address(logits) + 4 * V * b, simd.splat(-np.inf)
            for d in range(0, V - 15, 16):
                simd.store_f32(at + 4 * d, excluded)
            for d in range(V // 16 * 16, V):
                logits[b, d] = -np.inf
        for i in range(first, end):
            logits[b, token_ids[i]] = kept[token_ids[i]] if keep else -np.inf


@jit.kernel
def _bitmask(logits, bits, start, stop):
    V, excluded = logits.shape[1], simd.splat(-np.inf)
    for b in range(start, stop):
        at = simd.address(logits) + 4 * V * b
        for w in range(bits.shape[1]):
            word = bits[b, w]
            if word == 0 and 32 * w + 32 <= V:
                simd.store_f32(at + 128 * w, excluded)
                simd.store_f32(at + 128 * w + 64, excluded)
            elif word != -1:
                for j in range(32 * w, min(32 * w + 32, V)):
                    if (word >> (j - 32 * w)) & 1 == 0:
                        logits[b, j] = -np.inf

"""Sampler: next token of each request from the logits of a step, with log-probabilities.

Logits on a CUDA device stay there; tokens, log-probabilities and top tokens are copied back.  For
strategies without a kernel only the top candidates are copied where they suffice, else the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow.engine.request import Request
from nbflow.sampling.candidates import top_candidates
from nbflow.sampling.strategy import State, check_sampled, choose_rows, rows_of
from nbflow_kernels.arrays import empty, is_cuda, on_device, on_host
from nbflow_kernels.logits import cpu, cuda
from nbflow_kernels.sampling import top_k

TOP_COLUMN = 2
"""First column of the top tokens in `SamplerOutput.array`, after token and log-probability."""
MAX_CANDIDATES = 1024
"""Most candidates copied from a device instead of the whole row."""


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens with their log-probabilities."""

    array: np.ndarray
    """float64 (B, 2 + 2 K): token, log-probability, K top tokens, their log-probabilities; NaN
    where not requested.  K is the largest number requested."""

    @classmethod
    def empty(cls, requests: Sequence[Request]) -> SamplerOutput:
        """Allocate the output for these requests."""
        most = max((r.n_top_logprobs for r in requests), default=0)
        return cls(np.full((len(requests), TOP_COLUMN + 2 * most), math.nan))

    def top(self, b: int, n: int) -> list[tuple[int, float]]:
        """Return the `n` most probable tokens of request `b` with their log-probabilities."""
        if n == 0:
            return []
        most = (self.array.shape[1] - TOP_COLUMN) // 2
        ids = self.array[b, TOP_COLUMN : TOP_COLUMN + n]
        values = self.array[b, TOP_COLUMN + most : TOP_COLUMN + most + n]
        return [(int(i), float(x)) for i, x in zip(ids, values, strict=True) if not math.isnan(i)]


def sample_tokens(logits: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Return the next token of each request, int32 (B,).

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Scores after the last token of each request, in host memory or on a device; not changed.
    requests : sequence of Request
        The requests; the states of their strategies advance.

    Raises
    ------
    UsageError
        If a row has a NaN, +inf, or only banned tokens.
    """
    tokens = np.empty(len(requests), np.int32)
    compiled = [i for i, r in enumerate(requests) if r.strategy.compiled]
    if compiled:
        some = [requests[i] for i in compiled]
        seeds = np.array([r.seed for r in some], np.uint64)
        offsets = np.array([len(r.ids) for r in some], np.uint64)
        tokens[compiled] = choose_rows([r.strategy for r in some], logits, compiled, seeds, offsets)
    others = [i for i, r in enumerate(requests) if not r.strategy.compiled]
    states = [state_of(requests[i]) for i in others]
    for i, state, row in zip(others, states, _rows_for_states(logits, others, states), strict=True):
        tokens[i] = state.choose(row)
    for i, request in enumerate(requests):
        if request.forced_bos_id is not None and not request.ids:
            tokens[i] = request.forced_bos_id
    return tokens


def sample_ahead(logits: np.ndarray, request: Request) -> Iterator[int]:
    """Sample consecutive tokens of a request from rows of logits, with a compiled strategy."""
    n, strategy = len(logits), request.strategy
    seeds = np.full(n, request.seed, np.uint64)
    offsets = len(request.ids) + np.arange(n, dtype=np.uint64)
    size = n if is_cuda(logits) else 1  # on a device one launch for all rows
    for i in range(0, n, size):
        part = slice(i, i + size)
        for token in strategy.drawn(logits[part], seeds[part], offsets[part]):
            check_sampled(token)
            yield int(token)


def _rows_for_states(logits: np.ndarray, rows: Sequence[int], states: Sequence[State]) -> list[Any]:
    """Return the input of each state: its row of logits, or the top candidates of it."""
    if not is_cuda(logits):
        return [logits[i].copy() for i in rows]
    rows_seen: dict[int, Any] = {}
    n_best = {
        i: state.n_best() or MAX_CANDIDATES + 1 for i, state in zip(rows, states, strict=True)
    }
    most = min(MAX_CANDIDATES, logits.shape[1] // 4)
    few = [i for i in rows if n_best[i] <= most]
    if few:
        found = top_candidates(rows_of(logits, few), max(n_best[i] for i in few))
        rows_seen.update({i: best.first(n_best[i]) for i, best in zip(few, found, strict=True)})
    for i, state in zip(rows, states, strict=True):
        if i not in rows_seen and state.takes_device_rows:
            rows_seen[i] = logits[i].copy()
    whole = [i for i in rows if i not in rows_seen]
    if whole:
        rows_seen.update(zip(whole, on_host(rows_of(logits, whole)), strict=True))
    return [rows_seen[i] for i in rows]


def state_of(request: Request) -> State:
    """Return the state of a request's strategy after its last token."""
    if request.state is None:
        request.state = request.strategy.begin(request.prompt, request.seed)
        request.n_seen = 0
    for token in request.ids[request.n_seen :]:
        request.state.accept(token)
    request.n_seen = len(request.ids)
    return request.state


def log_probabilities(logits: np.ndarray, tokens: np.ndarray, out: np.ndarray) -> None:
    """Write log softmax(logits) at one token per row to host memory, float64 (B, 1); a launcher."""
    ones, ids = np.ones(len(logits), np.float32), tokens.reshape(-1, 1)
    if not is_cuda(logits):
        cpu.token_log_probs(logits, ids, ones, 0.0, out)
        return
    there = empty(logits, out.shape, np.float64)
    cuda.token_log_probs(logits, on_device(ids, logits), ones, 0.0, there)
    out[:] = on_host(there)


def top_log_probabilities(logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `n` most probable tokens of each row and the logarithms of their probabilities.

    Returns
    -------
    ids : array of int32, shape (B, n)
        Most probable first, the lowest id first among equals.
    logprobs : array of float64, shape (B, n)
        Exact log softmax: the sum over the row is float64.
    """
    n = min(n, logits.shape[1])
    _, ids = top_k(logits, n, sorted=True)
    out = empty(logits, ids.shape, np.float64)
    variant = cuda if is_cuda(logits) else cpu
    variant.token_log_probs(logits, ids, np.ones(len(logits), np.float32), 0.0, out)
    return on_host(ids), on_host(out)


def gather_logprobs(logits: np.ndarray, requests: Sequence[Request], array: np.ndarray) -> None:
    """Fill in log-probabilities of the tokens in column 0, and the top tokens."""
    if any(r.wants_logprobs for r in requests):
        values = np.empty((len(requests), 1))
        log_probabilities(logits, array[:, 0].astype(np.int32), values)
        wanted = [r.wants_logprobs for r in requests]
        array[wanted, 1] = values[wanted, 0]
    gather_top(logits, array)


def gather_top(logits: np.ndarray, array: np.ndarray) -> None:
    """Fill in the top tokens and their log-probabilities."""
    most = (array.shape[1] - TOP_COLUMN) // 2
    if most:
        ids, logprobs = top_log_probabilities(logits, most)
        array[:, TOP_COLUMN : TOP_COLUMN + ids.shape[1]] = ids
        array[:, TOP_COLUMN + most : TOP_COLUMN + most + ids.shape[1]] = logprobs

"""From the logits of a step to the next token of each request, with the numbers that describe it.

Logits on a CUDA device stay there: draws, log-probabilities and the most probable tokens come back.
Of strategies that no kernel draws for, so do the best tokens where a few are enough; only else a
row of logits does.

The rank that holds the head draws and sends one array to the others; its shape follows from the
requests, which every rank knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow.engine.request import Request
from nbflow.sampling.candidates import shortlists
from nbflow.sampling.strategy import State, check_drawn
from nbflow_kernels import embedding
from nbflow_kernels.arrays import empty, is_cuda, on_device, on_host
from nbflow_kernels.logits import cpu, cuda
from nbflow_kernels.sampling import top_k

FIRST = 2
"""Columns of `SamplerOutput.array` before the most probable tokens: token and log-probability."""
MOST_BEST = 1024
"""Most tokens of a row that come from a device in place of the row."""


@dataclass(frozen=True)
class SamplerOutput:
    """Drawn tokens of some requests, with their log-probabilities."""

    array: np.ndarray
    """float64 (B, 2 + 2 K): token, log-probability, K most probable tokens, their
    log-probabilities; NaN where not asked for.  K is the most that one of the requests wants."""

    @classmethod
    def empty(cls, requests: Sequence[Request]) -> SamplerOutput:
        """Return room for these requests."""
        most = max((r.n_top_logprobs for r in requests), default=0)
        return cls(np.full((len(requests), FIRST + 2 * most), math.nan))

    @property
    def tokens(self) -> list[int]:
        """The drawn tokens."""
        return [int(token) for token in self.array[:, 0]]

    @property
    def logprobs(self) -> list[float]:
        """Natural logarithms of their probabilities under the model; NaN where not wanted."""
        numbers: list[float] = self.array[:, 1].tolist()
        return numbers

    def top(self, b: int, n: int) -> list[tuple[int, float]]:
        """Return the `n` most probable tokens of request `b` with their log-probabilities."""
        most = (self.array.shape[1] - FIRST) // 2
        ids = self.array[b, FIRST : FIRST + n]
        values = self.array[b, FIRST + most : FIRST + most + n]
        return [(int(i), float(x)) for i, x in zip(ids, values, strict=True) if not math.isnan(i)]


def draw(logits: np.ndarray, requests: Sequence[Request]) -> SamplerOutput:
    """Choose the next token of each request.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Scores after the last token of each request, in host memory or on a device; not changed.
    requests : sequence of Request
        The requests; the states of their strategies go on.

    Returns
    -------
    Drawn

    Raises
    ------
    UsageError
        If a row has a NaN, +inf, or no token that may be drawn.
    """
    drawn = SamplerOutput.empty(requests)
    drawn.array[:, 0] = choose(logits, requests)
    describe(logits, requests, drawn.array)
    return drawn


def choose(logits: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Return the next token of each request, int32 (B,); parameters as in `draw`."""
    tokens = np.empty(len(requests), np.int32)
    compiled = [i for i, r in enumerate(requests) if r.strategy.compiled]
    for strategy in dict.fromkeys(requests[i].strategy for i in compiled):
        rows = [i for i in compiled if requests[i].strategy == strategy]
        seeds = np.array([requests[i].seed for i in rows], np.uint64)
        offsets = np.array([len(requests[i].ids) for i in rows], np.uint64)
        tokens[rows] = strategy.choose(rows_of(logits, rows), seeds, offsets)
    others = [i for i, r in enumerate(requests) if not r.strategy.compiled]
    states = [state_of(requests[i]) for i in others]
    for i, state, row in zip(others, states, _seen(logits, others, states), strict=True):
        tokens[i] = state.choose(row)
    return tokens


def rows_of(logits: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return some rows of logits, where they lie; `logits` itself if they are all."""
    if len(rows) == len(logits):  # no row twice: in order
        return logits
    if not is_cuda(logits):
        return logits[rows]
    found: np.ndarray = embedding(on_device(np.array(rows, np.int32), logits), logits)
    return found


def draw_ahead(logits: np.ndarray, request: Request) -> Iterator[int]:
    """Draw token after token of a request from rows of logits, by its compiled strategy."""
    n, strategy = len(logits), request.strategy
    seeds = np.full(n, request.seed, np.uint64)
    offsets = len(request.ids) + np.arange(n, dtype=np.uint64)
    size = n if is_cuda(logits) else 1  # on a device one launch for all, needed or not
    for i in range(0, n, size):
        part = slice(i, i + size)
        for token in strategy.drawn(logits[part], seeds[part], offsets[part]):
            check_drawn(token)
            yield int(token)


def _seen(logits: np.ndarray, rows: Sequence[int], states: Sequence[State]) -> list[Any]:
    """Return what these states must see of these rows: the row, or the best of a row."""
    if not is_cuda(logits):
        return [logits[i].copy() for i in rows]
    seen: dict[int, Any] = {}
    n_best = {i: state.n_best() or MOST_BEST + 1 for i, state in zip(rows, states, strict=True)}
    most = min(MOST_BEST, logits.shape[1] // 4)
    few = [i for i in rows if n_best[i] <= most]
    if few:
        found = shortlists(rows_of(logits, few), max(n_best[i] for i in few))
        seen.update({i: best.first(n_best[i]) for i, best in zip(few, found, strict=True)})
    for i, state in zip(rows, states, strict=True):
        if i not in seen and state.takes_device_rows:
            seen[i] = logits[i].copy()
    whole = [i for i in rows if i not in seen]
    if whole:
        seen.update(zip(whole, on_host(rows_of(logits, whole)), strict=True))
    return [seen[i] for i in rows]


def state_of(request: Request) -> State:
    """Return the state of a request's strategy, brought up to its last token."""
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


def describe(logits: np.ndarray, requests: Sequence[Request], array: np.ndarray) -> None:
    """Fill in the log-probabilities of the tokens in column 0, and the most probable ones."""
    if any(r.wants_logprobs for r in requests):
        values = np.empty((len(requests), 1))
        log_probabilities(logits, array[:, 0].astype(np.int32), values)
        wanted = [r.wants_logprobs for r in requests]
        array[wanted, 1] = values[wanted, 0]
    most = (array.shape[1] - FIRST) // 2
    if most:
        ids, logprobs = top_log_probabilities(logits, most)
        array[:, FIRST : FIRST + ids.shape[1]] = ids
        array[:, FIRST + most : FIRST + most + ids.shape[1]] = logprobs

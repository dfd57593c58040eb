"""From the logits of a step to the next token of each request, with the numbers that describe it.

The rank that holds the head draws and sends one array to the others; its shape follows from the
requests, which every rank knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nbflow.decoding.strategy import State
from nbflow.engine.request import Request
from nbflow_kernels.logits.cpu import token_log_probs
from nbflow_kernels.sampling import top_k

FIRST = 2
"""Columns of `Drawn.array` before the most probable tokens: token and log-probability."""


@dataclass(frozen=True)
class Drawn:
    """What was drawn for some requests."""

    array: np.ndarray
    """float64 (B, 2 + 2 K): token, log-probability, K most probable tokens, their
    log-probabilities; NaN where not asked for.  K is the most that one of the requests wants."""

    @classmethod
    def empty(cls, requests: Sequence[Request]) -> Drawn:
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


def draw(logits: np.ndarray, requests: Sequence[Request]) -> Drawn:
    """Choose the next token of each request.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Scores after the last token of each request; not changed.
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
    drawn = Drawn.empty(requests)
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
        some = logits if len(rows) == len(requests) else logits[rows]
        tokens[rows] = strategy.choose(some, seeds, offsets)
    for i, request in enumerate(requests):
        if not request.strategy.compiled:
            tokens[i] = state_of(request).choose(logits[i].copy())
    return tokens


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
    """Write log softmax(logits) at one token per row, float64 (B, 1); a launcher."""
    ones = np.ones(len(logits), np.float32)
    token_log_probs(logits, tokens.reshape(-1, 1), ones, 0.0, out)


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
    out = np.empty(ids.shape)
    token_log_probs(logits, ids, np.ones(len(logits), np.float32), 0.0, out)
    return ids, out


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

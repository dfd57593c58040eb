"""What a step gives: drawn tokens, proposed tokens that are right, numbers about the prompt.

The rank that holds the head computes an `Outcome`, a few small arrays whose shapes follow from the
works, which every rank knows; the others receive them.  `apply` then brings every rank's requests
to the same state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nbflow.engine.draw import (
    FIRST,
    Drawn,
    choose,
    describe,
    draw_ahead,
    log_probabilities,
    rows_of,
    state_of,
    top_log_probabilities,
)
from nbflow.engine.pooling import empty_vectors, pool
from nbflow.engine.request import Request, TopLogprobs
from nbflow.engine.scheduler import Work
from nbflow.engine.searching import advance, compute_rows, empty_rows
from nbflow.engine.verify import verify_chain
from nbflow_kernels._dispatch import on_host
from nbflow_kernels.errors import UsageError

NO_TOKEN = -1
"""In the place of a token: none could be drawn."""


@dataclass
class Output:
    """What a step, or several in one go, gave one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """New tokens, the one that ended the sequence not among them."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def add(self, request: Request, n_before: int) -> None:
        """Take the tokens behind the first `n_before` of a request."""
        self.tokens = request.ids[n_before:]
        self.logprobs = request.logprobs[n_before:]
        self.top_logprobs = request.top_logprobs[n_before:]


@dataclass
class Outcome:
    """The numbers that a step gives, in the order of its works."""

    drawn: Drawn
    """A row for each token that may come out: one for a request that draws, and one more for each
    token proposed to it.  The token is NaN where it did not come out."""
    prompt: Drawn
    """A row for each prompt token whose log-probability is wanted and became known."""
    searches: list[np.ndarray] = field(default_factory=list)
    """What each search is told; see `nbflow.engine.searching.empty_rows`."""
    vectors: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """The vector of each text whose last token ran, float32 (n, E)."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """What went wrong where a row of `drawn` is `NO_TOKEN`; on the head's rank."""

    @classmethod
    def empty(cls, works: Sequence[Work], n_vocab: int, hidden_size: int) -> Outcome:
        """Return room for a step's numbers."""
        draws = [w.request for w in works if _is_drawn(w) for _ in range(1 + len(w.drafts))]
        known = [w.request.prompt_logprobs or 0 for w in works for _ in _prompt_rows(w)]
        width = FIRST + 2 * max(known, default=0)
        prompt = Drawn(np.full((len(known), width), math.nan))
        vectors = empty_vectors(works, hidden_size)
        return cls(Drawn.empty(draws), prompt, empty_rows(works, n_vocab), vectors)

    @property
    def arrays(self) -> list[np.ndarray]:
        """What the other ranks must be told."""
        every = (self.drawn.array, self.prompt.array, *self.searches, self.vectors)
        return [a for a in every if a.size]

    def pool(self, works: Sequence[Work], states: np.ndarray) -> None:
        """Take the hidden states that are pooled; the last rows of the step's."""
        pool(self.vectors, works, states)

    def compute(
        self, logits: np.ndarray, works: Sequence[Work], hidden: Callable[[], np.ndarray]
    ) -> None:
        """Fill in the numbers from the logits of the step, and its hidden states if need be.

        The logits may lie on a device.
        """
        self._read_prompts(logits, works)
        compute_rows(self.searches, works, logits, hidden)
        rows = _drawing_rows(works)
        drawing = [w for w in works if _is_drawn(w)]
        requests = [w.request for w in drawing for _ in range(1 + len(w.drafts))]
        if not requests:
            return
        some = rows_of(logits, rows)
        starts = np.cumsum([0, *(1 + len(w.drafts) for w in drawing)]).tolist()
        plain = [i for i, w in enumerate(drawing) if not w.drafts]
        at = [starts[i] for i in plain]
        self._choose(rows_of(some, at), [drawing[i].request for i in plain], at)
        for i, work in enumerate(drawing):
            if work.drafts:
                self._verify(some[starts[i] : starts[i + 1]], work, starts[i])
        fine = np.flatnonzero(self.drawn.array[:, 0] >= 0)
        if len(fine) == len(requests):
            describe(some, requests, self.drawn.array)
        elif len(fine):
            part = self.drawn.array[fine]
            describe(rows_of(some, fine.tolist()), [requests[i] for i in fine], part)
            self.drawn.array[fine] = part

    def _choose(self, logits: np.ndarray, requests: Sequence[Request], rows: list[int]) -> None:
        """Draw one token for each of these requests, into these rows of `drawn`."""
        tokens = self.drawn.array[:, 0]
        if not requests:
            return
        try:
            tokens[rows] = choose(logits, requests)
        except Exception as error:
            if len(requests) == 1:
                self._failed(rows[0], error)
                return
            for i, row in enumerate(rows):  # the others are not to suffer from one
                self._choose(logits[i : i + 1], requests[i : i + 1], [row])

    def _verify(self, logits: np.ndarray, work: Work, row: int) -> None:
        try:
            tokens = verify(logits, work.request, work.drafts)
        except Exception as error:
            self._failed(row, error)
        else:
            self.drawn.array[row : row + len(tokens), 0] = tokens

    def _failed(self, row: int, error: Exception) -> None:
        self.drawn.array[row, 0] = NO_TOKEN
        self.errors[row] = error

    def _read_prompts(self, logits: np.ndarray, works: Sequence[Work]) -> None:
        first = done = 0
        for work in works:
            rows = _prompt_rows(work)
            if rows:
                request = work.request
                at = [first + i - request.n_done for i in rows]
                ids = np.array([request.prompt[i + 1] for i in rows], np.int32)
                array = self.prompt.array[done : done + len(rows)]
                self._describe_prompt(rows_of(logits, at), ids, array)
                done += len(rows)
            first += work.n_logits

    @staticmethod
    def _describe_prompt(logits: np.ndarray, ids: np.ndarray, array: np.ndarray) -> None:
        values = np.empty((len(ids), 1))
        log_probabilities(logits, ids, values)
        array[:, 0], array[:, 1] = ids, values[:, 0]
        most = (array.shape[1] - FIRST) // 2
        if most and np.isfinite(values).all():
            top, logprobs = top_log_probabilities(logits, most)
            array[:, FIRST : FIRST + top.shape[1]] = top
            array[:, FIRST + most : FIRST + most + top.shape[1]] = logprobs

    def apply(self, works: Sequence[Work]) -> list[Output]:
        """Give the requests what came out, and return it."""
        outputs, row, prompt_row = [], 0, 0
        searches, vectors = iter(self.searches), iter(self.vectors)
        for work in works:
            request, output, draws = work.request, Output(work.request), work.draws
            for _ in _prompt_rows(work):
                top = self.prompt.top(prompt_row, request.prompt_logprobs or 0)
                request.prompt_results.append((float(self.prompt.array[prompt_row, 1]), top))
                prompt_row += 1
            if work.ends_pooling:
                request.vector, request.finish_reason = next(vectors).copy(), "stop"
            if not request.branches:
                request.n_done += work.n_tokens
            if draws and request.search is not None:
                n_before = len(request.ids)
                advance(request, next(searches))
                output.add(request, n_before)
            elif draws:
                n_rows = 1 + len(work.drafts)
                self._accept(work, row, n_rows, output)
                row += n_rows
            elif request.max_tokens == 0 and request.n_pending == 0 and request.pooling is None:
                request.finish_reason = "length"
            outputs.append(output)
        return outputs

    def _accept(self, work: Work, row: int, n_rows: int, output: Output) -> None:
        request, n_before = work.request, len(work.request.ids)
        for i in range(row, row + n_rows):
            token, logprob = self.drawn.array[i, :2].tolist()
            if math.isnan(token) or request.finish_reason is not None:
                break
            if token == NO_TOKEN:
                request.fail(self.errors.get(i) or UsageError("no token could be drawn"))
                break
            request.accept(int(token), logprob, self.drawn.top(i, request.n_top_logprobs))
        output.add(request, n_before)
        if work.drafts:
            n_right = max(0, len(output.tokens) - 1)
            request.n_done += n_right
            request.n_drafted += len(work.drafts)
            request.n_accepted += n_right


def verify(logits: np.ndarray, request: Request, drafts: Sequence[int]) -> list[int]:
    """Return the tokens that come out where some were proposed.

    The tokens are drawn as if there had been no proposal, each after those before it; the first
    that differs from the proposed one is the last whose logits are right.  So the result is, bit
    for bit, the one without proposals, whatever the strategy.  `Request.verifies_chain` wants
    another verification, `nbflow.engine.verify`.

    Parameters
    ----------
    logits : array of float32, shape (n + 1, V)
        Scores after the last token and after each of the `n` proposed ones.
    request : Request
        The request.
    drafts : sequence of int
        The proposed tokens.
    """
    if request.verifies_chain:
        assert request.draft_probs is not None
        probs = request.draft_probs[: len(drafts)]
        return verify_chain(on_host(logits), request, drafts, probs)
    compiled, tokens = request.strategy.compiled, list[int]()
    drawn = draw_ahead(logits, request) if compiled else _draw_on(on_host(logits), request)
    for i, token in enumerate(drawn):
        tokens.append(token)
        if i == len(drafts) or token != drafts[i] or token in request.stop_ids:
            break
    return tokens


def _draw_on(logits: np.ndarray, request: Request) -> Iterator[int]:
    """Draw token after token of a request from rows of logits, by the state of its strategy."""
    state = state_of(request)
    for row in logits:
        token = state.choose(row.copy())
        state.accept(token)
        request.n_seen += 1
        yield token


def _prompt_rows(work: Work) -> range:
    """Return the positions in the prompt after which the log-probability of the next is wanted."""
    request = work.request
    if not request.wants_prompt_logits:
        return range(0)
    begin = max(request.n_done, len(request.prompt_results))
    return range(begin, min(request.n_done + work.n_tokens, len(request.prompt) - 1))


def _is_drawn(work: Work) -> bool:
    """Return whether a strategy draws a token, as no search does."""
    return work.draws and work.request.search is None


def _drawing_rows(works: Sequence[Work]) -> list[int]:
    """Return which rows of the logits draw tokens."""
    rows: list[int] = []
    end = 0
    for work in works:
        end += work.n_logits
        if _is_drawn(work):
            rows += range(end - 1 - len(work.drafts), end)
    return rows

"""Outputs: arrays of a step, new tokens of a request, and the result of a request.

The rank with the head computes a `StepOutput`, a few small arrays whose shapes every rank derives
from the scheduled step; the others receive it.  `StepOutput.apply` then updates the requests of
each rank alike and returns a `RequestDelta` of `TokenOutput`s for each, which go up to the HTTP
server.  A finished request has a `RequestOutput`.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nbflow.engine.detokenizer import IncrementalDetokenizer
from nbflow.engine.errors import ERROR_BYTES, encoded
from nbflow.engine.request import FinishReason, Request, TopLogprobs
from nbflow.engine.sampler import (
    TOP_COLUMN,
    SamplerOutput,
    gather_logprobs,
    gather_top,
    log_probabilities,
    sample_ahead,
    sample_tokens,
    state_of,
)
from nbflow.engine.scheduler import ScheduledRequest
from nbflow.engine.search.base import Continuation
from nbflow.engine.search.runtime import advance, compute_rows, empty_rows
from nbflow.engine.speculative.rejection_sampler import rejection_sample
from nbflow.sampling.strategy import rows_of
from nbflow.tokenization import Tokenizer
from nbflow_kernels.arrays import on_host
from nbflow_kernels.errors import UsageError

FAILED_TOKEN = -1
"""Marks a request that failed, in place of a token."""


@dataclass(slots=True)
class TokenOutput:
    """New token of a request, its finish, or both."""

    token: int | None
    """Token id; None for a finish without token (end tokens are not reported)."""
    logprob: float = math.nan
    """Log-probability; NaN if not requested."""
    top_logprobs: TopLogprobs | None = None
    """Most probable tokens at its position; None if not requested."""
    finish_reason: FinishReason | None = None
    """Finish reason; None while the request runs."""
    error: Exception | None = None
    """The failure, for finish reason "error"."""
    text: str | None = None
    """Text released by the stop checker; None without stop texts."""
    offset: int = 0
    """Characters of text before the token; 0 where it has not been detokenized."""


@dataclass(slots=True)
class RequestDelta:
    """New tokens of one request from one engine step."""

    request: Request
    tokens: list[TokenOutput] = field(default_factory=list)
    """New tokens, without the end token."""
    held_text: str | None = None
    """Text held back until the request finished."""

    def add(self, n_before: int) -> None:
        """Take the new tokens after the first `n_before` of the request."""
        request = self.request
        new = zip(request.ids[n_before:], request.logprobs[n_before:], strict=True)
        self.tokens = [TokenOutput(token, logprob) for token, logprob in new]
        if request.n_top_logprobs:
            for output, top in zip(self.tokens, request.top_logprobs[n_before:], strict=True):
                output.top_logprobs = top

    def truncate(self, n: int) -> None:
        """Remove the last `n` tokens, also from the request."""
        if n:
            request = self.request
            for values in (self.tokens, request.ids, request.logprobs, request.top_logprobs):
                del values[-n:]

    def close(self) -> None:
        """Attach the finish of a request to its last token, or add a `TokenOutput` for it."""
        request = self.request
        if request.finish_reason is None:
            return
        if request.finish_reason == "length" and self.tokens:
            last = self.tokens[-1]
            last.finish_reason = "length"
            last.text = last.text if self.held_text is None else (last.text or "") + self.held_text
            return
        self.tokens.append(
            TokenOutput(
                None, finish_reason=request.finish_reason, error=request.error, text=self.held_text
            )
        )


@dataclass
class StepOutput:
    """Results of a step, in the order of its entries."""

    drawn: SamplerOutput
    """A row for each possible token: one for a sampling request, and one more for each of its draft
    tokens.  The token is NaN after a rejected draft."""
    prompt: SamplerOutput
    """A row for each prompt token whose log-probability was computed."""
    searches: list[np.ndarray] = field(default_factory=list)
    """Candidates of each search (`nbflow.engine.search.runtime.empty_rows`)."""
    vectors: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Pooled vectors of texts that ended in this step, float32 (n, E)."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """Errors by the request's number; see `failed_requests`."""

    @classmethod
    def empty(
        cls, scheduled: Sequence[ScheduledRequest], n_vocab: int, hidden_size: int
    ) -> StepOutput:
        """Allocate the arrays of a step."""
        sampled = [w.request for w in scheduled if w.is_sampled for _ in range(1 + len(w.drafts))]
        known = [w.request.prompt_logprobs or 0 for w in scheduled for _ in _prompt_rows(w)]
        width = TOP_COLUMN + 2 * max(known, default=0)
        prompt = SamplerOutput(np.full((len(known), width), math.nan))
        vectors = np.zeros((sum(w.emits_vector for w in scheduled), hidden_size), np.float32)
        return cls(SamplerOutput.empty(sampled), prompt, empty_rows(scheduled, n_vocab), vectors)

    @property
    def arrays(self) -> list[np.ndarray]:
        """Arrays that the other ranks receive."""
        every = (self.drawn.array, self.prompt.array, *self.searches, self.vectors)
        return [a for a in every if a.size]

    def pool(self, scheduled: Sequence[ScheduledRequest], states: np.ndarray) -> None:
        """Add hidden states, the last rows of the step, to the texts being pooled."""
        start = done = 0
        for entry in scheduled:
            request, rows = entry.request, entry.state_rows
            if request.pooling is None:
                continue
            request.pooling.add(states[start : start + len(rows)], request.n_computed)
            start += len(rows)
            if entry.emits_vector:
                self.vectors[done] = request.pooling.vector(len(request.prompt))
                done += 1

    def compute(
        self,
        logits: np.ndarray,
        scheduled: Sequence[ScheduledRequest],
        hidden: Callable[[], np.ndarray],
    ) -> None:
        """Fill the arrays from the logits of the step, and its hidden states where needed.

        The logits may lie on a device.  An error fails the affected request only; the arrays report
        it to the other ranks (`failed_requests`).
        """
        self._compute_prompt_logprobs(logits, scheduled)
        self._compute_searches(logits, scheduled, hidden)
        rows = _sampled_rows(scheduled)
        sampled = [w for w in scheduled if w.is_sampled]
        requests = [w.request for w in sampled for _ in range(1 + len(w.drafts))]
        if not requests:
            return
        some, drawn = rows_of(logits, rows), self.drawn.array
        starts = np.cumsum([0, *(1 + len(w.drafts) for w in sampled)]).tolist()

        def sample(rows: list[int]) -> None:
            drawn[rows, 0] = sample_tokens(rows_of(some, rows), [requests[i] for i in rows])

        def add_logprobs(rows: list[int]) -> None:
            part = drawn[rows]
            gather_logprobs(rows_of(some, rows), [requests[i] for i in rows], part)
            drawn[rows] = part

        self._each(sample, [starts[i] for i, w in enumerate(sampled) if not w.drafts], requests)
        for i, entry in enumerate(sampled):
            if entry.drafts:
                self._verify(some[starts[i] : starts[i + 1]], entry, starts[i])
        self._each(add_logprobs, np.flatnonzero(drawn[:, 0] >= 0).tolist(), requests)

    def _each(
        self, fill: Callable[[list[int]], None], rows: list[int], requests: Sequence[Request]
    ) -> None:
        """Fill rows of `drawn`; after an error one by one, so that only the bad one fails."""
        try:
            if rows:
                fill(rows)
        except Exception as error:
            if len(rows) == 1:
                self._failed(rows[0], requests[rows[0]], error)
                return
            for row in rows:
                self._each(fill, [row], requests)

    def _verify(self, logits: np.ndarray, entry: ScheduledRequest, row: int) -> None:
        try:
            tokens = verify_drafts(logits, entry.request, entry.drafts)
        except Exception as error:
            self._failed(row, entry.request, error)
        else:
            self.drawn.array[row : row + len(tokens), 0] = tokens

    def _failed(self, row: int, request: Request, error: Exception) -> None:
        self.drawn.array[row, 0] = FAILED_TOKEN
        self.errors[request.id] = error

    def _compute_searches(
        self,
        logits: np.ndarray,
        scheduled: Sequence[ScheduledRequest],
        hidden: Callable[[], np.ndarray],
    ) -> None:
        """Fill in the candidates of searches."""
        left, end = iter(self.searches), 0
        for entry in scheduled:
            rows = slice(end, end + entry.n_logits)
            end = rows.stop
            request = entry.request
            if request.search is None:
                continue
            array = next(left) if entry.emits_token else None
            try:
                if request.pending_error is not None:
                    raise request.pending_error
                compute_rows(array, entry, logits[rows], hidden, rows)
            except Exception as error:
                if array is None:  # reported to the other ranks with a later step
                    request.pending_error = error
                else:
                    array[0, 1] = FAILED_TOKEN
                    self.errors[request.id] = error

    def _compute_prompt_logprobs(
        self, logits: np.ndarray, scheduled: Sequence[ScheduledRequest]
    ) -> None:
        first = done = 0
        for entry in scheduled:
            rows = _prompt_rows(entry)
            if rows:
                request = entry.request
                if request.masked:
                    at = [*range(first, first + len(rows))]
                    ids = np.array([request.prompt[i] for i in rows], np.int32)
                else:
                    at = [first + i - request.n_computed for i in rows]
                    ids = np.array([request.prompt[i + 1] for i in rows], np.int32)
                array = self.prompt.array[done : done + len(rows)]
                try:
                    self._fill_prompt_logprobs(rows_of(logits, at), ids, array)
                except Exception as error:
                    array[:, 0] = FAILED_TOKEN
                    self.errors[request.id] = error
                done += len(rows)
            first += entry.n_logits

    def failed_requests(self, scheduled: Sequence[ScheduledRequest]) -> list[Request]:
        """Return the requests that failed in this step, from the arrays, on every rank."""
        if not any((array[:, :2] == FAILED_TOKEN).any() for array in self.arrays):
            return []
        found, row, prompt_row = [], 0, 0
        searches = iter(self.searches)
        for entry in scheduled:
            n_prompt = len(_prompt_rows(entry))
            n_drawn = 1 + len(entry.drafts) if entry.is_sampled else 0
            marks = [
                *self.prompt.array[prompt_row : prompt_row + n_prompt, 0],
                *self.drawn.array[row : row + n_drawn, 0],
            ]
            if entry.emits_token and entry.request.search is not None:
                marks.append(next(searches)[0, 1])
            if FAILED_TOKEN in marks:
                found.append(entry.request)
            row, prompt_row = row + n_drawn, prompt_row + n_prompt
        return found

    def encode_errors(self, failed: Sequence[Request]) -> np.ndarray:
        """Return the errors of these requests for other ranks, uint8 (B, `ERROR_BYTES`)."""
        array = np.zeros((len(failed), ERROR_BYTES), np.uint8)
        for line, request in zip(array, failed, strict=True):
            data = encoded(self.errors[request.id])
            line[: len(data)] = np.frombuffer(data, np.uint8)
        return array

    def decode_errors(self, failed: Sequence[Request], array: np.ndarray) -> None:
        """Set the errors from the `encode_errors` of another rank."""
        for line, request in zip(array, failed, strict=True):
            self.errors[request.id] = pickle.loads(line.tobytes())

    @staticmethod
    def _fill_prompt_logprobs(logits: np.ndarray, ids: np.ndarray, array: np.ndarray) -> None:
        values = np.empty((len(ids), 1))
        log_probabilities(logits, ids, values)
        array[:, 0], array[:, 1] = ids, values[:, 0]
        if np.isfinite(values).all():
            gather_top(logits, array)

    def apply(self, scheduled: Sequence[ScheduledRequest]) -> list[RequestDelta]:
        """Update the requests and return their new tokens."""
        outputs, row, prompt_row = [], 0, 0
        searches, vectors = iter(self.searches), iter(self.vectors)
        for entry in scheduled:
            request, emits_token = entry.request, entry.emits_token
            output = RequestDelta(request)
            error = self.errors.get(request.id)
            for _ in _prompt_rows(entry):
                top = self.prompt.top(prompt_row, request.prompt_logprobs or 0)
                request.prompt_results.append((float(self.prompt.array[prompt_row, 1]), top))
                prompt_row += 1
            if entry.emits_vector:
                request.vector, request.finish_reason = next(vectors).copy(), "stop"
            if not request.branches:
                request.n_computed += entry.n_tokens
            if emits_token and request.search is not None:
                self._apply_search(request, next(searches), output, error)
            elif emits_token:
                n_rows = 1 + len(entry.drafts)
                self._accept(entry, row, n_rows, output, error)
                row += n_rows
            elif request.max_tokens == 0 and request.n_pending == 0 and request.pooling is None:
                request.finish_reason = "length"
            if error is not None:
                request.fail(error)
            outputs.append(output)
        return outputs

    @staticmethod
    def _apply_search(
        request: Request, row: np.ndarray, output: RequestDelta, error: Exception | None
    ) -> None:
        """Advance a search; an error is the same on every rank."""
        n_before = len(request.ids)
        try:
            if error is None:
                advance(request, row)
        except Exception as raised:
            request.fail(raised)
        output.add(n_before)

    def _accept(
        self,
        entry: ScheduledRequest,
        row: int,
        n_rows: int,
        output: RequestDelta,
        error: Exception | None,
    ) -> None:
        request, n_before = entry.request, len(entry.request.ids)
        for i in range(row, row + n_rows):
            token, logprob = self.drawn.array[i, :2].tolist()
            if math.isnan(token) or request.finish_reason is not None:
                break
            if token == FAILED_TOKEN:
                request.fail(error or UsageError("no token could be sampled"))
                break
            n_top = request.n_top_logprobs
            request.accept(int(token), logprob, self.drawn.top(i, n_top) if n_top else ())
        output.add(n_before)
        if entry.drafts:
            n_right = max(0, len(output.tokens) - 1)
            request.n_computed += n_right
            request.n_drafted += len(entry.drafts)
            request.n_accepted += n_right


@dataclass(frozen=True)
class RequestOutput:
    """Result of a finished request."""

    ids: list[int]
    """New token ids."""
    text: str
    """The new tokens as text, up to a stop text; empty without a tokenizer."""
    logprobs: list[float]
    """Log-probability of each new token."""
    finish_reason: FinishReason
    """"stop": end token or stop text; "length": `max_tokens` or context reached."""
    prompt_ids: list[int]
    """The prompt as token ids."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Most probable tokens at each position, with `logprobs`."""
    prompt_logprobs: list[tuple[float, TopLogprobs]] = field(default_factory=list)
    """Log-probability and most probable tokens at each prompt position but the first, with
    `prompt_logprobs`."""
    n_drafted: int = 0
    """Draft tokens."""
    n_accepted: int = 0
    """Accepted draft tokens."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    score: float | None = None
    """Beam score: log-probability / length ** length_penalty."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the draft tokens; None without any."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @classmethod
    def of(cls, request: Request, text: str) -> RequestOutput:
        """Return the result of a finished request."""
        assert request.finish_reason is not None
        return cls(
            request.ids, text, request.logprobs, request.finish_reason, request.prompt,
            request.top_logprobs, request.prompt_results, request.n_drafted, request.n_accepted,
            request.cached_tokens,
        )  # fmt: skip

    def replaced(
        self, found: Continuation, stop_ids: frozenset[int], tokenizer: Tokenizer | None
    ) -> RequestOutput:
        """Return the result with another continuation of the search."""
        ended = found.steps[-1].token in stop_ids
        steps = found.steps[:-1] if ended else found.steps
        ids = [step.token for step in steps]
        return dataclasses.replace(
            self,
            ids=ids,
            text="" if tokenizer is None else tokenizer.decode(tokenizer.known(ids)),
            logprobs=[step.logprob for step in steps],
            top_logprobs=[step.top for step in steps if step.top],
            finish_reason="stop" if ended else "length",
            score=found.score,
        )


def text_of(request: Request, tokenizer: Tokenizer | None) -> str:
    """Return the new tokens of a request as text, up to a stop text."""
    if tokenizer is None:
        return ""
    if request.text is not None:
        return request.text
    if not request.stop_texts:
        return tokenizer.decode(tokenizer.known(request.ids))
    stream = IncrementalDetokenizer(tokenizer, request.stop_texts, request.include_stop_text)
    return "".join([*(stream.push(i) for i in request.ids), stream.finish()])


def verify_drafts(logits: np.ndarray, request: Request, drafts: Sequence[int]) -> list[int]:
    """Verify draft tokens; return the accepted ones and the next token.

    Tokens are sampled as without a draft; the first one that differs from its draft token is the
    last with valid logits.  The result is therefore bit-identical to that without a draft, for
    every strategy.  With `Request.verifies_chain`, rejection sampling is used instead.

    `logits` follow the last token and each of the `n` draft tokens, float32 (n + 1, V).
    """
    if request.verifies_chain:
        assert request.draft_probs is not None
        probs = request.draft_probs[: len(drafts)]
        return rejection_sample(on_host(logits), request, drafts, probs)
    compiled, tokens = request.strategy.compiled, list[int]()
    drawn = (
        sample_ahead(logits, request) if compiled else _sample_with_state(on_host(logits), request)
    )
    for i, token in enumerate(drawn):
        tokens.append(token)
        if i == len(drafts) or token != drafts[i] or token in request.stop_ids:
            break
    return tokens


def _sample_with_state(logits: np.ndarray, request: Request) -> Iterator[int]:
    """Sample consecutive tokens from rows of logits with the state of the strategy."""
    state = state_of(request)
    for row in logits:
        token = state.choose(row.copy())
        state.accept(token)
        request.n_seen += 1
        yield token


def _prompt_rows(entry: ScheduledRequest) -> Sequence[int]:
    """Return the prompt positions whose next (masked: own) token needs a log-probability."""
    request = entry.request
    if request.prompt_logprobs is None and not request.masked:
        return ()
    if not request.needs_prompt_logits:
        return ()
    if request.masked:
        return request.masked
    begin = max(request.n_computed, len(request.prompt_results))
    return range(begin, min(request.n_computed + entry.n_tokens, len(request.prompt) - 1))


def _sampled_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of the logits from which tokens are sampled."""
    rows: list[int] = []
    end = 0
    for entry in scheduled:
        end += entry.n_logits
        if entry.is_sampled:
            rows += range(end - 1 - len(entry.drafts), end)
    return rows

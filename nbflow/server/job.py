"""The continuations of one request: from the engine's events to pieces of text, as they come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from nbflow.decoding.structured import StructureError
from nbflow.engine.errors import EngineClosed, QueueFull
from nbflow.engine.generation import Generation
from nbflow.engine.handle import Handle, TokenEvent
from nbflow.engine.request import Request, TopLogprobs
from nbflow.server.errors import ApiError, busy
from nbflow.server.logs import logger
from nbflow.server.mailbox import Mailbox
from nbflow.server.metrics import Clock, Metrics
from nbflow.server.requests import GenerationRequest
from nbflow.server.served import Served
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """A token and how probable it was."""

    token: int
    logprob: float
    """Natural logarithm of its probability."""
    top: TopLogprobs
    """The most probable tokens in its place."""
    offset: int
    """Characters of text before it."""


@dataclass
class Piece:
    """What became known of a continuation at one time."""

    index: int
    """Which of the request's continuations."""
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop" or "length" with the last piece."""
    stop_reason: str | None = None
    """The stop text that was found."""
    error: ApiError | None = None
    """Why there will be no more, if that is a failure."""

    @property
    def ids(self) -> list[int]:
        """The new token ids."""
        return [entry.token for entry in self.entries]


_CONTEXT = 8  # tokens of the prompt that decide how the first new one is spelt


class Continuation:
    """One sequence: gathers its events into pieces.  Lives on the event loop's thread."""

    def __init__(
        self, index: int, wanted: GenerationRequest, served: Served, metrics: Metrics
    ) -> None:
        self.index = index
        self.request = wanted.request
        self._structure = wanted.structure
        self._before = wanted.request.prompt[-_CONTEXT:] if wanted.continues_text else ()
        params = wanted.params
        self._text = served.text_stream(
            params.stop_texts, params.include_stop_str_in_output, self._before
        )
        self._offsets = served.offsets(self._before) if wanted.request.wants_logprobs else None
        self._served = served
        self._clock = Clock(metrics, served.name)
        self.handle: Handle | None = None
        self.n_prompt = len(self.request.encoder_ids or self.request.prompt)
        """Tokens of the prompt; where there is an encoder, it reads the prompt."""
        self.n_tokens = 0
        """New tokens so far."""
        self.finished = False

    def take(self, events: Sequence[TokenEvent]) -> list[Piece]:
        """Return what events of the engine tell, if they tell something."""
        if self.finished:  # tokens that were under way when a stop text was found
            return []
        piece, texts = Piece(self.index), []
        for event in events:
            if event.token is not None:
                self.n_tokens += 1
                offset = 0 if self._offsets is None else self._offsets(event.token)
                top = event.top_logprobs or []
                piece.entries.append(Entry(event.token, event.logprob, top, offset))
                texts.append(self._text.push(event.token))
            if self._text.stopped is not None:
                self._end(piece, "stop")
                break
            if event.finish_reason is not None:
                texts.append(self._text.finish())
                self._end_as(piece, event)
                break
        piece.text = "".join(texts)
        piece.stop_reason = self._text.stopped
        if piece.entries:
            self._clock.tokens(len(piece.entries))
        if self.finished:
            self._note_end(piece)
        return [piece] if piece.text or piece.entries or self.finished else []

    def _note_end(self, piece: Piece) -> None:
        reason = piece.finish_reason or "error"
        self._clock.end(reason, self.n_prompt, self.n_tokens, self._queued_s)

    def failed(self, error: Exception) -> list[Piece]:
        """End because something else than the engine has failed."""
        if self.finished:
            return []
        piece = Piece(self.index)
        self._end_as(piece, TokenEvent(None, finish_reason="error", error=error))
        self._note_end(piece)
        return [piece]

    def _end_as(self, piece: Piece, event: TokenEvent) -> None:
        """End as the engine says."""
        if event.finish_reason == "error":
            error = event.error or RuntimeError("unknown")
            logger.error("a sequence failed", exc_info=error)
            piece.error = self._failure(error)
        elif event.finish_reason == "abort":
            piece.error = ApiError(503, "the server is stopping", retry_after_s=1)
        elif self._text.stopped is not None:
            self._end(piece, "stop")
            return
        # a request that ran out of time has what there was time for
        reason = "length" if event.finish_reason == "deadline" else event.finish_reason
        self._end(piece, reason if piece.error is None else None)

    def _failure(self, error: Exception) -> ApiError:
        """Return what the client is told of an error of the engine."""
        if isinstance(error, StructureError):  # it was found out on the way
            return ApiError(400, str(error), param=self._structure)
        what = str(error) if isinstance(error, UsageError) else "see the server's log"
        return ApiError(500, f"the model could not go on: {what}", code="step_failed")

    def _end(self, piece: Piece, reason: str | None) -> None:
        piece.finish_reason = reason
        self.finished = True
        self.cancel()

    @property
    def _queued_s(self) -> float | None:
        """How long it waited before its first step."""
        if self.handle is None or self.handle.timings.started is None:
            return None
        return self.handle.timings.started - self.handle.timings.submitted

    def cancel(self) -> None:
        """Tell the engine that no more is wanted."""
        if self.handle is not None and not self.handle.done:
            self.handle.cancel()

    def abandon(self) -> None:
        """End without being asked for more, because the client is gone."""
        if not self.finished and self.handle is not None:
            self.finished = True
            self.cancel()
            self._clock.end("abort", self.n_prompt, self.n_tokens, None)


class BeamContinuations(Continuation):
    """All that a beam search finds, which comes at its end: the choices from `index` on."""

    def take(self, events: Sequence[TokenEvent]) -> list[Piece]:
        """See `Continuation.take`."""
        last = events[-1]
        if self.finished or last.finish_reason is None:
            return []
        first = Piece(self.index)
        self._end_as(first, last)
        if first.error is not None:
            self._note_end(first)
            return [first]
        pieces = [
            self._piece(self.index + i, made)
            for i, made in enumerate(self._served.model.generations(self.request))
        ]
        self._clock.tokens(self.n_tokens)
        self._note_end(pieces[0])
        return pieces

    def _piece(self, index: int, made: Generation) -> Piece:
        stream = self._served.text_stream((), False, self._before)
        offsets = self._served.offsets(self._before) if self.request.wants_logprobs else None
        tops = made.top_logprobs or [[] for _ in made.ids]
        entries, texts = [], []
        for token, logprob, top in zip(made.ids, made.logprobs, tops, strict=True):
            entries.append(Entry(token, logprob, top, 0 if offsets is None else offsets(token)))
            texts.append(stream.push(token))
        self.n_tokens += len(entries)
        text = "".join([*texts, stream.finish()])
        return Piece(index, text, entries, made.finish_reason)


class PooledText(Continuation):
    """A text that is embedded.  Nothing comes before its end; the vector is in the request."""

    def take(self, events: Sequence[TokenEvent]) -> list[Piece]:
        """See `Continuation.take`."""
        last = events[-1]
        if self.finished or last.finish_reason is None:
            return []
        piece = Piece(self.index)
        if last.finish_reason == "deadline":  # half a text has no vector
            piece.error = ApiError(504, "the time for the request was over (limits.request_s)")
        self._end_as(piece, last)
        self._note_end(piece)
        return [piece]


class Job:
    """All continuations of one request.

    An asynchronous context manager: on leaving it, whatever has not ended is cancelled.  Iterating
    gives lists of pieces: all that came since the last time.

    Parameters
    ----------
    served : Served
        The model.
    requests : sequence of GenerationRequest
        The requests.
    mailbox : Mailbox
        The way from the engine's thread.
    metrics : Metrics
        Where times are noted.
    """

    def __init__(
        self,
        served: Served,
        requests: Sequence[GenerationRequest],
        mailbox: Mailbox,
        metrics: Metrics,
    ) -> None:
        self._served = served
        self._mailbox = mailbox
        self.continuations: list[Continuation] = []
        self._of_choice: list[Continuation] = []
        for wanted in requests:
            searches = wanted.request.search is not None and not wanted.request.search.compares
            kind = BeamContinuations if searches else Continuation
            kind = kind if wanted.request.pooling is None else PooledText
            self.continuations.append(kind(self.n_choices, wanted, served, metrics))
            self._of_choice += [self.continuations[-1]] * wanted.n
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()

    @property
    def n_choices(self) -> int:
        """How many continuations are wanted."""
        return len(self._of_choice)

    def request_of(self, index: int) -> Request:
        """Return the engine's request for a choice."""
        return self._of_choice[index].request

    async def __aenter__(self) -> Job:
        try:
            for continuation in self.continuations:
                self._submit(continuation)
        except QueueFull as error:
            self.leave()
            raise busy(str(error)) from error
        except EngineClosed as error:
            self.leave()
            raise ApiError(503, str(error), retry_after_s=1) from error
        except BaseException:
            self.leave()
            raise
        return self

    def _submit(self, continuation: Continuation) -> None:
        def on_events(_: Handle, events: list[TokenEvent]) -> None:  # on the engine's thread
            self._mailbox.post(self._take, continuation, events)

        continuation.handle = self._served.engine.submit(continuation.request, on_events)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancel what has not ended."""
        for continuation in self.continuations:
            continuation.abandon()

    def _take(self, continuation: Continuation, events: list[TokenEvent]) -> None:
        try:
            pieces = continuation.take(events)
        except Exception as error:  # or this request would wait, and those behind it in the mailbox
            pieces = continuation.failed(error)
        if pieces:
            self._pieces += pieces
            self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        while True:
            if not self._pieces:
                if all(c.finished for c in self.continuations):
                    return
                self._news.clear()
                await self._news.wait()
            pieces, self._pieces = self._pieces, []
            yield pieces

    async def whole(self) -> list[Piece]:
        """Return one piece for each continuation, with all of it; raise if one failed."""
        results: dict[int, Piece] = {}
        texts: dict[int, list[str]] = {}
        async for pieces in self:
            for piece in pieces:
                if piece.error is not None:
                    raise piece.error
                result = results.setdefault(piece.index, Piece(piece.index))
                texts.setdefault(piece.index, []).append(piece.text)
                result.entries += piece.entries
                result.finish_reason = piece.finish_reason
                result.stop_reason = piece.stop_reason
        for index, result in results.items():
            result.text = "".join(texts[index])
        return [results[index] for index in sorted(results)]

    def usage(self, n_prompts: int) -> dict[str, Any]:
        """Return the numbers of tokens; a prompt with several continuations counts once."""
        each = max(1, len(self.continuations) // max(1, n_prompts))
        firsts = self.continuations[::each]
        prompt = sum(c.n_prompt for c in firsts)
        new = sum(c.n_tokens for c in self.continuations)
        cached = sum(c.handle.cached_tokens for c in firsts if c.handle is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def mean_logprob(piece: Piece) -> float:
    """Return the log-probability per token, by which the best of several is chosen."""
    if not piece.entries:
        return -math.inf
    return sum(entry.logprob for entry in piece.entries) / len(piece.entries)

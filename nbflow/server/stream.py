"""Streaming of one HTTP request: from the engine's tokens to text chunks and server-sent events.

`LoopBridge` posts tokens from the engine's thread to the event loop, `GenerationStream` turns them
into chunks per choice, and `Stream` sends them until the end or until the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nbflow.engine.detokenizer import IncrementalDetokenizer
from nbflow.engine.errors import EngineClosed, QueueFull
from nbflow.engine.outputs import RequestOutput, TokenOutput
from nbflow.engine.request import Request
from nbflow.engine.request_handle import RequestHandle
from nbflow.options import STRUCTURES
from nbflow.sampling.logits_processors import AllBannedError
from nbflow.sampling.structured_output import StructureError
from nbflow.server.errors import ApiError, busy
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.logs import logger, request_id
from nbflow.server.metrics import Clock, Metrics
from nbflow.server.served_model import ServedModel
from nbflow.server.token_text import NoText
from nbflow_kernels.errors import UsageError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass
class OutputChunk:
    """New tokens and text of one choice."""

    index: int
    """Index of the choice."""
    text: str = ""
    tokens: list[TokenOutput] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop" or "length" with the last chunk."""
    stop_reason: str | None = None
    """The stop text that was found."""
    error: ApiError | None = None
    """The failure of the request."""

    @property
    def ids(self) -> list[int]:
        """The new token ids."""
        return [output.token for output in self.tokens if output.token is not None]


_CONTEXT = 8  # prompt tokens that the detokenizer needs for the first new one


class ChoiceStream:
    """One choice of a request: turns its tokens into chunks, on the event loop's thread."""

    def __init__(
        self, index: int, generation: GenerationRequest, served: ServedModel, metrics: Metrics
    ) -> None:
        self.index = index
        self.request = generation.request
        self._structure = generation.structure
        self._served = served
        self._before = generation.request.prompt[-_CONTEXT:] if generation.continues_text else ()
        self.request.text_before = tuple(self._before)
        self._text = None if self.request.stop_texts else self._text_stream()
        self._clock = Clock(metrics, served.name)
        self._request_id = request_id.get()  # the engine's calls have no context of the request
        self.handle: RequestHandle | None = None
        self.n_prompt = len(self.request.encoder_ids or self.request.prompt)
        """Prompt tokens; those of the encoder in an encoder-decoder model."""
        self.n_tokens = 0
        """Generated tokens so far."""
        self.finished = False

    def _text_stream(self) -> IncrementalDetokenizer | NoText:
        return self._served.text_stream(self._before)

    def take(self, outputs: Sequence[TokenOutput]) -> list[OutputChunk]:
        """Return the chunk of new engine outputs, or an empty list."""
        if self.finished:
            return []
        chunk, texts = OutputChunk(self.index), []
        for output in outputs:
            texts.append(self._text_of(output))
            if output.token is not None:
                self.n_tokens += 1
                chunk.tokens.append(output)
            if output.finish_reason is not None:
                self._end_as(chunk, output)
        chunk.text = "".join(texts)
        if chunk.tokens:
            self._clock.tokens(len(chunk.tokens))
        if self.finished:
            chunk.stop_reason = self.request.stop_reason
            self._note_end(chunk)
        return [chunk] if chunk.text or chunk.tokens or self.finished else []

    def _text_of(self, output: TokenOutput) -> str:
        """Return the text of a token, and set its offset: the engine's if it checks stop texts."""
        if self._text is None:
            return output.text or ""
        output.offset = self._text.n_characters
        text = "" if output.token is None else self._text.push(output.token)
        return text if output.finish_reason is None else text + self._text.finish()

    def _note_end(self, chunk: OutputChunk) -> None:
        reason = chunk.finish_reason or "error"
        self._clock.end(reason, self.n_prompt, self.n_tokens, self._queued_s)

    def failed(self, error: Exception) -> list[OutputChunk]:
        """End with an error raised outside the engine."""
        if self.finished:
            return []
        chunk = OutputChunk(self.index)
        self._end_as(chunk, TokenOutput(None, finish_reason="error", error=error))
        self._note_end(chunk)
        return [chunk]

    def _end_as(self, chunk: OutputChunk, output: TokenOutput) -> None:
        """End with the engine's finish reason."""
        if output.finish_reason == "error":
            chunk.error = self._failure(output.error or RuntimeError("unknown"))
        elif output.finish_reason == "abort":
            chunk.error = ApiError(503, "the server is stopping", retry_after_s=1)
        # past its deadline a request returns what it has generated
        reason = "length" if output.finish_reason == "deadline" else output.finish_reason
        self._end(chunk, reason if chunk.error is None else None)

    def _failure(self, error: Exception) -> ApiError:
        """Log an engine error and return the client's; one of the request has no traceback."""
        about = {"request_id": self._request_id}
        if isinstance(error, StructureError | AllBannedError):
            logger.info("a sequence was refused", extra={**about, "error": str(error)})
            param = self._structure if error.param in STRUCTURES else error.param
            return ApiError(400, str(error), param=param)
        logger.error("a sequence failed", exc_info=error, extra=about)
        what = str(error) if isinstance(error, UsageError) else "see the server's log"
        return ApiError(500, f"the engine step failed: {what}", code="step_failed")

    def _end(self, chunk: OutputChunk, reason: str | None) -> None:
        chunk.finish_reason = reason
        self.finished = True
        self.cancel()

    @property
    def _queued_s(self) -> float | None:
        """Seconds in the queue before the first step."""
        if self.handle is None or self.handle.timings.started is None:
            return None
        return self.handle.timings.started - self.handle.timings.submitted

    def cancel(self) -> None:
        """Cancel the request in the engine."""
        if self.handle is not None and not self.handle.done:
            self.handle.cancel()

    def abandon(self) -> None:
        """Cancel because the client disconnected."""
        if not self.finished and self.handle is not None:
            self.finished = True
            self.cancel()
            self._clock.end("abort", self.n_prompt, self.n_tokens, None)


class BeamChoices(ChoiceStream):
    """Results of a beam search, which come at its end: the choices from `index` on."""

    def take(self, outputs: Sequence[TokenOutput]) -> list[OutputChunk]:
        """See `ChoiceStream.take`."""
        last = outputs[-1]
        if self.finished or last.finish_reason is None:
            return []
        first = OutputChunk(self.index)
        self._end_as(first, last)
        if first.error is not None:
            self._note_end(first)
            return [first]
        chunks = [
            self._chunk(self.index + i, made)
            for i, made in enumerate(self._served.model.generations(self.request))
        ]
        self._clock.tokens(self.n_tokens)
        self._note_end(chunks[0])
        return chunks

    def _chunk(self, index: int, made: RequestOutput) -> OutputChunk:
        stream = self._text_stream()
        tops = made.top_logprobs or [[] for _ in made.ids]
        tokens, texts = [], []
        for token, logprob, top in zip(made.ids, made.logprobs, tops, strict=True):
            tokens.append(TokenOutput(token, logprob, top, offset=stream.n_characters))
            texts.append(stream.push(token))
        self.n_tokens += len(tokens)
        text = "".join([*texts, stream.finish()])
        return OutputChunk(index, text, tokens, made.finish_reason)


class PooledText(ChoiceStream):
    """Text to be evaluated: one empty chunk at its end; the request holds the result."""

    def take(self, outputs: Sequence[TokenOutput]) -> list[OutputChunk]:
        """See `ChoiceStream.take`."""
        last = outputs[-1]
        if self.finished or last.finish_reason is None:
            return []
        chunk = OutputChunk(self.index)
        if last.finish_reason == "deadline":  # a partial text has no result
            chunk.error = ApiError(504, "the request exceeded its deadline (limits.request_s)")
        self._end_as(chunk, last)
        self._note_end(chunk)
        return [chunk]


class GenerationStream:
    """Chunks of all choices of one HTTP request.

    An asynchronous context manager, which cancels unfinished choices on exit.  Iteration yields
    lists of the chunks that have come since the previous one.
    """

    def __init__(
        self,
        served: ServedModel,
        requests: Sequence[GenerationRequest],
        bridge: LoopBridge,
        metrics: Metrics,
    ) -> None:
        self._served = served
        self._bridge = bridge
        self.continuations: list[ChoiceStream] = []
        self._of_choice: list[ChoiceStream] = []
        for generation in requests:
            searches = (
                generation.request.search is not None and not generation.request.search.needs_hidden
            )
            kind = BeamChoices if searches else ChoiceStream
            if generation.request.pooling is not None or generation.request.masked:
                kind = PooledText
            self.continuations.append(kind(self.n_choices, generation, served, metrics))
            self._of_choice += [self.continuations[-1]] * generation.n
        self._chunks: list[OutputChunk] = []
        self._ready = asyncio.Event()

    @property
    def n_choices(self) -> int:
        """Number of choices."""
        return len(self._of_choice)

    def request_of(self, index: int) -> Request:
        """Return the engine's request for a choice."""
        return self._of_choice[index].request

    async def __aenter__(self) -> GenerationStream:
        try:
            for continuation in self.continuations:
                self._submit(continuation)
        except QueueFull as error:
            self.close()
            raise busy(str(error)) from error
        except EngineClosed as error:
            self.close()
            raise ApiError(503, str(error), retry_after_s=1) from error
        except BaseException:
            self.close()
            raise
        return self

    def _submit(self, continuation: ChoiceStream) -> None:
        def on_events(
            _: RequestHandle, outputs: list[TokenOutput]
        ) -> None:  # on the engine's thread
            self._bridge.post(self._take, continuation, outputs)

        continuation.handle = self._served.engine.submit(continuation.request, on_events)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel unfinished choices."""
        for continuation in self.continuations:
            continuation.abandon()

    def _take(self, continuation: ChoiceStream, outputs: list[TokenOutput]) -> None:
        try:
            chunks = continuation.take(outputs)
        except Exception as error:  # else this request, and later calls of the bridge, would hang
            chunks = continuation.failed(error)
        if chunks:
            self._chunks += chunks
            self._ready.set()

    async def __aiter__(self) -> AsyncIterator[list[OutputChunk]]:
        while True:
            if not self._chunks:
                if all(c.finished for c in self.continuations):
                    return
                self._ready.clear()
                await self._ready.wait()
            chunks, self._chunks = self._chunks, []
            yield chunks

    async def collect(self) -> list[OutputChunk]:
        """Return one complete chunk for each choice; raise if one failed."""
        results: dict[int, OutputChunk] = {}
        texts: dict[int, list[str]] = {}
        async for chunks in self:
            for chunk in chunks:
                if chunk.error is not None:
                    raise chunk.error
                result = results.setdefault(chunk.index, OutputChunk(chunk.index))
                texts.setdefault(chunk.index, []).append(chunk.text)
                result.tokens += chunk.tokens
                result.finish_reason = chunk.finish_reason
                result.stop_reason = chunk.stop_reason
        for index, result in results.items():
            result.text = "".join(texts[index])
        return [results[index] for index in sorted(results)]

    def usage(self, n_prompts: int) -> dict[str, Any]:
        """Return OpenAI's usage object; a prompt with several choices counts once."""
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


def mean_logprob(chunk: OutputChunk) -> float:
    """Return the mean log-probability per token, the ranking of best_of."""
    if not chunk.tokens:
        return -math.inf
    return sum(output.logprob for output in chunk.tokens) / len(chunk.tokens)


class LoopBridge:
    """Ordered queue of calls from other threads to the event loop.

    One wake-up serves all sequences of an engine step; each would cost a system call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``call(*arguments)`` on the loop, from any thread."""
        self._calls.append((call, arguments))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the loop: later posts must wake it again
        while self._calls:
            call, arguments = self._calls.popleft()
            call(*arguments)


def event(data: Any) -> bytes:
    """Return a server-sent event with JSON data."""
    return b"data: " + _ENCODER.encode(data).encode() + b"\n\n"


class Stream(Response):
    """Streaming response, cancelled when the client disconnects.

    `close` is called at the end, also if nothing was sent.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[], None],
        media_type: str = "text/event-stream",
    ) -> None:
        self.chunks = chunks
        self.close = close
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await some work; if the client disconnects, cancel it and raise `ClientDisconnect`."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([doing, watching], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        watching.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])
            if not doing.cancelled():
                doing.exception()  # retrieved, or asyncio would log it


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass

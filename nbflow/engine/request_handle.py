"""Handle of a submitted request: iterate for its tokens as they come, or wait for the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any, Protocol

from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.outputs import RequestDelta, RequestOutput, TokenOutput
from nbflow.engine.request import FinishReason, Request, TopLogprobs
from nbflow_kernels.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass
class Timings:
    """When things happened, in seconds of `time.monotonic`; None for what has not happened yet."""

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    """The first step with a token of the request was over (from then on it is not queued)."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


class Runner(Protocol):
    """Engine that runs a request."""

    @property
    def model(self) -> ModelInfo:
        """The model that it runs."""

    @property
    def on_own_thread(self) -> bool:
        """True on the thread that passes on the events of requests."""

    def cancel(self, handle: RequestHandle, reason: FinishReason = "abort") -> None:
        """Let a request end with this reason, unless it has ended."""


OnEvents = Callable[["RequestHandle", list[TokenOutput]], None]


class RequestHandle:
    """A submitted request.  Made by `LLMEngine.submit`.

    Iterate over it for the events as they come, or wait for `result`.  Where `on_events` was given,
    the events go there instead, on the engine's thread: it must be quick and must not raise.

    Attributes
    ----------
    request : Request
        What was submitted; the engine changes it until the end.
    timings : Timings
        When things happened.
    """

    def __init__(self, engine: Runner, request: Request, on_events: OnEvents | None) -> None:
        self.request = request
        self.timings = Timings()
        self._engine = engine
        self._on_events = on_events
        self._events: SimpleQueue[list[TokenOutput]] = SimpleQueue()
        self._ended = Event()

    @property
    def done(self) -> bool:
        """True once the request has ended."""
        return self._ended.is_set()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self.request.finish_reason if self.done else None

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were taken from the prefix cache."""
        return self.request.cached_tokens

    @property
    def prompt_logprobs(self) -> list[tuple[float, TopLogprobs]] | None:
        """For each prompt token but the first, its log-probability and the most probable tokens.

        None if the request does not want them, or the prompt has not been read to its end.
        """
        request = self.request
        if request.prompt_logprobs is None or request.wants_prompt_logits:
            return None
        return request.prompt_results

    def cancel(self, reason: FinishReason = "abort") -> None:
        """Let the request end with this reason, unless it has ended already.  Returns at once."""
        self._engine.cancel(self, reason)

    def __iter__(self) -> Iterator[TokenOutput]:
        """Yield the events as they come; the last one has a `finish_reason`."""
        if self._on_events is not None:
            raise UsageError(
                "the events of this request go to on_events; leave that out to iterate"
            )
        while True:
            for event in self._events.get():
                yield event
                if event.finish_reason is not None:
                    return

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the continuation.

        Raises
        ------
        TimeoutError
            If it has not ended after `timeout` seconds; it goes on.
        Exception
            What happened, if the request ended with "error".
        """
        self.wait(timeout)
        if self.request.error is not None:
            raise self.request.error
        return self._engine.model.generation(self.request)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raise `TimeoutError` if it has not come after `timeout` seconds."""
        if self._engine.on_own_thread and not self.done:
            raise UsageError("a listener would wait for itself: this is the engine's own thread")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request has not ended after {timeout} s")

    def results(self, timeout: float | None = None) -> list[RequestOutput]:
        """Wait for the end and return all that a search has found, best first; else the result."""
        one = self.result(timeout)
        return self._engine.model.generations(self.request) if self.request.found else [one]

    # ---- for the engine -----------------------------------------------------------------------

    def push(self, delta: RequestDelta) -> None:
        """Pass on what a step gave; called on the engine's thread."""
        now, timings = time.monotonic(), self.timings
        timings.started = timings.started or now
        if delta.tokens and delta.tokens[0].token is not None:
            timings.first_token = timings.first_token or now
            timings.last_token = now
        self._deliver(delta.tokens)

    def relay(self, events: list[TokenOutput], facts: dict[str, Any]) -> None:
        """Take what a request that runs in another process has given."""
        now, timings, request = time.monotonic(), self.timings, self.request
        timings.started = timings.started or now
        for event in events:
            if event.token is not None:
                timings.first_token = timings.first_token or now
                timings.last_token = now
                request.ids.append(event.token)
                request.logprobs.append(event.logprob)
                if event.top_logprobs is not None:
                    request.top_logprobs.append(event.top_logprobs)
        for name, value in facts.items():
            setattr(request, name, value)
        self._deliver(events)

    def end(
        self, reason: FinishReason, error: Exception | None = None, text: str | None = None
    ) -> None:
        """End the request for a reason outside of the steps; called on the engine's thread.

        `text` was held back for a stop text.
        """
        if not self.done:
            self.request.finish_reason, self.request.error = reason, error
            self._deliver([TokenOutput(None, finish_reason=reason, error=error, text=text)])

    def _deliver(self, events: list[TokenOutput]) -> None:
        if not events:
            return
        if events[-1].finish_reason is not None:
            self.timings.ended = time.monotonic()
            self._ended.set()
        if self._on_events is None:
            self._events.put(events)
            return
        try:
            self._on_events(self, events)
        except Exception:  # who listens must not be able to end the engine
            logger.exception("on_events of request %d raised", self.request.id)

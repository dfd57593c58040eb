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
    """Time stamps of a request in seconds of `time.monotonic`; None until reached."""

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    """End of the first step that processed tokens of the request."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


class Runner(Protocol):
    """Engine that runs a request."""

    @property
    def model(self) -> ModelInfo:
        """Model of the engine."""

    @property
    def on_own_thread(self) -> bool:
        """True on the thread that delivers events."""

    def cancel(self, handle: RequestHandle, reason: FinishReason = "abort") -> None:
        """End a request with this reason, unless it is finished."""


OnEvents = Callable[["RequestHandle", list[TokenOutput]], None]


class RequestHandle:
    """Handle returned by `LLMEngine.submit`.

    Iterate over it for token events, or wait for `result`.  With `on_events`, events are passed to
    that callback on the engine's thread instead: it must return quickly and must not raise.

    Attributes
    ----------
    request : Request
        The submitted request, which the engine updates until it finishes.
    timings : Timings
        Time stamps.
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
        """True once the request is finished."""
        return self._ended.is_set()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason; None while it runs."""
        return self.request.finish_reason if self.done else None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.request.cached_tokens

    @property
    def prompt_logprobs(self) -> list[tuple[float, TopLogprobs]] | None:
        """Log-probability and most probable tokens of each prompt token but the first.

        None if not requested, or while the prompt is being processed.
        """
        request = self.request
        if request.prompt_logprobs is None or request.needs_prompt_logits:
            return None
        return request.prompt_results

    def cancel(self, reason: FinishReason = "abort") -> None:
        """End the request with this reason, unless it is finished.  Returns at once."""
        self._engine.cancel(self, reason)

    def __iter__(self) -> Iterator[TokenOutput]:
        """Yield events; the last one has a `finish_reason`."""
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
        """Wait until the request is finished and return its output.

        Raises
        ------
        TimeoutError
            If it is not finished after `timeout` seconds; it continues.
        Exception
            The error of a request that finished with "error".
        """
        self.wait(timeout)
        if self.request.error is not None:
            raise self.request.error
        return self._engine.model.generation(self.request)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until finished; raise `TimeoutError` after `timeout` seconds."""
        if self._engine.on_own_thread and not self.done:
            raise UsageError("cannot wait on the engine's own thread, which delivers the events")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request is not finished after {timeout} s")

    def results(self, timeout: float | None = None) -> list[RequestOutput]:
        """Wait and return all results of a search, best first; otherwise the only result."""
        one = self.result(timeout)
        return self._engine.model.generations(self.request) if self.request.found else [one]

    # ---- for the engine -----------------------------------------------------------------------

    def push(self, delta: RequestDelta) -> None:
        """Deliver the new tokens of a step; called on the engine's thread."""
        self._take_time(delta.tokens)
        self._deliver(delta.tokens)

    def relay(self, events: list[TokenOutput], facts: dict[str, Any]) -> None:
        """Deliver events of a request that runs in another process."""
        self._take_time(events)
        request = self.request
        for event in events:
            if event.token is not None:
                request.ids.append(event.token)
                request.logprobs.append(event.logprob)
                if event.top_logprobs is not None:
                    request.top_logprobs.append(event.top_logprobs)
        for name, value in facts.items():
            setattr(request, name, value)
        self._deliver(events)

    def _take_time(self, events: list[TokenOutput]) -> None:
        now, timings = time.monotonic(), self.timings
        timings.started = timings.started or now
        if events and events[0].token is not None:
            timings.first_token = timings.first_token or now
            timings.last_token = now

    def end(
        self, reason: FinishReason, error: Exception | None = None, text: str | None = None
    ) -> None:
        """Finish the request outside of a step; called on the engine's thread.

        `text` was held back by the stop checker.
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
        except Exception:  # a callback must not end the engine
            logger.exception("on_events of request %d raised", self.request.id)

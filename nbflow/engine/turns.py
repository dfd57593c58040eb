"""Turns of several threads at one model: calls come one after the other, and steps are shared.

A thread that generates takes a turn for each step.  A step runs the requests of all threads, so
whoever makes it leaves the others' results where they look first.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nbflow.engine.checks import check_request
from nbflow.engine.outcome import Output
from nbflow.engine.request import Request
from nbflow.engine.stopping import Stopping
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.model import Model


class Turns:
    """The lock of a model, and the requests that run on it without an engine.

    Parameters
    ----------
    model : Model
        The model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.lock = threading.RLock()
        """Held for one call, or for several that belong together."""
        self._in_call = False
        self._stopping = Stopping(lambda: model.tokenizer)
        self._outputs: dict[int, list[Output]] = {}  # not read yet, by the request's number
        self._left: deque[tuple[int, Request]] = deque()

    @contextlib.contextmanager
    def call(self, is_rank: bool) -> Iterator[None]:
        """Make a call to the model; `is_rank` says that this thread is one of its ranks.

        Raises
        ------
        UsageError
            If the caller is called by the model itself, within a step: it would wait for itself.
        """
        if is_rank:
            raise _within_a_step()
        with self.lock:
            if self._in_call:
                raise _within_a_step()
            self._in_call = True
            try:
                yield
            finally:
                self._in_call = False

    def configure(self, share_prompts: bool = False) -> None:
        """Have an empty cache for what comes now, unless requests run; the lock is held."""
        self._end_left()
        if not self._outputs:
            self._model.call("configure", None, None, None, share_prompts)

    def run(
        self, requests: Sequence[Request], burst_s: float, share_prompts: bool
    ) -> Iterator[list[tuple[int, int, float]]]:
        """Run requests to their end; see `Model.run_requests`."""
        mine: dict[int, Request] = {}
        try:
            self._begin(requests, share_prompts, mine)
            numbers = {number: i for i, number in enumerate(mine)}
            while outputs := self._outputs_of(mine, burst_s):
                for output in outputs:
                    if output.request.error is not None:
                        raise output.request.error
                events = [
                    (numbers[o.request.id], token, logprob)
                    for o in outputs
                    for token, logprob in zip(o.tokens, o.logprobs, strict=True)
                ]
                if events:
                    yield events
        finally:
            self._leave(mine)

    def _begin(
        self, requests: Sequence[Request], share_prompts: bool, mine: dict[int, Request]
    ) -> None:
        """Give requests to the scheduler, and note them by their numbers."""
        model = self._model
        for request in requests:
            check_request(model.spec, request)
        with self.lock:
            model.check_free()
            self.configure(share_prompts)
            for request in requests:
                model.call("submit", per_engine=model.copies(request))
                mine[request.id] = request
                self._outputs[request.id] = []

    def _outputs_of(self, mine: dict[int, Request], burst_s: float) -> list[Output]:
        """Return what the next steps give some requests; nothing when all have ended."""
        while True:
            with self.lock:
                found = [o for number in mine for o in self._outputs.get(number, ())]
                self._outputs.update({number: [] for number in mine if number in self._outputs})
                # an engine that has been started meanwhile has ended all requests
                if found or all(r.finish_reason is not None for r in mine.values()):
                    return found
                self._end_left()
                self._step(burst_s)

    def _step(self, burst_s: float) -> None:
        """Run a step of the requests of all threads; the lock is held."""
        model = self._model
        outputs: list[Output] = model.call("advance", burst_s, model.proposed())[0]
        for request in self._stopping.look(outputs):
            model.call("end", request.id, request.finish_reason)
        for output in outputs:
            if output.request.id in self._outputs:
                self._outputs[output.request.id].append(output)

    def _leave(self, mine: dict[int, Request]) -> None:
        """Let go of requests that are not read any further, as soon as the model is free.

        The garbage collector may call this, for a stream that was not read to its end, in any
        thread and in the middle of a step: it must not wait.
        """
        self._left.extend(mine.items())
        if self.lock.acquire(blocking=False):
            try:
                if not self._in_call:
                    self._end_left()
            finally:
                self.lock.release()

    def _end_left(self) -> None:
        """End what nobody reads; the lock is held."""
        while self._left:
            number, request = self._left.popleft()
            self._outputs.pop(number, None)
            self._stopping.forget(request)
            with contextlib.suppress(Exception):
                if request.finish_reason is None and self._model.engine is None:
                    self._model.call("end", number, "abort")
                if request.drafter is not None:
                    request.drafter.forget(request)


def _within_a_step() -> UsageError:
    return UsageError(
        "the model is asked from within its own step (by a proposer, or something that it calls); "
        "load it a second time for that"
    )

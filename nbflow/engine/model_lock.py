"""Calls of several threads to one model: serialized by a lock, with shared steps.

A thread that generates takes a turn for each step.  A step runs the requests of all threads, so
the thread that makes it leaves the results of the others where they look first.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from nbflow.engine.core import EngineCore
from nbflow.engine.interfaces import ModelRunner
from nbflow.engine.outputs import RequestDelta, TokenOutput
from nbflow.engine.request import Request
from nbflow.engine.request_validation import check_request
from nbflow_kernels.errors import UsageError


class ModelLock:
    """The lock of a model, and the requests that run on it without an engine.

    Parameters
    ----------
    model : Model
        The model.
    """

    def __init__(self, model: ModelRunner) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._in_call = False
        self._core = EngineCore(model)
        self._outputs: dict[Request, list[RequestDelta]] = {}  # not read yet
        self._left: deque[Request] = deque()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have the model for one call, or for several that belong together.

        Raises
        ------
        UsageError
            If the caller is called by the model itself, within a step: it would wait for itself.
        """
        if self._model.on_rank_thread:
            raise _within_a_step()
        with self._lock:
            if self._in_call:
                raise _within_a_step()
            yield

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Make a call to the ranks; raises as `held`."""
        with self.held():
            self._in_call = True
            try:
                yield
            finally:
                self._in_call = False

    def configure(self, share_prompts: bool = False) -> None:
        """Have the cache as what comes now would like it; the model is `held`.

        Where requests run, or a session is open, it stays as it is: they keep their pages, and what
        comes has the same result either way.
        """
        self._end_left()
        runs = any(request.finish_reason is None for request in self._outputs)
        if not runs and not (self._model.workers and self._model.workers[0].table.sequences):
            self._model.call("configure", None, None, None, share_prompts)

    def run(
        self, requests: Sequence[Request], burst_s: float, share_prompts: bool
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Run requests to their end; see `LLM.run_requests`."""
        mine: dict[Request, int] = {}
        try:
            self._begin(requests, share_prompts, mine)
            while outputs := self._outputs_of(mine, burst_s):
                for output in outputs:
                    if output.request.error is not None:
                        raise output.request.error
                events = [
                    (mine[o.request], token)
                    for o in outputs
                    for token in o.tokens
                    if token.token is not None
                ]
                if events:
                    yield events
        finally:
            self._leave(mine)

    def _begin(
        self, requests: Sequence[Request], share_prompts: bool, mine: dict[Request, int]
    ) -> None:
        """Give requests to the scheduler, and note which is which."""
        model = self._model
        for request in requests:
            check_request(model.spec, request)
        with self.held():
            model.check_free()
            self.configure(share_prompts)
            for i, request in enumerate(requests):
                (refused,) = self._core.submit([request])
                if isinstance(refused, Exception):
                    raise refused
                mine[request] = i
                self._outputs[request] = []

    def _outputs_of(self, mine: Iterable[Request], burst_s: float) -> list[RequestDelta]:
        """Return what the next steps give some requests; nothing when all have ended."""
        while True:
            with self.held():
                found = [output for request in mine for output in self._outputs[request]]
                self._outputs.update({request: [] for request in mine})
                # an engine that has been started meanwhile has ended all requests
                if found or not any(self._is_going_on(request) for request in mine):
                    return found
                self._end_left()
                self._step(burst_s)

    def _is_going_on(self, request: Request) -> bool:
        """Return whether steps will give more of a request.

        One that has ended in a step which another thread's call waited for (`Pipeline.settle`)
        stays with the scheduler until the next step gives what came out.
        """
        if request.finish_reason is None:
            return True
        engines = self._model.workers
        return bool(engines) and request in engines[0].scheduler.requests

    def _step(self, burst_s: float) -> None:
        """Run a step of the requests of all threads; the model is `held`."""
        outputs = self._core.step(burst_s)
        for output in outputs:
            if output.request in self._outputs:
                self._outputs[output.request].append(output)

    def _leave(self, mine: Iterable[Request]) -> None:
        """Let go of requests that are not read any further, as soon as the model is free.

        The garbage collector may call this, for a stream that was not read to its end, in any
        thread and in the middle of a step: it must not wait.
        """
        self._left.extend(mine)
        if self._lock.acquire(blocking=False):
            try:
                if not self._in_call:
                    self._end_left()
            finally:
                self._lock.release()

    def _end_left(self) -> None:
        """End requests that are not read any further; the model is `held`."""
        while self._left:
            request = self._left.popleft()
            self._outputs.pop(request, None)
            with contextlib.suppress(Exception):
                if request.finish_reason is None and self._model.engine is None:
                    self._core.end(request, "abort")
                else:
                    self._core.release(request)


def _within_a_step() -> UsageError:
    return UsageError(
        "the model is asked from within its own step (by a proposer, or something that it calls); "
        "load it a second time for that"
    )

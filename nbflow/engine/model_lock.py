"""Model lock: serializes calls of several threads, whose requests share steps.

A generating thread holds the lock for one step at a time.  A step runs the requests of all threads;
the thread that runs it buffers the outputs of the others.
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
    """Lock of a model, and its requests without an engine."""

    def __init__(self, model: ModelRunner) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._in_call = False
        self._core = EngineCore(model)
        self._outputs: dict[Request, list[RequestDelta]] = {}  # not read yet
        self._abandoned: deque[Request] = deque()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for one call or several.

        Raises
        ------
        UsageError
            If called from within a step of the model, which would deadlock.
        """
        if self._model.on_rank_thread:
            raise _within_a_step()
        with self._lock:
            if self._in_call:
                raise _within_a_step()
            yield

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Hold the lock during a call of the workers; raises as `held`."""
        with self.held():
            self._in_call = True
            try:
                yield
            finally:
                self._in_call = False

    def configure(self, share_prompts: bool = False) -> None:
        """Reset the KV cache with or without prefix cache; the lock is `held`.

        While requests run or a session is open, the cache stays as it is, because they keep their
        pages.  The results are the same either way.
        """
        self._end_abandoned()
        runs = any(request.finish_reason is None for request in self._outputs)
        if not runs and not (self._model.workers and self._model.workers[0].table.sequences):
            self._model.call("configure", None, None, None, share_prompts)

    def run(
        self, requests: Sequence[Request], burst_s: float, share_prompts: bool
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Run requests until they finish; see `LLM.run_requests`."""
        index_of: dict[Request, int] = {}
        try:
            self._begin(requests, share_prompts, index_of)
            while outputs := self._wait_for_outputs(index_of, burst_s):
                for output in outputs:
                    if output.request.error is not None:
                        raise output.request.error
                events = [
                    (index_of[o.request], token)
                    for o in outputs
                    for token in o.tokens
                    if token.token is not None
                ]
                if events:
                    yield events
        finally:
            self._abandon(index_of)

    def _begin(
        self, requests: Sequence[Request], share_prompts: bool, index_of: dict[Request, int]
    ) -> None:
        """Submit requests and record their indices."""
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
                index_of[request] = i
                self._outputs[request] = []

    def _wait_for_outputs(self, index_of: Iterable[Request], burst_s: float) -> list[RequestDelta]:
        """Return the next outputs of some requests; empty when all are finished."""
        while True:
            with self.held():
                found = [output for request in index_of for output in self._outputs[request]]
                self._outputs.update({request: [] for request in index_of})
                # an engine started meanwhile has ended all requests
                if found or not any(self._is_active(request) for request in index_of):
                    return found
                self._end_abandoned()
                self._step(burst_s)

    def _is_active(self, request: Request) -> bool:
        """Return whether a request is not finished or has pending outputs.

        A request that finished while the pipeline was drained for another call stays in the
        scheduler until the next step returns its outputs.
        """
        if request.finish_reason is None:
            return True
        engines = self._model.workers
        return bool(engines) and request in engines[0].scheduler.requests

    def _step(self, burst_s: float) -> None:
        """Run a step for the requests of all threads; the lock is `held`."""
        outputs = self._core.step(burst_s)
        for output in outputs:
            if output.request in self._outputs:
                self._outputs[output.request].append(output)

    def _abandon(self, index_of: Iterable[Request]) -> None:
        """End requests without a reader as soon as the model is free.

        The garbage collector calls this for an abandoned stream, in any thread and within a step:
        it must not block.
        """
        self._abandoned.extend(index_of)
        if self._lock.acquire(blocking=False):
            try:
                if not self._in_call:
                    self._end_abandoned()
            finally:
                self._lock.release()

    def _end_abandoned(self) -> None:
        """End abandoned requests; the lock is `held`."""
        while self._abandoned:
            request = self._abandoned.popleft()
            self._outputs.pop(request, None)
            with contextlib.suppress(Exception):
                if request.finish_reason is None and self._model.engine is None:
                    self._core.end(request, "abort")
                else:
                    self._core.release(request)


def _within_a_step() -> UsageError:
    return UsageError(
        "the model was called from within its own step, e.g. by a proposer; load it a second time "
        "for such calls"
    )

"""LLMEngine: continuous batching of requests from any thread.

One thread runs the steps.  Between two steps it processes new requests, cancellations and calls of
other threads.  Under mpirun the first rank broadcasts these commands once per step and the others
`follow`; every rank then makes the same scheduling decisions (`nbflow.engine.scheduler`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.engine.core import Command, EngineCore
from nbflow.engine.errors import EngineClosed, QueueFull, Unsendable
from nbflow.engine.limits import Limits, choose_limits, fit
from nbflow.engine.llm import LLM, STREAM_MULTI_STEP_S
from nbflow.engine.request import FinishReason, Request
from nbflow.engine.request_handle import OnEvents, RequestHandle
from nbflow.engine.stats import EngineStats
from nbflow.engine.worker import Worker
from nbflow.option_fields import documents
from nbflow.options import EngineOptions
from nbflow.utils.rank_status import WORKING, status
from nbflow_kernels.cpu.fork import notify_in_child
from nbflow_kernels.errors import UsageError

logger = logging.getLogger(__name__)


@documents(EngineOptions)
class LLMEngine:
    """Engine that runs a model for requests from any thread.  See docs/engine.md.

    A ``with`` statement starts and closes it.  Under mpirun every rank of the model creates one
    with the same arguments; the first submits requests, the others call `follow`.

    Parameters
    ----------
    model : LLM
        The model; its own `generate` etc. must not be called while the engine runs.
    options : EngineOptions, optional
        The options below as one object; those given as keywords replace its own.
    burst_s : float
        Seconds of a multi-step decode, while all requests decode: the largest extra delay of
        events.  New requests and cancellations end it.
    {options}

    Raises
    ------
    UsageError
        If a limit is not positive, or `kv_bytes` is smaller than a page.

    Examples
    --------
    >>> import nbflow
    >>> with nbflow.load("tiny_python") as model, nbflow.LLMEngine(model) as engine:
    ...     request = model.make_request("def __init__(self", 1, "greedy", 0, ignore_eos=False)
    ...     engine.submit(request).result().text
    ','
    """

    def __init__(
        self,
        model: LLM,
        options: EngineOptions | None = None,
        *,
        burst_s: float = STREAM_MULTI_STEP_S,
        **changes: Any,
    ) -> None:
        given = (options or EngineOptions()).replaced(changes)
        self._set_up(model, choose_limits(model, given), burst_s, given.on_failure)

    def __new__(cls, model: LLM, *_: Any, **__: Any) -> LLMEngine:
        """Create the engine class of the model: a `ReplicaRouter` for replicas."""
        special = model.engine_class
        return super().__new__(special if cls is LLMEngine and special is not None else cls)

    @classmethod
    def with_limits(cls, model: LLM, limits: Limits, burst_s: float) -> LLMEngine:
        """Return an engine with given limits."""
        engine = super().__new__(cls)
        engine._set_up(model, limits, burst_s)
        return engine

    def _set_up(
        self,
        model: LLM,
        limits: Limits,
        burst_s: float,
        on_failure: str = EngineOptions.on_failure,
    ) -> None:
        self.model = model
        self.limits = limits
        """Limits in force."""
        self._on_failure = on_failure
        self._burst_s = burst_s
        self._lock = threading.Condition()
        self._inbox: list[RequestHandle] = []
        self._cancelled: list[tuple[RequestHandle, FinishReason]] = []
        self._calls: list[tuple[Future[Any], Command]] = []
        self._handles: dict[int, RequestHandle] = {}
        self._core = EngineCore(model, broadcasts=True)
        self._thread: threading.Thread | None = None
        self._state = "new"
        self._failure: BaseException | None = None
        self._drain = False
        self._counts = EngineStats()
        notify_in_child(self)

    # ---- lifecycle ----------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """True on the rank that takes requests; the others `follow`."""
        return self.model.leads

    @property
    def alive(self) -> bool:
        """True while running: started, not closed, not failed."""
        return self.state == "running"

    def start(self) -> LLMEngine:
        """Start the engine thread; returns at once.

        Raises
        ------
        UsageError
            If it was started before, another engine runs the model, or this rank does not lead.
        """
        if not self.leads:
            raise UsageError("this rank does not lead the engine; call follow()")
        with self._lock:
            if self._state != "new":
                raise UsageError(f"an engine is started once; this one is {self._state}")
            self.model.claim(self)
            self._state = "running"
        self._launch()
        return self

    def _launch(self) -> None:
        """Start to run requests."""
        self._thread = threading.Thread(target=self._run, name="nbflow-engine", daemon=True)
        self._thread.start()

    def in_child(self) -> None:
        """Mark the engine as failed in a forked child, which lacks the engine thread."""
        is_idle = not (self._handles or self._inbox or self._calls)
        self._lock, self._thread = threading.Condition(), None
        if self._state in ("running", "closing"):
            self._state = "failed"
            self._failure = EngineClosed("it runs in the parent of this forked process")
            if is_idle:  # otherwise the model is in the middle of a step
                self.model.release(self)

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """Stop accepting requests, end the present ones, and stop.  Idempotent.

        Parameters
        ----------
        drain : bool
            True to finish all requests first; otherwise they end with "abort".
        timeout : float, optional
            Seconds to wait before aborting the remaining requests.
        """
        with self._lock:
            if self._state == "new":
                self._state = "closed"
            if self._state == "running":
                self._state, self._drain = "closing", drain
            self._drain = self._drain and drain
            self._lock.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            with self._lock:
                self._drain = False
                self._lock.notify_all()
            thread.join()

    def __enter__(self) -> LLMEngine:
        return self.start() if self.leads else self

    def __exit__(self, *_: object) -> None:
        self.close()

    def follow(self) -> None:
        """Run as a worker rank until the first rank closes the engine."""
        if self.leads:
            raise UsageError("this rank leads the engine; start it, and submit requests")
        self.model.claim(self)
        try:
            self._configure()
            self._core.follow()
        except BaseException:
            self._release_model(False)
            raise
        self._release_model(True)

    # ---- called by other threads --------------------------------------------------------------

    def submit(self, request: Request, on_events: OnEvents | None = None) -> RequestHandle:
        """Queue a request; returns at once.

        Parameters
        ----------
        request : Request
            From `LLM.make_request`; owned by the engine until it finishes.
        on_events : callable, optional
            ``on_events(handle, events)`` receives every new list of `TokenOutput`, on the engine's
            thread.

        Raises
        ------
        QueueFull
            If the waiting queue has `max_waiting` requests.
        EngineClosed
            If the engine is not running.
        UsageError
            If the request cannot run: a field is out of range, the prompt exceeds the KV cache, or
            its search needs more than `max_sequences` sequences.
        """
        fit(request, self.model, self.limits)
        handle = RequestHandle(self, request, on_events)
        with self._lock:
            self._check_running()
            if len(self._inbox) + self._n_waiting() >= self.limits.max_waiting:
                raise QueueFull(
                    f"{self.limits.max_waiting} requests wait already (max_waiting); retry later"
                )
            self._inbox.append(handle)
            self._wake()
        return handle

    def cancel(self, handle: RequestHandle, reason: FinishReason = "abort") -> None:
        """End a request with this reason, unless it is finished; see `RequestHandle.cancel`."""
        with self._lock:
            self._cancelled.append((handle, reason))
            self._wake()

    def embed(
        self,
        sequences: Sequence[Sequence[int]],
        token_types: Sequence[Sequence[int]] | None = None,
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> list[NDArray[np.float32]]:
        """Return the embeddings of several texts; parameters as in `LLM.embed_batch`.

        Submits a request for each text (`LLM.embedding_requests`) and waits for all.
        """
        requests = self.model.embedding_requests(
            sequences, token_types, pooling=pooling, normalize=normalize
        )
        handles: list[RequestHandle] = []
        try:
            for request in requests:
                handles.append(self._submit_when_free(request, handles))
            for handle in handles:
                handle.wait()
                if handle.finish_reason == "abort":
                    raise EngineClosed("the engine has been closed")
            return [handle.request.finished_vector() for handle in handles]
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()

    def _submit_when_free(self, request: Request, before: Sequence[RequestHandle]) -> RequestHandle:
        """Submit a request; while the queue is full, wait for earlier ones of this call."""
        while True:
            try:
                return self.submit(request)
            except QueueFull:
                mine = next((h for h in before if not h.done), None)
                if mine is None:  # the queue is full of other requests
                    raise
                mine.wait()

    def flush(self) -> None:
        """Clear the prefix cache; running requests keep their pages."""
        self.call("clear_prefix_cache")

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of every `Worker` between two steps; return the first rank's result.

        Raises
        ------
        Exception
            The error of the method.
        """
        if self.on_own_thread:
            raise UsageError(f"cannot call {method!r} on the engine's own thread; use another one")
        future: Future[Any] = Future()
        with self._lock:
            self._check_running()
            self._calls.append((future, (method, args)))
            self._wake()
        return future.result()

    def _wake(self) -> None:
        """Make the engine's thread look for input: now, or after the decode step that it runs."""
        self._lock.notify_all()
        self._worker.multi_step.stop()

    def stats(self) -> EngineStats:
        """Return current statistics."""
        table, scheduler = self._worker.table, self._worker.scheduler
        with self._lock:
            return dataclasses.replace(
                self._counts,
                running=len(scheduler.running),
                waiting=len(self._inbox) + self._n_waiting(),
                pages_used=table.n_used_pages,
                pages_cached=table.n_cached,
                pages_total=table.max_pages,
                prefix_queries=table.asked_tokens,
                prefix_hits=table.hit_tokens,
                preemptions=scheduler.n_preemptions,
                finished=self._counts.finished.copy(),
            )

    @property
    def load(self) -> int:
        """Sequences that run or wait."""
        with self._lock:
            handles = [*self._handles.values(), *self._inbox]
        return sum(handle.request.n_sequences for handle in handles)

    @property
    def state(self) -> str:
        """State of the engine: new, running, closing, closed or failed."""
        return self._state

    @property
    def on_own_thread(self) -> bool:
        """True on the engine's thread, which calls `on_events`."""
        return threading.current_thread() is self._thread

    @property
    def failure(self) -> BaseException | None:
        """Error that stopped a failed engine."""
        return self._failure

    @property
    def _worker(self) -> Worker:
        return self.model.workers[0]

    def _n_waiting(self) -> int:
        return len(self._worker.scheduler.waiting) if self._state == "running" else 0

    def _check_running(self) -> None:
        if self.state == "failed":
            raise EngineClosed(f"the engine has failed: {self.failure}; start another one")
        if self.state != "running":
            raise EngineClosed(f"the engine takes no requests: it is {self.state}")

    # ---- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        """Run steps until the engine is closed."""
        failure: BaseException | None = None
        try:
            self._configure()
            while self._process_inbox():
                self._step()
            self._core.broadcast(None)
        except BaseException as error:
            logger.exception("the engine has failed")
            failure = error
        with self._lock:
            self._failure = failure
            self._state = "closed" if failure is None else "failed"
            handles = [*self._handles.values(), *self._inbox]
            calls, self._calls, self._inbox = self._calls, [], []
        cause = failure if isinstance(failure, Exception) else None
        for handle in handles:
            self._end_outside_steps(handle, "abort" if cause is None else "error", cause)
        for future, _ in calls:
            future.set_exception(cause or EngineClosed("the engine has been closed"))
        self._release_model(failure is None)

    def _process_inbox(self) -> bool:
        """Wait for input and broadcast it to every rank; False to stop the engine."""
        with self._lock:
            while self._state == "running" and not (
                self._inbox or self._calls or self._cancelled or self._handles
            ):
                status.idle()
                self._lock.wait()
            new, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            calls, self._calls = self._calls, []
            closing, drain = self._state == "closing", self._drain
        if closing and not drain:
            with self._lock:  # not submitted yet; `_run` ends them
                self._inbox, self._calls = new + self._inbox, calls + self._calls
            return False
        endings = [(h, reason) for h, reason in (*cancelled, *self._expired()) if not h.done]
        try:
            self._submit_new(new)
            # after submission, so that a request cancelled early has its number
            self._end_requests(endings)
            while calls:
                self._run_call(*calls.pop(0))
        except BaseException:  # put back, so that `_run` ends them
            with self._lock:
                self._inbox = [h for h in new if h.request.id not in self._handles] + self._inbox
                self._calls = calls + self._calls
            raise
        return not (closing and not self._handles)

    def _submit_new(self, new: Sequence[RequestHandle]) -> None:
        """Submit new requests to the schedulers."""
        try:
            results = self._core.submit([h.request for h in new])
        except Unsendable as error:
            if len(new) == 1:
                self._end_outside_steps(new[0], "error", error)
            for handle in new if len(new) > 1 else ():  # one by one, so that only the bad one fails
                self._submit_new([handle])
            return
        for handle, refused in zip(new, results, strict=True):
            if isinstance(refused, Exception):
                self._end_outside_steps(handle, "error", refused)
            else:
                self._handles[handle.request.id] = handle

    def _end_requests(self, endings: Sequence[tuple[RequestHandle, FinishReason]]) -> None:
        """End requests that were cancelled or are past their deadline."""
        for handle, reason in endings:
            if handle.request.id in self._handles and not handle.done:
                text = self._core.end(handle.request, reason)
                if reason == "deadline" and handle.request.search_state is not None:
                    handle.request.found = handle.request.search_state.best_so_far()
                del self._handles[handle.request.id]
                self._end_outside_steps(handle, reason, text=text)

    def _run_call(self, future: Future[Any], command: Command) -> None:
        """Execute a call that another thread waits for."""
        try:
            (result,) = self._core.execute([command])
        except Exception as error:
            future.set_exception(error)
            if not isinstance(error, Unsendable):  # other ranks may be in the middle of it
                raise
        else:
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _expired(self) -> list[tuple[RequestHandle, FinishReason]]:
        """Return the requests past their deadline."""
        now = time.monotonic()
        return [
            (h, "deadline")
            for h in self._handles.values()
            if h.request.deadline is not None and now - h.timings.submitted > h.request.deadline
        ]

    def _step(self) -> None:
        """Run a step on every rank and deliver the new tokens."""
        if not self._handles:
            return
        started, counts = time.perf_counter(), self._counts
        deltas = self._core.step(self._burst_s)
        if self._worker.comm.size > 1:  # the watchdog covers the delivery, too
            status.set(WORKING, "the step")
        counts.step_seconds += time.perf_counter() - started
        counts.steps += 1
        for delta in deltas:
            request = delta.request
            counts.generated_tokens += sum(output.token is not None for output in delta.tokens)
            handle = self._handles[request.id]
            if handle.timings.started is None:
                counts.prompt_tokens += len(request.prompt)
            handle.push(delta)
            if request.finish_reason is not None:
                del self._handles[request.id]
                self._count_end(request, request.finish_reason)

    def _end_outside_steps(
        self,
        handle: RequestHandle,
        reason: FinishReason,
        error: Exception | None = None,
        text: str | None = None,
    ) -> None:
        """Finish a request outside of a step."""
        if not handle.done:
            self._count_end(handle.request, reason)
            handle.end(reason, error, text)

    def _count_end(self, request: Request, reason: FinishReason) -> None:
        counts = self._counts
        counts.drafted_tokens += request.n_drafted
        counts.accepted_tokens += request.n_accepted
        counts.finished[reason] += 1

    # ---- all ranks ----------------------------------------------------------------------------

    def _configure(self) -> None:
        limits = self.limits
        self.model.call(
            "configure", limits.max_step_tokens, limits.max_sequences, limits.max_pages,
            limits.prefix_cache, limits.prefix_states,
        )  # fmt: skip

    def _release_model(self, in_order: bool) -> None:
        """Release the model and the memory of its pages."""
        if in_order:
            self._core.execute([("end_all", ()), ("configure", ())], received=True)
            status.idle()
        self.model.release(self)

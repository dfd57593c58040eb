"""Serve a model: requests come and go at any time, and share its steps (continuous batching).

One thread runs the steps.  Between two of them it takes in what the other threads want: new
requests, cancellations, other calls.  Under mpirun the first rank of the model does this and tells
the others what came in, once a step; they `follow`.  All ranks then decide alike
(`nbflow.engine.scheduler`).
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.distributed.comm import RankError
from nbflow.engine.core import Command, EngineCore
from nbflow.engine.embedding import vector_of
from nbflow.engine.errors import EngineClosed, QueueFull, Unsendable
from nbflow.engine.limits import Limits, choose_limits, fit
from nbflow.engine.llm import LLM, STREAM_BURST_S
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
    """Runs a model for requests from any thread.  See docs/engine.md.

    Usable in a ``with`` statement, which starts and closes it.  Under mpirun every rank of the
    model makes one with the same arguments; the first submits, the others call `follow`.

    Parameters
    ----------
    model : Model
        The model; while the engine runs, its own `generate` and the like must not be called.
    options : EngineOptions, optional
        The options below as one object; those given as keywords replace its own.
    burst_s : float
        Where all requests generate, so many seconds of steps run in one go: events come, and new
        requests and cancellations are seen, that much later at most.
    {options}

    Raises
    ------
    UsageError
        If a limit is not positive, or `kv_bytes` too little for a page.

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
        burst_s: float = STREAM_BURST_S,
        **changes: Any,
    ) -> None:
        given = (options or EngineOptions()).replaced(changes)
        limits = choose_limits(model, given)
        self._set_up(model, limits, burst_s, given.on_failure)

    def __new__(cls, model: LLM, *_: Any, **__: Any) -> LLMEngine:
        """Return the engine that suits the model: one with replicas has a `ReplicaRouter`."""
        special = model.engine_class
        return super().__new__(special if cls is LLMEngine and special is not None else cls)

    @classmethod
    def with_limits(cls, model: LLM, limits: Limits, burst_s: float) -> LLMEngine:
        """Return an engine whose limits have been chosen before."""
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
        """The limits that are in force."""
        self._on_failure = on_failure
        self._burst_s = burst_s
        self._lock = threading.Condition()
        self._inbox: list[RequestHandle] = []
        self._cancelled: list[tuple[RequestHandle, FinishReason]] = []
        self._calls: list[tuple[Future[Any], Command]] = []
        self._handles: dict[int, RequestHandle] = {}
        self._core = EngineCore(model, self._tell)
        self._thread: threading.Thread | None = None
        self._state = "new"
        self._failure: BaseException | None = None
        self._drain = False
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self._step_seconds = 0.0
        self._finished: dict[str, int] = {}
        notify_in_child(self)

    # ---- life ---------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether requests are submitted to this rank; the others `follow`."""
        return self.model.leads

    @property
    def alive(self) -> bool:
        """Whether it runs: started, not closed, and not failed."""
        return self._state == "running"

    def start(self) -> LLMEngine:
        """Begin to run requests; returns at once.

        Raises
        ------
        UsageError
            If it was started before, the model is run by another engine, or this rank does not
            lead.
        """
        if not self.leads:
            raise UsageError("this rank does not lead the engine; call follow()")
        with self._lock:
            if self._state != "new":
                raise UsageError(f"an engine is started once; this one is {self._state}")
            self.model.claim(self)
            self._state = "running"
        self._thread = threading.Thread(target=self._run, name="nbflow-engine", daemon=True)
        self._thread.start()
        return self

    def in_child(self) -> None:
        """Be failed in a forked child: the engine's thread is in the parent."""
        is_idle = not (self._handles or self._inbox or self._calls)
        self._lock, self._thread = threading.Condition(), None
        if self._state in ("running", "closing"):
            self._state = "failed"
            self._failure = EngineClosed("it runs in the process that this one was forked from")
            if is_idle:  # else the model was left in the middle of a step
                self.model.release(self)

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, end those there are, and stop.  Closing twice does nothing.

        Parameters
        ----------
        drain : bool
            Let requests come to their end first; otherwise they end with "abort".
        timeout : float, optional
            Seconds to wait for that; what is not over then is aborted.
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
        """Work as one of the other ranks, until the first one closes the engine."""
        if self.leads:
            raise UsageError("this rank leads the engine; start it, and submit requests")
        self.model.claim(self)
        try:
            self._configure()
            while (commands := self._exchange(None)) is not None:
                self._obey(commands)
        except BaseException:
            self._leave(False)
            raise
        self._leave(True)

    # ---- what other threads call --------------------------------------------------------------

    def submit(self, request: Request, on_events: OnEvents | None = None) -> RequestHandle:
        """Let a request run; returns at once.

        Parameters
        ----------
        request : Request
            From `LLM.make_request`; the engine's until it has ended.
        on_events : callable, optional
            ``on_events(handle, events)`` is called with every new list of `TokenEvent`, on the
            engine's thread.

        Raises
        ------
        QueueFull
            If `max_waiting` requests wait.
        EngineClosed
            If the engine does not run.
        UsageError
            If the request cannot run: a field is out of range, its prompt is longer than the
            key/value cache, or its search follows more than `max_sequences` continuations.
        """
        fit(request, self.model.spec, self.limits)
        if request.stop_texts:
            _ = self.model.tokenizer  # it is needed
        handle = RequestHandle(self, request, on_events)
        with self._lock:
            self._check_running()
            if len(self._inbox) + self._n_waiting() >= self.limits.max_waiting:
                raise QueueFull(
                    f"{self.limits.max_waiting} requests wait already (max_waiting); try again "
                    "later"
                )
            self._inbox.append(handle)
            self._lock.notify_all()
        return handle

    def cancel(self, handle: RequestHandle, reason: FinishReason = "abort") -> None:
        """Let a request end with this reason, unless it has ended; see `RequestHandle.cancel`."""
        with self._lock:
            self._cancelled.append((handle, reason))
            self._lock.notify_all()

    def embed(
        self,
        sequences: Sequence[Sequence[int]],
        token_types: Sequence[Sequence[int]] | None = None,
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> list[NDArray[np.float32]]:
        """Return one vector for each of several texts; parameters as of `LLM.embed_batch`.

        Each is a request like others (`LLM.embedding_requests`); this waits for all of them.
        """
        requests = self.model.embedding_requests(
            sequences, token_types, pooling=pooling, normalize=normalize
        )
        handles: list[RequestHandle] = []
        try:
            for request in requests:
                handles.append(self._submit_patiently(request, handles))
            for handle in handles:
                handle.wait()
                if handle.finish_reason == "abort":
                    raise EngineClosed("the engine has been closed")
            return [vector_of(handle.request) for handle in handles]
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()

    def _submit_patiently(self, request: Request, before: Sequence[RequestHandle]) -> RequestHandle:
        """Submit a request; while the queue is full, wait for those submitted before."""
        while True:
            try:
                return self.submit(request)
            except QueueFull:
                mine = next((h for h in before if not h.done), None)
                if mine is None:  # others fill the queue
                    raise
                mine.wait()

    def flush(self) -> None:
        """Forget what the prefix cache holds; running requests keep what they have."""
        self.call("clear_prefix_cache")

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of `Worker` on every rank between two steps; return the first's result.

        Raises
        ------
        Exception
            What the method raised.
        """
        if self.on_own_thread:
            raise UsageError(f"{method!r} would wait for itself: this is the engine's own thread")
        future: Future[Any] = Future()
        with self._lock:
            self._check_running()
            self._calls.append((future, (method, args)))
            self._lock.notify_all()
        return future.result()

    def stats(self) -> EngineStats:
        """Return the present numbers."""
        table, scheduler = self._rank.table, self._rank.scheduler
        with self._lock:
            return EngineStats(
                running=len(scheduler.running),
                waiting=len(self._inbox) + self._n_waiting(),
                pages_used=table.n_held,
                pages_cached=table.n_cached,
                pages_total=table.max_pages,
                prefix_queries=table.asked_tokens,
                prefix_hits=table.hit_tokens,
                preemptions=scheduler.n_preemptions,
                steps=self._steps,
                step_seconds=self._step_seconds,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                drafted_tokens=self._drafted_tokens,
                accepted_tokens=self._accepted_tokens,
                finished=dict(self._finished),
            )

    @property
    def load(self) -> int:
        """How many sequences it has to do."""
        with self._lock:
            handles = [*self._handles.values(), *self._inbox]  # a copy: its thread changes it
        return sum(handle.request.width for handle in handles)

    @property
    def state(self) -> str:
        """One of new, running, closing, closed, failed."""
        return self._state

    @property
    def on_own_thread(self) -> bool:
        """True on the engine's thread, which calls listeners."""
        return threading.current_thread() is self._thread

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if it is failed."""
        return self._failure

    @property
    def _rank(self) -> Worker:
        return self.model.engines[0]

    def _n_waiting(self) -> int:
        return len(self._rank.scheduler.waiting) if self._state == "running" else 0

    def _check_running(self) -> None:
        if self._state == "failed":
            raise EngineClosed(f"the engine has failed: {self._failure}; start another one")
        if self._state != "running":
            raise EngineClosed(f"the engine takes no requests: it is {self._state}")

    # ---- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        """Run steps until the engine is closed."""
        failure: BaseException | None = None
        try:
            self._configure()
            while self._take_in():
                self._step()
            self._exchange(None)
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
            self._ended(handle, "abort" if cause is None else "error", cause)
        for future, _ in calls:
            future.set_exception(cause or EngineClosed("the engine has been closed"))
        self._leave(failure is None)

    def _take_in(self) -> bool:
        """Wait for something to do and tell every rank what is new; False if the engine is over."""
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
            with self._lock:  # they have not begun; `_run` ends them
                self._inbox, self._calls = new + self._inbox, calls + self._calls
            return False
        endings = [(h, reason) for h, reason in (*cancelled, *self._overdue()) if not h.done]
        try:
            self._begin(new)
            # a request that was cancelled before it began has got its number by now
            self._end(endings)
            while calls:
                self._answer(*calls.pop(0))
        except BaseException:  # nobody is to wait for ever
            with self._lock:
                self._inbox = [h for h in new if h.request.id not in self._handles] + self._inbox
                self._calls = calls + self._calls
            raise
        return not (closing and not self._handles)

    def _begin(self, new: Sequence[RequestHandle]) -> None:
        """Give new requests to the scheduler."""
        try:
            results = self._core.submit([h.request for h in new])
        except Unsendable as error:
            if len(new) == 1:
                self._ended(new[0], "error", error)
            for handle in new if len(new) > 1 else ():  # the others are not to suffer from one
                self._begin([handle])
            return
        for handle, refused in zip(new, results, strict=True):
            if isinstance(refused, Exception):
                self._ended(handle, "error", refused)
            else:
                self._handles[handle.request.id] = handle

    def _end(self, endings: Sequence[tuple[RequestHandle, FinishReason]]) -> None:
        """End requests for other reasons than their own."""
        for handle, reason in endings:
            if handle.request.id in self._handles and not handle.done:
                text = self._core.end(handle.request, reason)
                if reason == "deadline" and handle.request.searching is not None:
                    handle.request.found = handle.request.searching.present()
                del self._handles[handle.request.id]
                self._count_drafted(handle.request)
                self._ended(handle, reason, text=text)

    def _answer(self, future: Future[Any], command: Command) -> None:
        """Make a call that another thread waits for."""
        try:
            (result,) = self._tell([command])
        except Exception as error:
            future.set_exception(error)
            if not isinstance(error, Unsendable):  # the others may be in the middle of it
                raise
        else:
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _overdue(self) -> list[tuple[RequestHandle, FinishReason]]:
        """Return the requests whose time is over."""
        now = time.monotonic()
        return [
            (h, "deadline")
            for h in self._handles.values()
            if h.request.deadline is not None and now - h.timings.submitted > h.request.deadline
        ]

    def _step(self) -> None:
        """Run a step on every rank and pass on what it gave."""
        if not self._handles:
            return
        started = time.perf_counter()
        deltas = self._core.step(self._burst_s)
        if self._rank.comm.size > 1:  # what follows must come to an end, too
            status.set(WORKING, "the step")
        self._step_seconds += time.perf_counter() - started
        self._steps += 1
        for delta in deltas:
            request = delta.request
            self._generated_tokens += sum(output.token is not None for output in delta.tokens)
            handle = self._handles[request.id]
            if handle.timings.started is None:
                self._prompt_tokens += len(request.prompt)
            handle.push(delta)
            if request.finish_reason is not None:
                del self._handles[request.id]
                self._count_drafted(request)
                self._count_end(request.finish_reason)

    def _count_drafted(self, request: Request) -> None:
        self._drafted_tokens += request.n_drafted
        self._accepted_tokens += request.n_accepted

    def _ended(
        self,
        handle: RequestHandle,
        reason: FinishReason,
        error: Exception | None = None,
        text: str | None = None,
    ) -> None:
        """End a request outside of the steps."""
        if not handle.done:
            self._count_end(reason)
            handle.end(reason, error, text)

    def _count_end(self, reason: FinishReason) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    # ---- all ranks ----------------------------------------------------------------------------

    def _configure(self) -> None:
        limits = self.limits
        self.model.call(
            "configure", limits.max_step_tokens, limits.max_sequences, limits.max_pages,
            limits.prefix_cache,
        )  # fmt: skip

    def _leave(self, in_order: bool) -> None:
        """Give the model back, and the memory of its pages."""
        if in_order:
            self._obey([("end_all", ()), ("configure", ())])
            status.idle()
        self.model.release(self)

    def _tell(self, commands: list[Command]) -> list[Any]:
        """Let every rank obey the commands, and return the first rank's results, or errors."""
        if not commands:
            return []
        self._exchange(commands)
        return self._obey(commands)

    def _obey(self, commands: list[Command]) -> list[Any]:
        """Do what the first rank wants; an error that leaves all ranks alike is a result.

        Any other ends the engine, because the other ranks may wait for this one.
        """
        results: list[Any] = []
        for command in commands:
            try:
                results.append(self._core.run(command))
            except Exception as error:
                alike = isinstance(error, UsageError) and not isinstance(error, RankError)
                if not alike and self._rank.comm.size > 1:
                    raise
                results.append(error)
        return results

    def _exchange(self, commands: list[Command] | None) -> list[Command] | None:
        """Return the first rank's commands on every rank; None says that the engine is over."""
        if not self.model.engines or self.model.is_team or self._rank.comm.size == 1:
            return commands
        try:
            data = np.frombuffer(pickle.dumps(commands), np.uint8)
        except Exception as error:  # the others have been told nothing yet
            raise Unsendable(f"the other ranks cannot be sent this: {error}") from error
        size = np.array([data.size])
        self._rank.comm.Bcast(size, 0)
        message = data.copy() if self.leads else np.empty(int(size[0]), np.uint8)
        self._rank.comm.Bcast(message, 0)
        result: list[Command] | None = pickle.loads(message.tobytes())
        return result

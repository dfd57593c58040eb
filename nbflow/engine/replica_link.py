"""How the engine of one process tells that of another what to do: messages over a socket.

A socket and not MPI, because its end says that the other process has ended, and nobody waits for
one that will not answer.  Who connects proves that he belongs to the same run by a key that is sent
with MPI (`multiprocessing.connection`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing.connection
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nbflow.decoding.structured import StructureError
from nbflow.engine.handle import Handle, OnEvents, TokenEvent
from nbflow.engine.request import FinishReason, Request
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.engine import Engine
    from nbflow.engine.limits import Limits
    from nbflow.engine.model import Model
    from nbflow.engine.stats import EngineStats

START_S = 300.0
"""Seconds for the other replicas to connect; they have loaded their part by then."""
ANSWER_S = 0.5
"""Seconds for an answer about the present numbers; who asks may hold up others."""

Address = tuple[str, int, bytes]
"""Host, port, key."""
Connection = multiprocessing.connection.Connection

_TOLD = (
    "ids", "logprobs", "top_logprobs", "prompt_results", "cached_tokens", "n_preempted",
    "n_drafted", "n_accepted", "found", "finish_reason", "error",
)  # fmt: skip
"""What is told of a request that has ended."""

logger = logging.getLogger(__name__)


class Listener:
    """Where the other replicas connect.

    Parameters
    ----------
    hosts : sequence of str
        Names of all ranks' machines, the own one first: with one, only it is listened to.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        key = secrets.token_bytes(32)
        alone = len(set(hosts)) == 1
        self._listener = multiprocessing.connection.Listener(
            ("127.0.0.1" if alone else "", 0), backlog=len(hosts), authkey=key
        )
        name = "127.0.0.1" if alone else socket.gethostbyname(hosts[0])
        self.address: Address = (name, int(self._listener.address[1]), key)

    def accept(self, n: int) -> list[tuple[int, Connection]]:
        """Return the connections of `n` replicas with their numbers, in order.

        Raises
        ------
        UsageError
            If they do not come in time.
        """
        found: dict[int, Connection] = {}

        def wait() -> None:
            while len(found) < n:
                with contextlib.suppress(multiprocessing.AuthenticationError, EOFError, OSError):
                    connection = self._listener.accept()
                    found[connection.recv()] = connection

        waiting = threading.Thread(target=wait, name="nbflow-accept", daemon=True)
        waiting.start()
        waiting.join(START_S)
        if waiting.is_alive():
            raise UsageError(
                f"{n - len(found)} of {n} other replicas have not come within {START_S:g} s; every "
                "rank must make the engine and call follow()"
            )
        return sorted(found.items())

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


class RemoteEngine:
    """The engine of a replica in another process, as the leading one sees it.

    Parameters
    ----------
    index : int
        Which replica.
    connection : Connection
        The way to it.
    model : Model
        The model, to turn results into text.
    limits : Limits
        Those of its engine.
    """

    def __init__(self, index: int, connection: Connection, model: Model, limits: Limits) -> None:
        self.index = index
        self.model = model
        self._most = limits.max_sequences + limits.max_waiting
        self._connection = connection
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._handles: dict[int, Handle] = {}
        self._number_of: dict[Handle, int] = {}
        self._futures: dict[int, Future[Any]] = {}
        self._told: Any = None  # by `stats`
        self._closing = False
        self.alive = True
        """Whether it runs."""
        self.failure: BaseException | None = None
        """What ended it, if it is failed."""
        self._reader = threading.Thread(
            target=self._read, name=f"nbflow-replica-{index}", daemon=True
        )
        self._reader.start()

    @property
    def load(self) -> int:
        """How many sequences it has to do."""
        with self._lock:
            return sum(handle.request.width for handle in self._handles.values())

    def submit(self, request: Request, on_events: OnEvents | None = None) -> Handle:
        """See `Engine.submit`; the request stays here, a copy of it runs there."""
        from nbflow.engine.engine import QueueFull

        handle = Handle(self, request, on_events)
        with self._lock:
            self._check()
            if len(self._handles) >= self._most:
                raise QueueFull(f"{self._most} requests wait already or run; try again later")
            number = next(self._numbers)
            self._handles[number], self._number_of[handle] = handle, number
        self._send("submit", number, request)
        return handle

    def cancel(self, handle: Handle, reason: FinishReason = "abort") -> None:
        """See `Engine.cancel`."""
        with self._lock:
            number = self._number_of.get(handle)
        if number is not None:
            self._send("cancel", number, reason)

    def embed(
        self,
        sequences: Sequence[Sequence[int]],
        token_types: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[NDArray[np.float32]]:
        """See `Engine.embed`."""
        vectors: list[NDArray[np.float32]] = self._ask("embed", sequences, token_types, **options)
        return vectors

    def flush(self) -> None:
        """See `Engine.flush`."""
        self._ask("flush")

    def stats(self) -> EngineStats:
        """See `Engine.stats`; the last numbers that were told, if there is no answer at once."""
        try:
            self._told = self._ask("stats", timeout=ANSWER_S)
        except TimeoutError:
            if self._told is None:
                raise
        numbers: EngineStats = self._told
        return numbers

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """See `Engine.close`."""
        self._closing = True
        self._send("close", 0, drain, timeout)
        self._reader.join()

    def _ask(self, method: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:
        """Call a method of the engine there and return what it returns."""
        future: Future[Any] = Future()
        with self._lock:
            self._check()
            number = next(self._numbers)
            self._futures[number] = future
        self._send("call", number, method, args, options)
        return future.result(timeout)

    def _check(self) -> None:
        from nbflow.engine.engine import EngineClosed

        if not self.alive:
            raise EngineClosed(f"replica {self.index} does not run: {self.failure}")

    def _send(self, *message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # its end is seen by the reader
            self._connection.send(message)

    def _read(self) -> None:
        """Pass on what the replica tells, until it ends."""
        from nbflow.engine.engine import EngineClosed

        try:
            while True:
                for kind, number, *facts in self._connection.recv():
                    if kind == "end":
                        self._lost(facts[0])
                    elif kind == "events":
                        self._pass_on(number, *facts)
                    else:
                        self._answer(number, *facts)
        except (EOFError, OSError):
            self._lost(None if self._closing else EngineClosed("its process has ended"))
        except Exception as error:  # what came cannot be read
            logger.exception("replica %d is given up", self.index)
            self._lost(error)
        self._connection.close()

    def _lost(self, failure: BaseException | None) -> None:
        """Give up what it was to do; without a failure it was told to end."""
        from nbflow.engine.engine import EngineClosed

        with self._lock:
            self.alive = False
            self.failure = self.failure or failure
            handles, futures = list(self._handles.values()), list(self._futures.values())
            self._handles, self._number_of, self._futures = {}, {}, {}
        ended = EngineClosed(f"replica {self.index} has ended: {failure or 'closed'}")
        if failure is not None:
            logger.error("replica %d has ended: %s", self.index, failure)
        for handle in handles:
            handle.end(*("abort", None) if failure is None else ("error", ended))
        for future in futures:
            future.set_exception(ended)

    def _pass_on(self, number: int, events: list[TokenEvent], facts: dict[str, Any]) -> None:
        with self._lock:
            handle = self._handles.get(number)
            if handle is not None and events[-1].finish_reason is not None:
                del self._handles[number], self._number_of[handle]
        if handle is not None:
            handle.relay(events, facts)

    def _answer(self, number: int, result: Any, error: Exception | None) -> None:
        with self._lock:
            future = self._futures.pop(number, None)
        if future is None:
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def obey(engine: Engine, index: int, address: Address, draft: Model | None) -> None:
    """Run an engine for the leading process, until that says that it is over, or ends.

    Parameters
    ----------
    engine : Engine
        The engine of this replica; it is started and closed here.
    index : int
        Which replica.
    address : Address
        Where the leading process listens.
    draft : Model, optional
        Proposes tokens to requests that want some and bring nobody.
    """
    host, port, key = address
    connection = multiprocessing.connection.Client((host, port), authkey=key)
    connection.send(index)
    servant = _Servant(engine, connection, draft)
    engine.start()
    try:
        servant.run()
    finally:
        engine.close()
        servant.end()


class _Servant:
    """Does what the leading process says, and tells it what becomes of it."""

    def __init__(self, engine: Engine, connection: Connection, draft: Model | None) -> None:
        self._engine, self._connection, self._draft = engine, connection, draft
        self._handles: dict[int, Handle] = {}
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._pool = ThreadPoolExecutor(8, "nbflow-replica-call")
        self._writer = threading.Thread(target=self._write, name="nbflow-replica-out", daemon=True)
        self._writer.start()

    def run(self) -> None:
        """Take messages until the last one."""
        with contextlib.suppress(EOFError, OSError):  # the leading process has ended
            while True:
                kind, number, *facts = self._connection.recv()
                if kind == "submit":
                    self._submit(number, facts[0])
                elif kind == "cancel" and number in self._handles:
                    self._handles[number].cancel(facts[0])
                elif kind == "call":
                    self._pool.submit(self._call, number, *facts)
                elif kind == "close":
                    self._engine.close(*facts)
                    return

    def end(self) -> None:
        """Send what is left to say, and end."""
        self._pool.shutdown(cancel_futures=True)
        self._out.put(None)
        self._writer.join()
        self._connection.close()

    def _submit(self, number: int, request: Request) -> None:
        if request.n_proposed and request.proposer is None and self._draft is not None:
            request.drafter = self._draft.drafter
        told = False

        def on_events(handle: Handle, events: list[TokenEvent]) -> None:
            nonlocal told
            names: tuple[str, ...] = ()
            if events[-1].finish_reason is not None:
                names = _TOLD
                self._handles.pop(number, None)
            elif not told:
                names = ("cached_tokens", "prompt_results")
            told = True
            facts = {name: getattr(handle.request, name) for name in names}
            if facts.get("error") is not None:
                facts["error"] = _sendable(facts["error"])
            self._out.put(("events", number, [_plain(e) for e in events], facts))
            if self._engine.failure is not None:  # this process waits to be told to end
                self._out.put(("end", 0, _sendable(self._engine.failure)))

        try:
            self._handles[number] = self._engine.submit(request, on_events)
        except UsageError as error:
            event = TokenEvent(None, finish_reason="error", error=_sendable(error))
            facts = {"finish_reason": "error", "error": event.error}
            self._out.put(("events", number, [event], facts))

    def _call(self, number: int, method: str, args: Any, options: Any) -> None:
        try:
            result = getattr(self._engine, method)(*args, **options)
        except Exception as error:
            self._out.put(("answer", number, None, _sendable(error)))
        else:
            self._out.put(("answer", number, result, None))

    def _write(self) -> None:
        """Send what there is to say, all that came meanwhile in one message."""
        while (first := self._out.get()) is not None:
            messages, last = [first], False
            while not self._out.empty():
                more = self._out.get()
                if more is None:
                    last = True
                    break
                messages.append(more)
            with contextlib.suppress(OSError):
                self._connection.send(messages)
            if last:
                return


def _plain(event: TokenEvent) -> TokenEvent:
    """Return an event whose error can be sent."""
    if event.error is None:
        return event
    return TokenEvent(event.token, finish_reason=event.finish_reason, error=_sendable(event.error))


def _sendable(error: BaseException) -> Exception:
    """Return an error that another process can read: of our kinds as it is, else its text."""
    if isinstance(error, UsageError) and type(error) in (UsageError, StructureError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")

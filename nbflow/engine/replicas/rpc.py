"""RPC between the engines of replicas over a socket.

Unlike MPI, a socket reports the death of its peer, so that callers do not hang.  Processes
authenticate with a key broadcast by MPI (`multiprocessing.connection`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import pickle
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from nbflow.engine.errors import EngineClosed, QueueFull, sendable
from nbflow.engine.limits import Limits
from nbflow.engine.llm import LLM
from nbflow.engine.llm_engine import LLMEngine
from nbflow.engine.outputs import TokenOutput
from nbflow.engine.replicas.address import (
    ADDRESS_ENV,
    REFUSED,
    Connection,
    SocketAddress,
    accept_handshake,
    addresses_towards,
    clear_timeout,
    configured_address,
    connect,
    listen,
)
from nbflow.engine.request import FinishReason, Request
from nbflow.engine.request_handle import OnEvents, RequestHandle
from nbflow.engine.stats import EngineStats
from nbflow_kernels.errors import UsageError

START_S = 300.0
"""Seconds for the other replicas to connect, after loading."""
REPORT_S = 0.25
"""Least seconds between two statistics reports of a replica."""
MAX_UNAUTHENTICATED = 32
"""Most unauthenticated connections at a time."""

Address = tuple[list[SocketAddress], bytes]
"""Addresses of the leading process, in the order to try, and the key."""

_FINAL_FIELDS = (
    "ids", "logprobs", "top_logprobs", "prompt_results", "cached_tokens", "n_preempted",
    "n_drafted", "n_accepted", "found", "vector", "finish_reason", "stop_reason",
    "error",
)  # fmt: skip
"""Fields sent for a finished request."""

logger = logging.getLogger(__name__)


class Listener:
    """Listening socket for the other replicas.

    Parameters
    ----------
    ranks : sequence of dict
        `Worker.host_addresses` of all ranks, the own first.  One host uses the loopback interface
        only, several the addresses that the other hosts reach.
    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        self._key = secrets.token_bytes(32)
        here, given = ranks[0]["host"], configured_address()
        others = {rank["host"]: rank["addresses"] for rank in ranks if rank["host"] != here}
        if given is not None:
            own = [given]
        else:
            own = addresses_towards(list(others.values())) if others else ["127.0.0.1"]
        if not own:
            raise UsageError(
                f"{here} has no address that leads to {', '.join(others)}; set {ADDRESS_ENV} to "
                "one that the other hosts reach"
            )
        self._sockets = [listen(address, len(ranks)) for address in own]
        ports = [int(listening.getsockname()[1]) for listening in self._sockets]
        self.address: Address = list(zip(own, ports, strict=True)), self._key

    def accept(self, n: int) -> list[tuple[int, Connection]]:
        """Return the connections of `n` replicas with their indices, in order.

        Closes the listener afterwards.  A silent peer does not delay others.
        """
        found: dict[int, Connection] = {}
        came = threading.Condition()
        free = threading.BoundedSemaphore(n + MAX_UNAUTHENTICATED)

        def greet(accepted: socket.socket) -> None:
            try:
                connection = accept_handshake(accepted, self._key)
                index = connection.recv()
                clear_timeout(connection)
            except REFUSED:
                return
            finally:
                free.release()
            with came:
                found[index] = connection
                came.notify_all()

        def wait(listening: socket.socket) -> None:
            with contextlib.suppress(OSError):  # it is closed
                while free.acquire():
                    accepted, _ = listening.accept()
                    threading.Thread(target=greet, args=(accepted,), daemon=True).start()

        for listening in self._sockets:
            threading.Thread(
                target=wait, args=(listening,), name="nbflow-accept", daemon=True
            ).start()
        with came:
            came.wait_for(lambda: len(found) >= n, START_S)
        self.close()
        if len(found) < n:
            raise UsageError(
                f"{n - len(found)} of {n} other replicas did not connect within {START_S:g} s; "
                "every rank must create the engine and call follow()"
            )
        return sorted(found.items())

    def close(self) -> None:
        """Stop listening."""
        for listening in self._sockets:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes threads in accept
            listening.close()


class RemoteEngine:
    """Client for the engine of a replica in another process."""

    def __init__(self, index: int, connection: Connection, model: LLM, limits: Limits) -> None:
        self.index = index
        self.model = model
        self._most = limits.max_sequences + limits.max_waiting
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._handles: dict[int, RequestHandle] = {}
        self._number_of: dict[RequestHandle, int] = {}
        self._futures: dict[int, Future[Any]] = {}
        self._last_stats: EngineStats | None = None
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        self._closing = False
        self.alive = True
        """True while running."""
        self.failure: BaseException | None = None
        """Error that stopped a failed engine."""
        self._reader = threading.Thread(
            target=self._read, name=f"nbflow-replica-{index}", daemon=True
        )
        self._reader.start()
        threading.Thread(
            target=self._write, name=f"nbflow-replica-{index}-out", daemon=True
        ).start()

    @property
    def on_own_thread(self) -> bool:
        """True on the thread that calls `on_events`."""
        return threading.current_thread() is self._reader

    @property
    def load(self) -> int:
        """Sequences that run or wait there."""
        with self._lock:
            return sum(handle.request.n_sequences for handle in self._handles.values())

    def submit(self, request: Request, on_events: OnEvents | None = None) -> RequestHandle:
        """See `LLMEngine.submit`; a copy of the request runs there."""
        handle, number = RequestHandle(self, request, on_events), next(self._numbers)
        try:
            message = pickle.dumps(("submit", number, request))
        except Exception as error:
            raise UsageError(f"cannot send this to replica {self.index}: {error}") from error
        with self._lock:
            self._check()
            if len(self._handles) >= self._most:
                raise QueueFull(f"{self._most} requests run or wait already; retry later")
            self._handles[number], self._number_of[handle] = handle, number
            self._out.put(message)
        return handle

    def cancel(self, handle: RequestHandle, reason: FinishReason = "abort") -> None:
        """See `LLMEngine.cancel`."""
        with self._lock:
            number = self._number_of.get(handle)
        if number is not None:
            self._send("cancel", number, reason)

    def flush(self) -> None:
        """See `LLMEngine.flush`."""
        self._ask("flush")

    def stats(self) -> EngineStats | None:
        """See `LLMEngine.stats`; the last report, about `REPORT_S` old at most."""
        self._check()
        return self._last_stats

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """See `LLMEngine.close`."""
        self._closing = True
        self._send("close", 0, drain, timeout)
        self._reader.join()

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the remote engine and return its result."""
        future: Future[Any] = Future()
        with self._lock:
            self._check()
            number = next(self._numbers)
            self._futures[number] = future
        self._send("call", number, method, args, options)
        return future.result()

    def _check(self) -> None:
        if not self.alive:
            raise EngineClosed(f"replica {self.index} is not running: {self.failure}")

    def _send(self, *message: Any) -> None:
        """Queue a message for the writer thread."""
        self._out.put(pickle.dumps(message))

    def _write(self) -> None:
        """Send queued messages; only this thread blocks on the socket."""
        with contextlib.suppress(OSError):  # the reader handles the end
            while (message := self._out.get()) is not None:
                self._connection.send_bytes(message)

    def _read(self) -> None:
        """Deliver messages of the replica until it ends."""
        try:
            while True:
                for kind, number, *facts in self._connection.recv():
                    if kind == "end":
                        self._lost(facts[0])
                    elif kind == "events":
                        self._pass_on(number, *facts)
                    elif kind == "stats":
                        self._last_stats = facts[0]
                    else:
                        self._answer(number, *facts)
        except (EOFError, OSError):
            self._lost(None if self._closing else EngineClosed("its process has ended"))
        except Exception as error:  # unreadable message
            logger.exception("replica %d sent an unreadable message", self.index)
            self._lost(error)
        self._out.put(None)
        self._connection.close()

    def _lost(self, failure: BaseException | None) -> None:
        """Fail pending requests and calls; without a failure the end was requested."""
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

    def _pass_on(self, number: int, events: list[TokenOutput], facts: dict[str, Any]) -> None:
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


def serve_replica(engine: LLMEngine, index: int, address: Address, draft: LLM | None) -> None:
    """Run the engine of a replica for the leading process until that closes it or ends.

    `draft` is the draft model of requests without proposer.
    """
    connection = connect(*address)
    connection.send(index)
    server = _ReplicaServer(engine, connection, draft)
    engine.start()
    try:
        server.run()
    finally:
        engine.close()
        server.end()


class _ReplicaServer:
    """Executes the commands of the leading process and sends back events."""

    def __init__(self, engine: LLMEngine, connection: Connection, draft: LLM | None) -> None:
        self._engine, self._connection, self._draft = engine, connection, draft
        self._handles: dict[int, RequestHandle] = {}
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._pool = ThreadPoolExecutor(8, "nbflow-replica-call")
        self._writer = threading.Thread(target=self._write, name="nbflow-replica-out", daemon=True)
        self._writer.start()
        self._ended = threading.Event()
        threading.Thread(target=self._report, name="nbflow-replica-stats", daemon=True).start()

    def run(self) -> None:
        """Execute commands until "close"."""
        with contextlib.suppress(EOFError, OSError):  # the leading process ended
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
        """Flush the queue and close the connection."""
        self._pool.shutdown(cancel_futures=True)
        self._ended.set()
        self._out.put(None)
        self._writer.join()
        self._connection.close()

    def _submit(self, number: int, request: Request) -> None:
        if request.n_proposed and request.proposer is None and self._draft is not None:
            request.drafter = self._draft.drafter
        told = False

        def on_events(handle: RequestHandle, events: list[TokenOutput]) -> None:
            nonlocal told
            names: tuple[str, ...] = ()
            if events[-1].finish_reason is not None:
                names = _FINAL_FIELDS
                self._handles.pop(number, None)
            elif not told:
                names = ("cached_tokens", "prompt_results")
            told = True
            facts = {name: getattr(handle.request, name) for name in names}
            if facts.get("error") is not None:
                facts["error"] = sendable(facts["error"])
            self._out.put(("events", number, [_plain(e) for e in events], facts))
            if self._engine.failure is not None:  # "close" still follows
                self._out.put(("end", 0, sendable(self._engine.failure)))

        try:
            self._handles[number] = self._engine.submit(request, on_events)
        except Exception as error:  # the engine refused the request
            event = TokenOutput(None, finish_reason="error", error=sendable(error))
            facts = {"finish_reason": "error", "error": event.error}
            self._out.put(("events", number, [event], facts))

    def _call(self, number: int, method: str, args: Any, options: Any) -> None:
        try:
            result = getattr(self._engine, method)(*args, **options)
        except Exception as error:
            self._out.put(("answer", number, None, sendable(error)))
        else:
            self._out.put(("answer", number, result, None))

    def _report(self) -> None:
        """Report statistics periodically."""
        told = None
        while not self._ended.is_set():
            numbers = self._engine.stats()
            if numbers != told:
                told = numbers
                self._out.put(("stats", 0, numbers))
            self._ended.wait(REPORT_S)

    def _write(self) -> None:
        """Send queued messages in batches."""
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


def _plain(event: TokenOutput) -> TokenOutput:
    """Return an event with a picklable error."""
    if event.error is None:
        return event
    return dataclasses.replace(event, error=sendable(event.error))

"""Ranks as threads of one process: the same code as under mpirun, without MPI.

A rank that raises breaks the next communication of the others (`RankFailure`); waiting for a rank
times out after three times ``NBFLOW_HANG_S`` seconds (300).  A `UsageError` that all ranks raise
alike rejects the call, and the ranks stay usable.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from nbflow.distributed.comm import Comm, RankError, SelfComm
from nbflow.distributed.thread_collectives import ThreadCollectives
from nbflow.utils.rank_status import hang_seconds, status
from nbflow_kernels.cpu.graph import GraphNode
from nbflow_kernels.errors import UsageError


class RankFailure(RuntimeError):
    """Failure of another rank, whose own error is the cause."""


_FAILED = object()
_REFUSED = object()
"""Sentinel in place of the next message of a rank that left the call with a `UsageError`."""


class _Shared:
    """Shared state of a communicator: a queue for each pair of ranks, memory of captured calls."""

    def __init__(self, size: int, failed: threading.Event) -> None:
        self.size = size
        self.queues = {(a, b): SimpleQueue[Any]() for a in range(size) for b in range(size)}
        self.captured = ThreadCollectives(size)
        self.failed = failed
        self.groups: dict[tuple[int, ...], _Shared] = {}
        self.lock = threading.Lock()

    def abort(self) -> None:
        """Wake every waiting rank, now and later."""
        self.failed.set()
        self.captured.fail()
        for queue in self.queues.values():
            queue.put(_FAILED)
        with self.lock:
            groups = list(self.groups.values())
        for group in groups:
            group.abort()

    def refuse(self, rank: int) -> None:
        """Break the messages that others expect from this rank in the present call."""
        self.captured.fail()
        for (source, _), queue in self.queues.items():
            if source == rank:
                queue.put(_REFUSED)
        for ranks, group in list(self.groups.items()):
            if rank in ranks:
                group.refuse(ranks.index(rank))

    def captured_has_failed(self) -> bool:
        """Return whether an exchange of a graph, here or in a group, ended without its result."""
        groups = list(self.groups.values())
        return self.captured.has_failed or any(g.captured_has_failed() for g in groups)

    def clear_refusals(self) -> None:
        """Remove the sentinels of `refuse` while no rank runs; messages in flight stay."""
        for queue in self.queues.values():
            kept = [value for value in _drained(queue) if value is not _REFUSED]
            for value in kept:
                queue.put(value)
        self.captured.clear()
        for group in list(self.groups.values()):
            group.clear_refusals()


def _drained(queue: SimpleQueue[Any]) -> list[Any]:
    """Empty a queue and return its values."""
    return [queue.get() for _ in range(queue.qsize())]


class ThreadComm(Comm):
    """Communicator of one thread rank; `ThreadRanks` makes them."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        super().__init__()
        self._shared = shared
        self.rank = rank
        self.size = shared.size

    def _put(self, value: Any, dest: int) -> None:
        self._shared.queues[self.rank, dest].put(value)

    def _take(self, source: int) -> Any:
        queue = self._shared.queues[source, self.rank]
        limit = 3 * hang_seconds()
        try:
            value = queue.get(timeout=limit)
        except Empty:
            raise RankFailure(
                f"rank {self.rank} has waited for rank {source} of {self.size} for {limit:g} s "
                f"{status.activity}"
            ) from None
        if value is _FAILED:
            queue.put(_FAILED)
            raise RankFailure("another rank of this process has failed")
        if value is _REFUSED:
            raise RankFailure(f"rank {source} left the call with an error")
        return value

    def _all_gather(self, value: Any) -> list[Any]:
        """Send `value` to all other ranks; return the values of all ranks in order."""
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            self._put(value, r)
        return [value if r == self.rank else self._take(r) for r in range(self.size)]

    def _allgatherv(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        # a copy: the sender may overwrite its array
        np.concatenate(self._all_gather(part.copy()), out=whole)

    def captured_all_reduce(self, array: np.ndarray) -> GraphNode | None:
        return self._captured.all_reduce(array, self.rank) if self._can_capture else None

    def captured_all_gather(
        self, part: np.ndarray, whole: np.ndarray, widths: Sequence[int]
    ) -> GraphNode | None:
        if not self._can_capture:
            return None
        return self._captured.all_gather(part, whole, widths, self.rank)

    @property
    def _captured(self) -> ThreadCollectives:
        return self._shared.captured

    @property
    def _can_capture(self) -> bool:
        return self._captures and self._captured.can_capture

    def agree_to_capture(self, can_capture: bool) -> None:
        self._captures = all(self._all_gather(can_capture))

    def bytes_sent(self) -> Counter[str]:
        return self.sent + self._captured.bytes_sent(self.rank)

    def _send(self, array: np.ndarray, dest: int) -> None:
        self._put(array.copy(), dest)

    def Recv(self, array: np.ndarray, source: int) -> None:
        np.copyto(array, self._take(source))

    def _bcast(self, array: np.ndarray, root: int) -> None:
        if self.rank != root:
            np.copyto(array, self._take(root))
            return
        copy = array.copy()
        for r in range(self.size):
            if r != root:
                self._put(copy, r)

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        return self._all_gather(value)[root]

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        values = self._all_gather(value)
        return values if self.rank == root else None

    def barrier(self) -> None:
        self._all_gather(None)

    def split(self, ranks: Sequence[int]) -> Comm | None:
        key = tuple(ranks)
        with self._shared.lock:
            group = self._shared.groups.setdefault(key, _Shared(len(key), self._shared.failed))
        self.barrier()
        if self.rank not in key:
            return None
        return SelfComm() if len(key) == 1 else ThreadComm(group, key.index(self.rank))

    def check_captured(self) -> None:
        """Raise if an exchange of a graph, which cannot raise itself, ended without its result.

        Raises
        ------
        RankFailure
            If a rank waited too long for the others, or another rank left the call.
        """
        if self._shared.captured_has_failed():
            raise RankFailure(
                f"rank {self.rank} has not got the result of an exchange: another rank failed, or "
                f"did not arrive within {3 * hang_seconds():g} s"
            )

    def abort(self) -> None:
        """Break all present and future communication of the other ranks."""
        self._shared.abort()

    def refuse(self) -> None:
        """Break the communication of the present call that needs this rank."""
        self._shared.refuse(self.rank)


class ThreadRanks:
    """Threads, one per rank, that run the same functions."""

    def __init__(self, size: int) -> None:
        self.size = size
        shared = _Shared(size, threading.Event())
        self._calls = [SimpleQueue[Any]() for _ in range(size)]
        self._results: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._shared = shared
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(ThreadComm(shared, rank), self._calls[rank], self._results),
                daemon=True,
                name=f"nbflow-rank-{rank}",
            )
            for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[[Comm], Any]) -> list[Any]:
        """Call ``function(comm)`` on every rank and return the results in order.

        Raises
        ------
        UsageError
            If every rank raised it with the same message; the ranks stay usable.
        Exception
            The first error that no other rank caused; further calls fail.
        """
        if self._shared.failed.is_set():
            raise RankFailure("a rank has failed or was interrupted before; load the model again")
        for calls in self._calls:
            calls.put(function)
        results: list[Any] = [None] * self.size
        failures: dict[int, BaseException] = {}
        try:
            for _ in range(self.size):
                rank, result, failure = self._results.get()
                results[rank] = result
                if failure is not None:
                    failures[rank] = failure
        except BaseException:  # Ctrl-C while waiting: stop the ranks, too
            self._shared.abort()
            raise
        if not failures:
            return results
        cause = min(failures.values(), key=lambda f: isinstance(f, RankFailure))
        messages = {_refusal(failure) for failure in failures.values()}
        if len(failures) == self.size and len(messages) == 1 and "" not in messages:
            self._shared.clear_refusals()
        else:
            self._shared.abort()
        raise cause

    def holds_this_thread(self) -> bool:
        """Return True if the caller is one of the ranks."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads."""
        for calls in self._calls:
            calls.put(None)


def _serve(
    comm: ThreadComm,
    calls: SimpleQueue[Any],
    results: SimpleQueue[tuple[int, Any, BaseException | None]],
) -> None:
    while (function := calls.get()) is not None:
        try:
            result = function(comm)
            comm.check_captured()
        except BaseException as error:
            if _refusal(error):
                comm.refuse()
            else:
                comm.abort()
            results.put((comm.rank, None, error))
        else:
            results.put((comm.rank, result, None))


def _refusal(error: BaseException) -> str:
    """Return the text of an error that all ranks may raise alike; empty for other errors."""
    is_alike = isinstance(error, UsageError) and not isinstance(error, RankError)
    return f"{type(error).__name__}: {error}" if is_alike else ""

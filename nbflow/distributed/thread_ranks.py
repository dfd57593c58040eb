"""Ranks as threads of one process, for laptops and tests: the same code as under mpirun.

A rank that raises breaks the others' next exchange (`RankFailure`); one that stands still does so
after three times ``NBFLOW_HANG_S`` seconds (300), so nobody waits for ever.  A `UsageError` that
all ranks raise alike is the answer to a wrong call: the ranks take the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from nbflow.distributed.comm import Alone, Comm, RankError
from nbflow.utils.rank_status import hang_seconds, status
from nbflow_kernels.errors import UsageError


class RankFailure(RuntimeError):
    """Another rank has failed; its own error is the cause to look at."""


_FAILED = object()
_REFUSED = object()
"""Stands where the next message of a rank would be that has left the call with a `UsageError`."""


class _Shared:
    """What the ranks of one communicator have in common: a queue for each pair of ranks."""

    def __init__(self, size: int, failed: threading.Event) -> None:
        self.size = size
        self.mail = {(a, b): SimpleQueue[Any]() for a in range(size) for b in range(size)}
        self.failed = failed
        self.groups: dict[tuple[int, ...], _Shared] = {}
        self.lock = threading.Lock()

    def abort(self) -> None:
        """Wake up every rank that waits, now or later."""
        self.failed.set()
        for queue in self.mail.values():
            queue.put(_FAILED)
        with self.lock:
            groups = list(self.groups.values())
        for group in groups:
            group.abort()

    def refuse(self, rank: int) -> None:
        """Break what the others would receive from this rank in the present call."""
        for (source, _), queue in self.mail.items():
            if source == rank:
                queue.put(_REFUSED)
        for ranks, group in list(self.groups.items()):
            if rank in ranks:
                group.refuse(ranks.index(rank))

    def forget_refusals(self) -> None:
        """Take back what `refuse` has put; no rank runs.  Messages under way stay."""
        for queue in self.mail.values():
            kept = [value for value in _drained(queue) if value is not _REFUSED]
            for value in kept:
                queue.put(value)
        for group in list(self.groups.values()):
            group.forget_refusals()


def _drained(queue: SimpleQueue[Any]) -> list[Any]:
    """Return all that lies in a queue, which is empty then."""
    return [queue.get() for _ in range(queue.qsize())]


class Threads(Comm):
    """One rank among several threads; `RankTeam` makes them."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        super().__init__()
        self._shared = shared
        self.rank = rank
        self.size = shared.size

    def _put(self, value: Any, dest: int) -> None:
        self._shared.mail[self.rank, dest].put(value)

    def _take(self, source: int) -> Any:
        queue = self._shared.mail[source, self.rank]
        limit = 3 * hang_seconds()
        try:
            value = queue.get(timeout=limit)
        except Empty:
            raise RankFailure(
                f"rank {self.rank} has waited for rank {source} of its {self.size} for {limit:g} s "
                f"{status.activity}"
            ) from None
        if value is _FAILED:
            queue.put(_FAILED)
            raise RankFailure("another rank of this process has failed")
        if value is _REFUSED:
            raise RankFailure(f"rank {source} has left the call with an error of its own")
        return value

    def _share(self, value: Any) -> list[Any]:
        """Give `value` to all other ranks and return those of all ranks, in order."""
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            self._put(value, r)
        return [value if r == self.rank else self._take(r) for r in range(self.size)]

    def _exchange(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        # a copy, because the sender goes on to overwrite its part
        np.concatenate(self._share(part.copy()), out=whole)

    def Send(self, array: np.ndarray, dest: int) -> None:
        self._put(array.copy(), dest)
        self.sent["send"] += array.nbytes

    def Recv(self, array: np.ndarray, source: int) -> None:
        np.copyto(array, self._take(source))

    def Bcast(self, array: np.ndarray, root: int) -> None:
        if self.rank != root:
            np.copyto(array, self._take(root))
            return
        copy = array.copy()
        for r in range(self.size):
            if r != root:
                self._put(copy, r)
        self.sent["broadcast"] += array.nbytes * (self.size - 1)

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        return self._share(value)[root]

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        values = self._share(value)
        return values if self.rank == root else None

    def barrier(self) -> None:
        self._share(None)

    def split(self, ranks: Sequence[int]) -> Comm | None:
        key = tuple(ranks)
        with self._shared.lock:
            group = self._shared.groups.setdefault(key, _Shared(len(key), self._shared.failed))
        self.barrier()
        if self.rank not in key:
            return None
        return Alone() if len(key) == 1 else Threads(group, key.index(self.rank))

    def abort(self) -> None:
        """Break every exchange the other ranks are in or will enter."""
        self._shared.abort()

    def refuse(self) -> None:
        """Break the exchanges of the present call that need this rank."""
        self._shared.refuse(self.rank)


class RankTeam:
    """`size` threads, one per rank, that run the same function when told to."""

    def __init__(self, size: int) -> None:
        self.size = size
        shared = _Shared(size, threading.Event())
        self._inboxes = [SimpleQueue[Any]() for _ in range(size)]
        self._outbox: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._shared = shared
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(Threads(shared, rank), self._inboxes[rank], self._outbox),
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
            If every rank raised it with the same words; the ranks then take further calls.
        Exception
            The first error of a rank that is not the mere consequence of another's; no further
            call is possible.
        """
        if self._shared.failed.is_set():
            raise RankFailure("a rank has failed or was interrupted before; load the model again")
        for inbox in self._inboxes:
            inbox.put(function)
        results: list[Any] = [None] * self.size
        failures: dict[int, BaseException] = {}
        try:
            for _ in range(self.size):
                rank, result, failure = self._outbox.get()
                results[rank] = result
                if failure is not None:
                    failures[rank] = failure
        except BaseException:  # Ctrl-C while waiting: the ranks must not go on alone
            self._shared.abort()
            raise
        if not failures:
            return results
        cause = min(failures.values(), key=lambda f: isinstance(f, RankFailure))
        words = {_refusal(failure) for failure in failures.values()}
        if len(failures) == self.size and len(words) == 1 and "" not in words:
            self._shared.forget_refusals()
        else:
            self._shared.abort()
        raise cause

    def holds_this_thread(self) -> bool:
        """Return whether the caller is one of the ranks."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Let the threads end."""
        for inbox in self._inboxes:
            inbox.put(None)


def _serve(
    comm: Threads,
    inbox: SimpleQueue[Any],
    outbox: SimpleQueue[tuple[int, Any, BaseException | None]],
) -> None:
    while (function := inbox.get()) is not None:
        try:
            result = function(comm)
        except BaseException as error:
            if _refusal(error):
                comm.refuse()
            else:
                comm.abort()
            outbox.put((comm.rank, None, error))
        else:
            outbox.put((comm.rank, result, None))


def _refusal(error: BaseException) -> str:
    """Return the words of an error that the other ranks may have, too; empty for all others."""
    is_alike = isinstance(error, UsageError) and not isinstance(error, RankError)
    return f"{type(error).__name__}: {error}" if is_alike else ""

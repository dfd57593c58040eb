"""Threads that prepare requests and write long answers, so that the event loop is never held up.

They are few, because much of this work holds Python's interpreter lock: a stream waits for it at
most as long as all of them have it once.  A client that hangs up frees its place in the queue, and
the end of the server waits for none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from nbflow.server.stream import unless_gone

T = TypeVar("T")
N_THREADS = 4


class Gone(Exception):
    """The request that a worker works for is not wanted any more."""


@dataclass(eq=False)
class _Task:
    """A call, and where its result goes."""

    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    @property
    def gone(self) -> bool:
        """True once the result is not wanted any more."""
        return self.future.cancelled()

    def run(self) -> None:
        """Make the call and send what comes of it to the event loop."""
        result, error = None, None
        try:
            result = self.context.run(self.call)
        except Gone:
            return
        except BaseException as raised:  # also panics of compiled libraries
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._end, result, error)

    def _end(self, result: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


_present = threading.local()


def check_wanted() -> None:
    """Raise `Gone` if the client that this thread works for has hung up."""
    task: _Task | None = getattr(_present, "task", None)
    if task is not None and task.gone:
        raise Gone


class Workers:
    """A few threads and one queue.

    Parameters
    ----------
    n_threads : int
        How many threads.
    """

    def __init__(self, n_threads: int = N_THREADS) -> None:
        self._waiting: deque[_Task] = deque()
        self._news = threading.Condition()
        self._n_busy = 0
        self._closed = False
        for i in range(n_threads):
            # the interpreter does not wait for a daemon at its end
            threading.Thread(target=self._work, name=f"nbflow-prepare-{i}", daemon=True).start()

    @property
    def n_waiting(self) -> int:
        """Number of calls that no thread has begun."""
        return len(self._waiting)

    async def run(self, call: Callable[..., T], /, *args: Any, **options: Any) -> T:
        """Return ``call(*args, **options)``, made by a thread.

        A cancelled call leaves the queue; one that has begun may ask `check_wanted`.
        """
        loop = asyncio.get_running_loop()
        task = _Task(partial(call, *args, **options), loop, loop.create_future())
        with self._news:
            self._waiting.append(task)
            self._news.notify()
        try:
            result: T = await task.future
            return result
        finally:
            if task.gone:
                with self._news, contextlib.suppress(ValueError):
                    self._waiting.remove(task)

    async def run_for(
        self, receive: Receive, call: Callable[..., T], /, *args: Any, **options: Any
    ) -> T:
        """Do as `run`; raise `ClientDisconnect` as soon as the client of `receive` is gone."""
        work: Coroutine[Any, Any, T] = self.run(call, *args, **options)
        return await unless_gone(receive, work)

    async def end(self, seconds: float) -> int:
        """Begin no further calls; return how many threads are within one after so many seconds."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._n_busy:
                    await asyncio.sleep(0.01)
        return self._n_busy

    def _work(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closed:
                    self._news.wait()
                if self._closed:
                    return
                task = self._waiting.popleft()
                self._n_busy += 1
            _present.task = task
            try:
                if not task.gone:
                    task.run()
            finally:
                _present.task = None
                del task
                with self._news:
                    self._n_busy -= 1

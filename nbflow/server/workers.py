"""Worker threads that tokenize requests and serialize long responses off the event loop.

The pool is small, because much of this work holds the GIL and would delay streams.  A disconnected
client's task leaves the queue, and shutdown does not wait for running tasks.
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
    """The client of the current task has disconnected."""


@dataclass(eq=False)
class _Task:
    """A call and the future of its result."""

    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    @property
    def gone(self) -> bool:
        """True once the task is cancelled."""
        return self.future.cancelled()

    def run(self) -> None:
        """Run the call and post its result or exception to the event loop."""
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
    """Raise `Gone` if the client of this thread's task has disconnected."""
    task: _Task | None = getattr(_present, "task", None)
    if task is not None and task.gone:
        raise Gone


class Workers:
    """Thread pool with one queue."""

    def __init__(self, n_threads: int = N_THREADS) -> None:
        self._waiting: deque[_Task] = deque()
        self._wakeup = threading.Condition()
        self._n_busy = 0
        self._closed = False
        for i in range(n_threads):
            # daemons: the interpreter does not join them at exit
            threading.Thread(target=self._work, name=f"nbflow-prepare-{i}", daemon=True).start()

    @property
    def n_waiting(self) -> int:
        """Number of queued tasks."""
        return len(self._waiting)

    async def run(self, call: Callable[..., T], /, *args: Any, **options: Any) -> T:
        """Return ``call(*args, **options)``, computed by a worker thread.

        A cancelled task leaves the queue; a running one can poll `check_wanted`.
        """
        loop = asyncio.get_running_loop()
        task = _Task(partial(call, *args, **options), loop, loop.create_future())
        with self._wakeup:
            self._waiting.append(task)
            self._wakeup.notify()
        try:
            result: T = await task.future
            return result
        finally:
            if task.gone:
                with self._wakeup, contextlib.suppress(ValueError):
                    self._waiting.remove(task)

    async def run_for(
        self, receive: Receive, call: Callable[..., T], /, *args: Any, **options: Any
    ) -> T:
        """`run` that raises `ClientDisconnect` as soon as the client of `receive` disconnects."""
        work: Coroutine[Any, Any, T] = self.run(call, *args, **options)
        return await unless_gone(receive, work)

    async def end(self, seconds: float) -> int:
        """Stop taking tasks; return the number of threads still busy after `seconds`."""
        with self._wakeup:
            self._closed = True
            self._wakeup.notify_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._n_busy:
                    await asyncio.sleep(0.01)
        return self._n_busy

    def _work(self) -> None:
        while True:
            with self._wakeup:
                while not self._waiting and not self._closed:
                    self._wakeup.wait()
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
                with self._wakeup:
                    self._n_busy -= 1

"""Limit of requests in flight, with a queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class RequestLimiter:
    """First-come-first-served semaphore with a bounded queue, for one event loop.

    At most `limit` requests run, and at most `n_waiting` wait.
    """

    def __init__(self, limit: int, n_waiting: int) -> None:
        self.limit = limit
        self.n_running = 0
        """Requests that hold the semaphore."""
        self._n_waiting = n_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> bool:
        """Begin a request, if need be after others; return False if the queue is full."""
        if self.n_running < self.limit:
            self.n_running += 1
            return True
        if len(self._waiting) >= self._n_waiting:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # `release` has dropped it
                    self._waiting.remove(turn)
            else:  # it was handed over in the meantime
                self.release()
            raise
        return True

    def release(self) -> None:
        """End a request, and let the one that waits longest begin."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.n_running -= 1

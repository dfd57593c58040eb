"""Slots of requests in flight, and the queue of those that wait for one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class RequestSlots:
    """First-come-first-served semaphore with a bounded queue, for one event loop.

    At most `n_slots` requests hold a slot, and at most `n_waiting` wait.
    """

    def __init__(self, n_slots: int, n_waiting: int) -> None:
        self.n_slots = n_slots
        self.n_used = 0
        """Slots in use."""
        self._n_waiting = n_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> bool:
        """Take a slot, waiting for one if the queue has room; return False if it has none."""
        if self.n_used < self.n_slots:
            self.n_used += 1
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
            else:  # the slot was handed over in the meantime
                self.release()
            raise
        return True

    def release(self) -> None:
        """Return a slot, or hand it to the request that waits longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.n_used -= 1

"""From the engine's thread to the event loop: one wake-up for all that came meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any


class Mailbox:
    """Calls that another thread wants to be made on the event loop, in order.

    A step of the engine has news for every sequence; waking the loop for each would cost a system
    call each.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        Where the calls are made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Let the loop call ``call(*arguments)`` soon; from any thread."""
        self._calls.append((call, arguments))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is interested
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from here on wakes again
        while self._calls:
            call, arguments = self._calls.popleft()
            call(*arguments)

"""Responses that are sent as they come, and what happens when nobody reads them any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Return a server-sent event with JSON data."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class Stream(Response):
    """A response whose body is made while it is sent.

    The work is cancelled when the client goes away, so that what it holds is freed.

    Parameters
    ----------
    chunks : async iterator of bytes
        The body.
    leave : callable
        Called at the end in any case, also if nothing was sent.
    media_type : str
        Content-Type.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        leave: Callable[[], None],
        media_type: str = "text/event-stream",
    ) -> None:
        self.chunks = chunks
        self.leave = leave
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))
        finally:
            self.leave()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work; if the client goes away meanwhile, cancel it and raise `ClientDisconnect`."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([doing, watching], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        watching.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])
            if not doing.cancelled():
                doing.exception()  # seen: nobody is there to be told


async def _gone(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass

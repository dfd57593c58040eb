"""The HTTP connection: uvicorn's, with limits on time and size that uvicorn does not have.

A head that does not arrive, or is too long, ends the connection; so does a client that leaves
what was sent to it unread.  Nothing of this costs anything while a client behaves.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nbflow.server.error_object import error_object

MAX_HEAD_BYTES = 64 * 1024


def protocol_class(
    header_s: float, slow_reader_s: float, max_connections: int
) -> type[asyncio.Protocol]:
    """Return the protocol of a connection.

    Parameters
    ----------
    header_s : float
        Seconds from the first byte of a request (or the connection) to the end of its head.
    slow_reader_s : float
        Seconds for which sent data may stay unread after the buffers are full.
    max_connections : int
        A further connection is answered with status 503 and closed.
    """

    class Connection(HttpToolsProtocol):
        """One connection."""

        _timer: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.write(_FULL)
                transport.close()
                return
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            between = self.cycle is None or self.cycle.response_complete
            if between and self._timer is None:
                self._expect_head()
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(name + value)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            super().on_headers_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            loop = asyncio.get_running_loop()
            self._stalled = loop.call_later(slow_reader_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def _expect_head(self) -> None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(header_s, self.transport.abort)

        def _count(self, part: bytes) -> None:
            self._head_bytes += len(part)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise ValueError("the head of the request is too long")  # the parser gives up

        def _cancel(self) -> None:
            for timer in (self._timer, self._stalled):
                if timer is not None:
                    timer.cancel()

    return Connection


def _full() -> bytes:
    body = json.dumps(error_object(503, "too many connections")).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_FULL = _full()

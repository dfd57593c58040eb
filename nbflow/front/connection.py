"""One client's connection: its requests are passed on to rank 0, one after the other.

Each connection has a link of its own to rank 0, over which bytes go as they are, both ways at the
same time.  Nothing is held back, and nothing more is read than the other side takes: a slow reader
slows rank 0 down, as if it were connected to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from nbflow.front.answers import end_of_stream, refusal, unavailable
from nbflow.front.messages import (
    DONE,
    PIECE_BYTES,
    Body,
    EndedError,
    Incoming,
    MalformedError,
    RequestHead,
    ResponseHead,
    ToEnd,
    read_request,
    read_response,
)
from nbflow.server.error_object import request_name

KEEP_ALIVE_S = 30.0
"""Seconds a connection is kept between requests; clients pool theirs for about as long."""
_LINGER_S, _LINGER_BYTES = 2.0, 1 << 20
"""For how long, and how much, is read from a client whose request has been answered before its end:
closed at once, the connection would be reset, and the answer perhaps lost."""


@dataclass
class Situation:
    """How the ranks are; shared by all connections."""

    socket: Path
    """Where rank 0 is reached."""
    header_s: float
    """Seconds for a head to arrive."""
    slow_reader_s: float
    """Seconds for which a client may leave its full buffer unread."""
    state: str = "starting"
    """One word for whoever asks how the server is while rank 0 cannot be reached."""
    message: str = "the server is starting"
    """A sentence for everybody else."""

    def reached(self) -> None:
        """Note that rank 0 is there: what keeps it from being reached from now on is its end."""
        if self.state == "starting":
            self.state, self.message = "failed", "the server's ranks have ended"


class Link:
    """A connection to rank 0."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.incoming = Incoming(reader)
        self.writer = writer
        self._reader = reader

    @property
    def alive(self) -> bool:
        """Whether it can be used again."""
        return not (self._reader.at_eof() or self.writer.transport.is_closing())

    def abort(self) -> None:
        """End it, so that rank 0 knows that the client is gone."""
        self.writer.transport.abort()


class Connection:
    """One client's connection.

    Parameters
    ----------
    situation : Situation
        How the ranks are.
    reader, writer : StreamReader and StreamWriter
        The connection.
    """

    def __init__(
        self, situation: Situation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._situation = situation
        self._incoming = Incoming(reader)
        self._writer = writer
        self._peer = str((writer.get_extra_info("peername") or ("",))[0]).encode()
        self.link: Link | None = None
        """The connection to rank 0."""
        self._refused: MalformedError | None = None
        self.busy = False
        """Whether a request is under way."""

    async def serve(self) -> None:
        """Pass requests on until the connection ends."""
        within_s = self._situation.header_s
        try:
            while await self._next_request(within_s):
                within_s = KEEP_ALIVE_S
        except (OSError, MalformedError):
            self._writer.transport.abort()
        finally:  # also when the client is gone, or the front ends
            self.busy = False
            if self.link is not None:
                self.link.abort()
            self._writer.close()

    async def _next_request(self, within_s: float) -> bool:
        """Do one request; return whether another one may follow."""
        async with asyncio.timeout(within_s):
            data = await self._incoming.some()
        if not data:
            return False
        self._incoming.give_back(data)
        try:
            async with asyncio.timeout(self._situation.header_s):
                head = await self._incoming.head()
            self.busy = True
            request, body = read_request(head)
        except MalformedError as error:
            self._writer.write(refusal(error.status, str(error), request_name(""), b""))
            await self._end(unread=True)
            return False
        given = request.headers.first(b"x-request-id").decode("latin-1")
        again = await self._pass_on(request, body, request_name(given))
        self.busy = False
        return again

    async def _pass_on(self, request: RequestHead, body: Body, name: str) -> bool:
        """Pass a request on, and its response back; return whether another one may follow."""
        link = await self._reach()
        if link is None:
            self._writer.write(self._unavailable(request, name))
            await self._end(unread=not body.complete)
            return False
        known = {b"x-request-id": name.encode(), b"x-forwarded-for": self._peer}
        link.writer.write(request.passed_on(known | {b"x-forwarded-proto": b"http"}))
        sending = None if body.complete else asyncio.create_task(self._send(body, link))
        again = False
        try:
            response = await self._head_of_response(request, link)
            if response is not None:
                await self._body_of_response(response, link)
                again = response.keeps and request.keeps
            if sending and again and link.alive and not request.headers.first(b"expect"):
                await asyncio.wait([sending], timeout=_LINGER_S)  # nobody needs it, but it comes
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.wait([sending])
        if response is None and self._refused is not None:
            self._writer.write(refusal(400, str(self._refused), name, request.method))
        elif response is None:
            self._writer.write(self._unavailable(request, name))
        if again and body.complete:
            return True
        await self._end(unread=not body.complete)
        return False

    async def _reach(self) -> Link | None:
        """Return the link to rank 0, a new one if need be; None while there is none."""
        if self.link is not None and self.link.alive:
            return self.link
        if self.link is not None:
            self.link.abort()
        try:
            streams = await asyncio.open_unix_connection(self._situation.socket, limit=PIECE_BYTES)
        except OSError:
            return None
        self._situation.reached()
        self.link = Link(*streams)
        return self.link

    async def _send(self, body: Body, link: Link) -> None:
        """Pass the body of a request on."""
        try:
            while not body.complete:
                data = await self._incoming.some()
                if not data:
                    return  # the client is gone; whoever waits for the response is cancelled
                n = body.take(data)
                if n < len(data):
                    self._incoming.give_back(data[n:])
                link.writer.write(data[:n])
                await link.writer.drain()
        except MalformedError as error:
            self._refused = error
            link.abort()
        except OSError:
            pass  # rank 0 is gone: it is told where its response is waited for

    async def _head_of_response(self, request: RequestHead, link: Link) -> ResponseHead | None:
        """Pass the head of the response back; None if rank 0 ends before there is one."""
        while True:
            try:
                head = await link.incoming.head()
            except OSError:
                link.abort()
                return None
            response = read_response(head, request.method)
            self._writer.write(head)
            if not response.interim:
                return response

    async def _body_of_response(self, response: ResponseHead, link: Link) -> None:
        """Pass the body of the response back; if its rest does not come, end it.

        Raises
        ------
        EndedError
            If that cannot be done but by ending the connection.
        """
        body = response.body
        while not body.complete:
            try:
                data = await link.incoming.some()
            except OSError:
                data = b""
            if not data:
                self._break_up(response)
                return
            if body.take(data) < len(data):
                raise MalformedError("rank 0 has sent more than a response")
            self._writer.write(data)
            await self._taken()

    def _break_up(self, response: ResponseHead) -> None:
        """End a response whose rest will not come."""
        to_end = isinstance(response.body, ToEnd)
        if to_end and response.body.tail == DONE:
            return
        last = end_of_stream(response, self._situation.message)
        if last is not None:
            self._writer.write(last)
        elif not to_end:  # what ends with the connection has ended
            raise EndedError("the ranks have ended within a response")

    async def _taken(self) -> None:
        """Wait until a client that reads slowly has taken enough; not for ever."""
        if self._writer.transport.get_write_buffer_size() > PIECE_BYTES:
            async with asyncio.timeout(self._situation.slow_reader_s):
                await self._writer.drain()

    def _unavailable(self, request: RequestHead, name: str) -> bytes:
        now = self._situation
        return unavailable(request.path, now.state, now.message, name, request.method)

    async def _end(self, unread: bool) -> None:
        """Let the client take what has been sent, also if not all of its request has been read."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._situation.slow_reader_s):
                await self._writer.drain()
            if not unread:
                return
            self._writer.write_eof()
            left = _LINGER_BYTES
            async with asyncio.timeout(_LINGER_S):
                while left > 0 and (data := await self._incoming.some()):
                    left -= len(data)


class Accepted(asyncio.StreamReaderProtocol):
    """A connection while it is open: makes streams of it, and ends its work with it.

    Parameters
    ----------
    situation : Situation
        How the ranks are.
    opened : set of Accepted
        Holds all that are open; this one adds and removes itself.
    most : int
        A further one is answered with status 503 and closed.
    """

    def __init__(self, situation: Situation, opened: set[Accepted], most: int) -> None:
        self._incoming = asyncio.StreamReader(limit=PIECE_BYTES)
        super().__init__(self._incoming)
        self._situation, self._opened, self._most = situation, opened, most
        self._work: asyncio.Task[None] | None = None
        self.connection: Connection | None = None
        """What is done with it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the work."""
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        self._opened.add(self)
        if len(self._opened) > self._most:
            transport.write(refusal(503, "too many connections", request_name(""), b""))
            transport.close()
            return
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        loop = asyncio.get_running_loop()
        writer = asyncio.StreamWriter(transport, self, self._incoming, loop)
        self.connection = Connection(self._situation, self._incoming, writer)
        self._work = loop.create_task(self.connection.serve())

    def eof_received(self) -> bool | None:
        """End the work: like uvicorn, half a connection is none."""
        self.cancel()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the work."""
        self._opened.discard(self)
        self.cancel()
        super().connection_lost(exc)

    def cancel(self) -> None:
        """End the work; what has been written is still sent."""
        if self._work is not None:
            self._work.cancel()

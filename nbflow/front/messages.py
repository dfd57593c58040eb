"""Where the messages of HTTP/1.1 begin and end (RFC 9112): heads, and the borders of bodies.

Bytes are passed on as they are; what is read here only says how many belong to a message.
Ambiguous messages are refused, so that nobody else can read them otherwise.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 4096
"""Of the line in front of a chunk, and of the lines behind the last one."""
PIECE_BYTES = 64 * 1024
DONE = b"data: [DONE]\n\n"
"""How a stream of events ends when nothing has failed."""
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(rb"(%s) ([!-~\x80-\xff]+) HTTP/1\.([01])" % _TOKEN)
_RESPONSE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\0]*)?")
_HEADER = re.compile(rb"(%s):[ \t]*([^\0\r\n]*?)[ \t]*" % _TOKEN)
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)


class MalformedError(Exception):
    """A message that is none, with the status that says so."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class EndedError(ConnectionError):
    """The other side has ended within a message."""


class Incoming:
    """What comes in on a connection: heads, and pieces of what follows them."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._held = b""

    async def some(self) -> bytes:
        """Return what has come, at least a byte; nothing at the end."""
        if self._held:
            data, self._held = self._held, b""
            return data
        return await self._reader.read(PIECE_BYTES)

    def give_back(self, data: bytes) -> None:
        """Take back what belongs to the next message."""
        self._held = data

    async def head(self) -> bytes:
        """Return a head with the empty line behind it.

        Raises
        ------
        EndedError
            If the connection ends before.
        MalformedError
            If it is too long.
        """
        data = (await self.some()).lstrip(b"\r\n")
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise MalformedError("the head of the request is too long", 431)
            more = await self._reader.read(PIECE_BYTES)
            if not more:
                raise EndedError("the connection ended within a head")
            data = (data + more).lstrip(b"\r\n")
        if end > MAX_HEAD_BYTES:
            raise MalformedError("the head of the request is too long", 431)
        self._held = data[end + 4 :]
        return data[: end + 4]


class Body(Protocol):
    """What follows a head."""

    complete: bool
    """Whether all of it has been seen."""
    tail: bytes
    """The last bytes of its content, as many as `DONE` has, where it may be a stream."""

    def take(self, data: bytes) -> int:
        """Return how many of these bytes, which come next, belong to it."""


class Sized:
    """A body whose length has been stated."""

    tail = b""

    def __init__(self, n_bytes: int) -> None:
        self._left = n_bytes
        self.complete = not n_bytes

    def take(self, data: bytes) -> int:
        """See `Body.take`."""
        n = min(self._left, len(data))
        self._left -= n
        self.complete = not self._left
        return n


class ToEnd:
    """A body that ends with the connection."""

    complete = False

    def __init__(self) -> None:
        self.tail = b""

    def take(self, data: bytes) -> int:
        """See `Body.take`."""
        self.tail = (self.tail + data[-len(DONE) :])[-len(DONE) :]
        return len(data)


class Chunked:
    """A body in chunks, each with its size in front, and an empty one at the end."""

    def __init__(self) -> None:
        self.complete = False
        self.tail = b""
        self._line = b""
        self._left = 0
        self._expects = self._size

    @property
    def at_border(self) -> bool:
        """Whether it stands between two chunks, so that another one may follow."""
        return not (self._left or self._line) and self._expects == self._size

    def take(self, data: bytes) -> int:
        """See `Body.take`.

        Raises
        ------
        MalformedError
            If it does not consist of chunks.
        """
        at = 0
        while at < len(data) and not self.complete:
            if self._left:
                end = min(at + self._left, len(data))
                self.tail = (self.tail + data[max(at, end - len(DONE)) : end])[-len(DONE) :]
                self._left -= end - at
                at = end
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            if len(self._line) > MAX_LINE_BYTES:
                raise MalformedError("a line of the chunked body is too long")
            if not end:
                return len(data)
            line, self._line, at = self._line, b"", end
            if not line.endswith(b"\r\n"):
                raise MalformedError("a line of the chunked body does not end with CR LF")
            self._expects(line[:-2])
        return at

    def _size(self, line: bytes) -> None:
        found = _SIZE.fullmatch(line)
        if found is None:
            raise MalformedError("the size of a chunk is no hexadecimal number")
        self._left = int(found[1], 16)
        self._expects = self._behind if self._left else self._trailer

    def _behind(self, line: bytes) -> None:
        if line:
            raise MalformedError("a chunk is longer than its size")
        self._expects = self._size

    def _trailer(self, line: bytes) -> None:
        self.complete = not line


@dataclass(frozen=True)
class Headers:
    """The lines of a head behind the first one: names in lower case, and their values."""

    pairs: tuple[tuple[bytes, bytes], ...]

    def all(self, name: bytes) -> list[bytes]:
        """Return all elements of a list that may be spread over several lines, in lower case."""
        values = b",".join(value for key, value in self.pairs if key == name)
        return [part.strip().lower() for part in values.split(b",")] if values else []

    def first(self, name: bytes) -> bytes:
        """Return a value, empty if there is none."""
        return next((value for key, value in self.pairs if key == name), b"")

    def body(self, unstated: Body) -> Body:
        """Return the body that they announce; `unstated` if they announce none."""
        codings, lengths = self.all(b"transfer-encoding"), set(self.all(b"content-length"))
        if codings and (codings != [b"chunked"] or lengths):
            raise MalformedError(
                "Transfer-Encoding must be chunked, and without Content-Length; anything else is "
                "not understood"
            )
        if codings:
            return Chunked()
        if not lengths:
            return unstated
        length = lengths.pop()
        if lengths or not length.isdigit() or len(length) > 18:
            raise MalformedError("Content-Length must be one number")
        return Sized(int(length))


def _split(head: bytes) -> tuple[bytes, list[bytes], Headers]:
    first, *lines = head[:-4].split(b"\r\n")
    pairs = []
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise MalformedError("a line of the head is no header")
        pairs.append((found[1].lower(), found[2]))
    return first, lines, Headers(tuple(pairs))


@dataclass(frozen=True)
class RequestHead:
    """The head of a request."""

    method: bytes
    target: bytes
    headers: Headers
    keeps: bool
    """Whether the client wants to use the connection again."""
    _lines: tuple[bytes, ...]

    @property
    def path(self) -> str:
        """The path, without what is asked of it."""
        return self.target.partition(b"?")[0].decode("latin-1")

    def passed_on(self, replaced: dict[bytes, bytes]) -> bytes:
        """Return the head with these headers in place of those with their names."""
        lines = [
            line
            for line, (name, _) in zip(self._lines[1:], self.headers.pairs, strict=True)
            if name not in replaced
        ]
        lines += [name + b": " + value for name, value in replaced.items()]
        return b"\r\n".join([self._lines[0], *lines, b"", b""])


def read_request(head: bytes) -> tuple[RequestHead, Body]:
    """Return a request's head, and the body that follows it.

    Raises
    ------
    MalformedError
        If it is no request of HTTP/1.1.
    """
    first, lines, headers = _split(head)
    found = _REQUEST.fullmatch(first)
    if found is None:
        raise MalformedError("this is no request of HTTP/1.1")
    method, target, minor = found.groups()
    if minor == b"0" and headers.all(b"transfer-encoding"):
        raise MalformedError("HTTP/1.0 has no Transfer-Encoding")
    options = headers.all(b"connection")
    keeps = b"close" not in options and (minor == b"1" or b"keep-alive" in options)
    whole = RequestHead(method, target, headers, keeps, (first, *lines))
    return whole, headers.body(Sized(0))


@dataclass(frozen=True)
class ResponseHead:
    """The head of a response."""

    status: int
    headers: Headers
    body: Body

    @property
    def interim(self) -> bool:
        """Whether another one follows."""
        return self.status < 200

    @property
    def keeps(self) -> bool:
        """Whether the connection can be used again."""
        return not isinstance(self.body, ToEnd) and b"close" not in self.headers.all(b"connection")


def read_response(head: bytes, method: bytes) -> ResponseHead:
    """Return the head of a response to a request of this method.

    Raises
    ------
    MalformedError
        If it is none, or one after which the connection is no longer HTTP.
    """
    first, _, headers = _split(head)
    found = _RESPONSE.fullmatch(first)
    if found is None or found[1] == b"101":
        raise MalformedError("this is no response of HTTP/1.1")
    status = int(found[1])
    bare = method == b"HEAD" or status < 200 or status in (204, 304)
    return ResponseHead(status, headers, Sized(0) if bare else headers.body(ToEnd()))

"""HTTP client of OpenAI's API on the standard library."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from nbflow_kernels.errors import UsageError

_MAX_ANSWER_BYTES = 100_000_000
_MAX_LINE_BYTES = 10_000_000


class HttpClient:
    """Client of one server.

    `url` is the base URL of the API, e.g. ``http://127.0.0.1:8000/v1``; `timeout_s` bounds the wait
    for the next bytes.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            host, self._port = parts.hostname, parts.port
        except ValueError:  # a bracket that is not closed, or a port beyond 65535
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise UsageError(f"the URL must be like http://127.0.0.1:8000/v1, got {url!r:.200}")
        self.url = url
        self._https = parts.scheme == "https"
        self._host = host
        self._path = parts.path.rstrip("/")
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """Return the JSON response of GET."""
        with self._exchange("GET", path) as response:
            return _json(response.read(_MAX_ANSWER_BYTES))

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON response of POST with a JSON body."""
        with self._exchange("POST", path, body) as response:
            return _json(response.read(_MAX_ANSWER_BYTES))

    def events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Post a body and yield the server-sent events of the response.

        Raises `UsageError` if the server refuses, an event is an error, or the connection closes
        early.
        """
        with self._exchange("POST", path, body) as response:
            for line in _lines(response):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    event = _json(line[6:])
                    if not isinstance(event, dict) or "error" in event:
                        raise UsageError(f"the server says: {_message(line[6:])}")
                    yield event
        raise UsageError("the connection ended before the answer did")

    def lines(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Post a body and yield the JSON lines of the response."""
        with self._exchange("POST", path, body) as response:
            for line in _lines(response):
                if line:
                    yield _json(line)

    @contextlib.contextmanager
    def _exchange(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        """Send a request on a new connection and yield the response."""
        data = None if body is None else json.dumps(body).encode()
        with contextlib.closing(self._connect()) as connection:
            where = f"{connection.host}:{connection.port}"
            try:
                connection.request(method, self._path + path or "/", data, self._headers)
                response = connection.getresponse()
            except (OSError, HTTPException) as error:
                raise UsageError(
                    f"no answer from {where}: {error}; is the server running?"
                ) from error
            if response.status >= 400:
                message = _message(response.read(_MAX_LINE_BYTES))
                raise UsageError(f"{where} returned status {response.status}: {message}")
            yield response

    def _connect(self) -> HTTPConnection:
        if self._https:
            return HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s,
                context=ssl.create_default_context(),
            )  # fmt: skip
        return HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _lines(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a response as they come."""
    while True:
        try:
            line = response.readline(_MAX_LINE_BYTES)
        except (OSError, HTTPException) as error:
            raise UsageError(f"the connection broke off: {error}") from error
        if not line:
            return
        if len(line) == _MAX_LINE_BYTES:
            raise UsageError(f"the server sent a line of more than {_MAX_LINE_BYTES} bytes")
        yield line.rstrip(b"\r\n")


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the server's answer is not JSON: {data[:200]!r}") from error


def _message(data: bytes) -> str:
    """Return the message of an error response."""
    try:
        body = json.loads(data)
        return str(body.get("error_text") or body["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data[:500].decode("utf-8", "replace")

"""ASGI middleware: request id and log, authentication, concurrency limit, body limits.

From the outside in: `CommandLineClientMiddleware` (what curl leaves out), `RequestLogMiddleware`
(id, log, errors, slow readers), CORS, `AuthAndLimitMiddleware` (draining, keys, concurrent
requests), `BodyLimitMiddleware` (size, time).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import time
import types
import uuid
from collections.abc import Coroutine, Generator, MutableMapping, Sequence
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nbflow.server.errors import ApiError, busy
from nbflow.server.logs import logger, request_id
from nbflow.server.state import ServerState

_OPEN = frozenset({"/", "/health", "/ready", "/favicon.ico"})
"""Paths without authentication: they are cheap and disclose nothing."""
_OPEN_FOLDER = "/page/"
_WITH_BODY = frozenset({"POST", "PUT"})
_UNSTATED = frozenset({"", "application/x-www-form-urlencoded", "text/plain"})
"""Content types of clients that do not state one."""
_OF_BROWSERS = (b"origin", b"referer", b"sec-fetch-site")
"""Headers of which a browser sends one with every POST of a page of another origin."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LINGER_BYTES = 256 * 2**20
_LINGER_S = 20.0
_SILENCE_S = 2.0
"""Bounds on draining a refused body: its size, its total time, and a pause within it."""


class CommandLineClientMiddleware:
    """Accept what curl sends: a method in lower case, and JSON without its content type.

    ``curl -d`` states ``application/x-www-form-urlencoded``.  A web page could send that, and
    ``text/plain``, to any server without a preflight request, so the type is only overlooked in
    requests without the headers that browsers add.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            method = scope["method"].upper()
            scope = {**scope, "method": method}
            of_browser = any(_header(scope, name) for name in _OF_BROWSERS)
            kind = _header(scope, b"content-type").partition(";")[0].strip().lower()
            if method in _WITH_BODY and kind in _UNSTATED and not of_browser:
                others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                scope["headers"] = [*others, (b"content-type", b"application/json")]
        await self._app(scope, receive, send)


class RequestLogMiddleware:
    """Request id, log line, answer to unhandled errors, and disconnection of slow readers."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._slow_reader_s = state.config.limits.slow_reader_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return
        name = _request_name(_header(scope, b"x-request-id"))
        request_id.set(name)
        note: dict[str, Any] = scope.setdefault("state", {})
        note["log"], note["request_id"] = {}, name
        started, status, complete, stalled = time.monotonic(), 0, False, False

        async def named(message: Message) -> None:
            nonlocal status, complete, stalled
            if stalled:
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            else:
                complete = not message.get("more_body", False)
            try:
                await within(self._slow_reader_s, cast(Any, send(message)))
            except TimeoutError:
                status, stalled = 499, True
                raise ClientDisconnect from None

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            if complete or stalled:
                return  # the response is complete, or the client has stopped reading
            logger.error("internal error", exc_info=error, extra={"path": scope["path"]})
            if status:
                raise  # the response has started: close the connection
            answer = ApiError(500, "internal error; the server's log has it", code="internal")
            await self._state.refusal(scope["path"], answer)(scope, receive, named)
        finally:
            self._note(scope, status or 499, time.monotonic() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        """Log and count the request."""
        route = scope.get("route")
        path = getattr(route, "path", "other")  # bounds the number of labels
        self._state.metrics.http.labels(path, str(status)).inc()
        level = "info" if scope["method"] in _WITH_BODY or status >= 400 else "debug"
        getattr(logger, level)(
            "request",
            extra={
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 6),
                "client": (scope.get("client") or (None,))[0],
                **scope["state"]["log"],
            },
        )


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Await some work, at most for a time; raise `TimeoutError` after it.

    Work that need not wait costs no timer: nearly every write of a stream.
    """
    try:
        future = work.send(None)
    except StopIteration:
        return
    async with asyncio.timeout(seconds):
        await _rest(work, future)


@types.coroutine
def _rest(work: Coroutine[Any, Any, None], future: Any) -> Generator[Any, Any, None]:
    """Run a coroutine that has been started and waits for a future."""
    with contextlib.suppress(StopIteration):
        while True:
            try:
                value = yield future
            except BaseException as error:  # e.g. a cancellation
                future = work.throw(error)
            else:
                future = work.send(value)


class AuthAndLimitMiddleware:
    """Authentication and concurrency limit."""

    def __init__(self, app: ASGIApp, state: ServerState, digests: Sequence[bytes]) -> None:
        self._app = app
        self._state = state
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        state, limiter = self._state, self._state.limiter
        refusal = self._refusal(scope)
        if refusal is None and scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        if refusal is None and not await limiter.acquire():
            refusal = busy(
                f"{limiter.limit} requests are in flight, the limit (limits.requests); retry later"
            )
        if refusal is not None:
            await state.refusal(scope["path"], refusal)(scope, receive, send)
            return
        try:
            refusal = self._closed()  # the server may have begun to drain meanwhile
            answer = self._app if refusal is None else state.refusal(scope["path"], refusal)
            await answer(scope, receive, send)
        finally:
            limiter.release()

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return the error that refuses a request, or None."""
        path: str = scope["path"]
        has_body = scope["method"] in _WITH_BODY
        is_open = (path in _OPEN and not has_body) or path.startswith(_OPEN_FOLDER)
        if self._digests and not is_open and not self._knows(_header(scope, b"authorization")):
            return ApiError(
                401, "missing or unknown API key: send the header Authorization: Bearer KEY"
            )
        return self._closed() if has_body else None

    def _closed(self) -> ApiError | None:
        """Return the error of a server that drains, or None."""
        if not self._state.draining:
            return None
        return _closing(ApiError(503, "the server is stopping", retry_after_s=1))

    def _knows(self, authorization: str) -> bool:
        """Return True for a known key; constant-time comparison with every key."""
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(found)


class BodyLimitMiddleware:
    """Limits on the size of a body and the time for it to arrive."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        limits = state.config.limits
        self._most = int(limits.body_bytes)
        self._seconds = limits.body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass the request on, or refuse it."""
        try:
            stated = _header(scope, b"content-length")
            if stated.isdigit() and int(stated[:20]) > self._most:
                raise self._too_long()
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            text = f"the body did not arrive within {self._seconds:g} s"
            await self._refuse(ApiError(408, text), scope, receive, send)
            return
        except ApiError as error:
            await self._refuse(error, scope, receive, _lingering(receive, send))
            return
        if body is None:
            return  # the client has disconnected
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        parts, size = [], 0
        while True:
            message: MutableMapping[str, Any] = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_long()
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await self._state.refusal(scope["path"], _closing(error))(scope, receive, send)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body may have at most {self._most:,} bytes (limits.body_bytes)")


def _lingering(receive: Receive, send: Send) -> Send:
    """Return a `send` that drains the request body before it ends the response.

    A client that sends its whole body first would otherwise see a reset instead of the response.
    """

    async def end_late(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return end_late


async def _discard(receive: Receive) -> None:
    """Read and discard a body, up to a size."""
    size = 0
    while size < _LINGER_BYTES:
        async with asyncio.timeout(_SILENCE_S):
            message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _closing(error: ApiError) -> ApiError:
    """Close the connection after the response."""
    error.headers["connection"] = "close"
    return error


def _header(scope: Scope, name: bytes) -> str:
    """Return a header, or ""."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


def _request_name(given: str) -> str:
    """Return the client's request id if it is well-formed, else a new one."""
    return given if _ID.fullmatch(given) else uuid.uuid4().hex

"""What is said to clients when rank 0 cannot: whole responses, and the ends of broken streams."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from nbflow.front.messages import DONE, Chunked, ResponseHead, ToEnd
from nbflow.server.error_object import error_object

RETRY_AFTER_S = 5
"""What clients are told to wait: ranks need seconds to start, and a pause comes before."""


def refusal(status: int, message: str, name: str, method: bytes) -> bytes:
    """Return the response to a request that is not passed on; the connection ends with it."""
    return _response(status, error_object(status, message), name, method)


def unavailable(path: str, state: str, message: str, name: str, method: bytes) -> bytes:
    """Return the response while there are no ranks: for whoever asks how the server is, how."""
    if path in ("/health", "/ready") and method in (b"GET", b"HEAD"):
        return _response(503, {"status": state}, name, method)
    return refusal(503, message, name, method)


def _response(status: int, content: dict[str, Any], name: str, method: bytes) -> bytes:
    body = json.dumps(content).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {name}",
        "connection: close",
    ]
    if status == 503:
        lines.append(f"retry-after: {RETRY_AFTER_S}")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head if method == b"HEAD" else head + body


def end_of_stream(head: ResponseHead, message: str) -> bytes | None:
    """Return what ends a stream with an error, in the way that `nbflow serve` ends one.

    None where that cannot be done truthfully: nothing can be added within a chunk or an event, nor
    to a body whose length has been stated.
    """
    body = head.body
    if not body.tail.endswith(b"\n\n") and body.tail:
        return None
    kind = head.headers.first(b"content-type").partition(b";")[0].strip().lower()
    if kind == b"text/event-stream":
        last = b"data: " + json.dumps(error_object(503, message)).encode() + b"\n\n" + DONE
    elif kind == b"application/json":  # the chunks of Inferflow's protocol
        chunk = {"text": "", "is_end": 1, "ret_code": "error.processing", "error_text": message}
        last = json.dumps(chunk).encode() + b"\n\n"
    else:
        return None
    if isinstance(body, Chunked) and body.at_border:
        return b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last)
    return last if isinstance(body, ToEnd) and kind == b"text/event-stream" else None

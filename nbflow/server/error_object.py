"""The error object of OpenAI's API, as plain data: whoever answers for the server uses this one."""

from __future__ import annotations

import re
import uuid
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "cancelled",
    503: "service_unavailable",
}
CODES = {401: "invalid_api_key", 413: "body_too_large", 429: "server_busy", 503: "unavailable"}
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def error_object(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error.

    Parameters
    ----------
    status : int
        HTTP status, which the type follows from.
    message : str
        What was wrong, wanted and found, and what to do.
    param : str, optional
        The field of the request it is about.
    code : str, optional
        A word for programs; by default that of the status.
    """
    kind = TYPES.get(status, "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}
    return {"error": error}


def request_name(given: str) -> str:
    """Return what a request is called: as its client says, if that is sensible."""
    return given if _ID.fullmatch(given) else uuid.uuid4().hex

"""OpenAI-style errors: HTTP status and error object."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from nbflow.server.logs import logger
from nbflow_kernels.errors import MissingExtraError, UsageError

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


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of an error."""

    error: ErrorDetail


class ApiError(Exception):
    """Error response.

    `param` names the field of the request; `code` is by default that of the status in `CODES`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or CODES.get(status)
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        kind = TYPES.get(self.status, "server_error")
        facts = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": facts}

    def response(self) -> Response:
        """Return the response."""
        return json_response(self.body(), self.status, self.headers)


class ProtocolRouter(APIRouter):
    """Routes of another protocol, with error responses of its own."""

    def answers(self, path: str) -> bool:
        """Return True for a path of the protocol."""
        raise NotImplementedError

    def refusal(self, error: ApiError) -> Response:
        """Return the response of an error."""
        raise NotImplementedError


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response in ASCII, so that it can quote any client input."""
    return Response(json.dumps(body), status, headers, "application/json")


FieldOf = Callable[[str | None], str | None]


@contextlib.contextmanager
def errors_of(field: str, other_field: FieldOf | None = None) -> Iterator[None]:
    """Answer a `UsageError` with the field of the request that causes it.

    An error about the engine's prompt is of `field`.  `other_field` returns the field of another
    parameter; by default it has the parameter's name, and an error about none is of `field`.
    """
    try:
        yield
    except UsageError as error:
        if error.param == "prompt" or (other_field is None and error.param is None):
            param: str | None = field
        else:
            param = error.param if other_field is None else other_field(error.param)
        raise ApiError(400, str(error), param=param) from error


def busy(message: str) -> ApiError:
    """Return 429 Too Many Requests with ``Retry-After``."""
    return ApiError(429, message, retry_after_s=1)


def add_handlers(app: FastAPI) -> None:
    """Register handlers that answer every exception with an error object."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(UsageError, _usage_error)
    app.add_exception_handler(MissingExtraError, _missing_extra)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _crash)


def _respond(request: Request, error: ApiError) -> Response:
    """Return the response of an error in the protocol of the request's path."""
    response: Response = request.app.state.server.refusal(request.url.path, error)
    return response


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(request, error)


async def _usage_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UsageError)
    return _respond(request, ApiError(400, str(error), param=error.param))


async def _missing_extra(request: Request, error: Exception) -> Response:
    return _respond(request, ApiError(501, str(error), code="missing_extra"))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer errors of the router and the JSON parser."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        message = "the body is not valid JSON"
    elif error.status_code == 404:
        message = f"no route {request.url.path}; see /openapi.json"
    elif error.status_code == 405:
        message = f"{request.url.path} does not support {request.method}"
    else:
        message = str(error.detail)
    answer = ApiError(error.status_code, message)
    answer.headers |= dict(error.headers or {})
    return _respond(request, answer)


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answer a body that fails validation with the first finding."""
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        shown = f", got {kind!r:.80}" if kind else ""
        return _respond(request, ApiError(415, f"Content-Type must be application/json{shown}"))
    found: ErrorDetails = error.errors()[0]
    if found["type"] == "json_invalid":
        message = f"the body is not valid JSON: {found['ctx']['error']}"
        return _respond(request, ApiError(400, message))
    path = [part for part in found["loc"] if part != "body"]
    message, param = _words(found, path)
    return _respond(request, ApiError(400, message, param=param))


def _words(found: ErrorDetails, path: list[int | str]) -> tuple[str, str | None]:
    """Return the message and the field of a finding."""
    at, named = ".".join(map(str, path)), found.get("ctx", {}).get("param")
    param = str(named or at) or None
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] in ("unknown_field", "refused_field", "out_of_bounds"):
        if at and named and path[-1] != named:  # a field of an object
            return f"{at}: {message}", f"{at}.{named}"
        return message, param
    if found["type"] == "missing":
        return f"{param or 'the body'} is required", param
    shown = f"; got {found['input']!r:.80}" if _short(found["input"]) else ""
    return f"{param or 'the body'}: {message[:1].lower()}{message[1:]}{shown}", param


def _short(value: Any) -> bool:
    return isinstance(value, int | float | str | bool | None) and len(str(value)[:100]) < 100


async def _gone(_: Request, __: Exception) -> Response:
    """Response for a disconnected client."""
    return Response(status_code=499)


async def _crash(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; the log has the traceback."""
    logger.error("internal error", exc_info=error, extra={"path": request.url.path})
    answer = ApiError(500, "internal error; the server's log has it", code="internal")
    return _respond(request, answer)

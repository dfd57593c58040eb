"""The application: endpoints, errors, and what is around them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import nbflow
from nbflow.compat.inferflow import native_protocol
from nbflow.server.errors import ErrorBody, add_handlers
from nbflow.server.middleware import (
    AuthAndLimitMiddleware,
    BodyLimitMiddleware,
    RequestLogMiddleware,
)
from nbflow.server.routes import (
    chat,
    chat_page,
    completions,
    embeddings,
    health,
    models_list,
    tokenize,
)
from nbflow.server.state import ServerState

_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": text}
    for code, text in {
        400: "The request is wrong; the error names the field.",
        401: "No key, or an unknown one.",
        404: "No such model.",
        413: "The body is too long.",
        415: "The body is not JSON.",
        429: "The server has enough to do; try again after Retry-After.",
        500: "Something failed in the server.",
        503: "The server is stopping.",
    }.items()
}


def make_app(state: ServerState) -> FastAPI:
    """Return the endpoints; `around` puts keys and limits in front of them."""
    app = FastAPI(
        title="nbflow",
        version=nbflow.__version__,
        description="OpenAI's API, and what belongs to it.",
        docs_url=None,  # these pages are made of files from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    app.state.server = state
    add_handlers(app)
    openai = APIRouter()
    for module in (chat, completions, embeddings, models_list):
        openai.include_router(module.router)
    app.include_router(openai, prefix="/v1")
    app.include_router(openai, include_in_schema=False)  # for clients that leave out /v1
    for module in (tokenize, health, native_protocol):
        app.include_router(module.router)
    if state.config.page:
        app.include_router(chat_page.router)
    _without_422(app)
    return app


def around(app: FastAPI, state: ServerState, digests: list[bytes]) -> ASGIApp:
    """Return the application with everything that a request goes through first.

    Parameters
    ----------
    app : FastAPI
        The endpoints.
    state : ServerState
        Their state.
    digests : list of bytes
        SHA-256 of the keys; empty if there are none.
    """
    inner: ASGIApp = AuthAndLimitMiddleware(
        BodyLimitMiddleware(app, state.config.limits), state, digests
    )
    if state.config.cors.origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=state.config.cors.origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestLogMiddleware(inner, state)


def _without_422(app: FastAPI) -> None:
    """Take out of the document a status that the server does not use."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]

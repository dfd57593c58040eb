"""FastAPI application: routes, error handlers, middleware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import nbflow
from nbflow.server.errors import ErrorBody, ProtocolRouter, add_handlers
from nbflow.server.middleware import (
    AuthAndLimitMiddleware,
    BodyLimitMiddleware,
    CommandLineClientMiddleware,
    RequestLogMiddleware,
)
from nbflow.server.routes import (
    chat,
    chat_page,
    classify,
    completions,
    embeddings,
    fill_mask,
    health,
    models_list,
    tokenize,
)
from nbflow.server.state import ServerState

_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": text}
    for code, text in {
        400: "Invalid request; the error names the field.",
        401: "Missing or unknown API key.",
        404: "Unknown model.",
        413: "Body too long.",
        415: "Content type is not JSON's.",
        429: "Too many requests; retry after Retry-After.",
        500: "Internal error.",
        503: "Server is stopping.",
    }.items()
}


def make_app(state: ServerState, extra_routers: Sequence[ProtocolRouter] = ()) -> FastAPI:
    """Return the application with its routes; `with_middleware` adds keys and limits."""
    app = FastAPI(
        title="nbflow",
        version=nbflow.__version__,
        description="OpenAI-compatible API, tokenization, health and metrics.",
        docs_url=None,  # these pages load scripts from a CDN
        redoc_url=None,
        responses=_ERRORS,
    )
    app.state.server = state
    state.protocols = extra_routers
    add_handlers(app)
    openai = APIRouter()
    for module in (chat, completions, embeddings, models_list, fill_mask, classify):
        openai.include_router(module.router)
    app.include_router(openai, prefix="/v1")
    app.include_router(openai, include_in_schema=False)  # for clients that leave out /v1
    for router in (tokenize.router, health.router, *extra_routers):
        app.include_router(router)
    if state.config.page:
        app.include_router(chat_page.router)
    _without_422(app)
    return app


def with_middleware(app: FastAPI, state: ServerState, digests: list[bytes]) -> ASGIApp:
    """Wrap the application in request log, CORS, authentication and limits.

    `digests` are the SHA-256 of the API keys; empty to accept every client.
    """
    inner: ASGIApp = AuthAndLimitMiddleware(BodyLimitMiddleware(app, state), state, digests)
    if state.config.cors.origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=state.config.cors.origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return CommandLineClientMiddleware(RequestLogMiddleware(inner, state))


def _without_422(app: FastAPI) -> None:
    """Remove FastAPI's status 422, which the server never sends, from the OpenAPI document."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]

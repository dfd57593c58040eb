"""``GET /v1/models``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from nbflow.server.errors import json_response
from nbflow.server.state import State

router = APIRouter(tags=["OpenAI"])


@router.get("/models", summary="List the models")
async def models(state: State) -> Response:
    """List the models and their aliases."""
    cards = [served.card(name) for name, served in state.models.by_name.items()]
    return json_response({"object": "list", "data": cards})


@router.get("/models/{model:path}", summary="Describe a model")
async def model(model: str, state: State) -> Response:
    """Describe a model."""
    return json_response(state.models.named(model).card(model))

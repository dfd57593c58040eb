"""Evaluation of texts without new tokens: embeddings, classification, masked tokens."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request

from nbflow.engine.request import Request as EngineRequest
from nbflow.server.errors import ApiError
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.served_model import ServedModel
from nbflow.server.state import ServerState, note
from nbflow.server.stream import GenerationStream, unless_gone


async def evaluate(
    served: ServedModel,
    prepare: Callable[[], list[EngineRequest]],
    n_texts: int,
    request: Request,
    state: ServerState,
    param: str,
    user: str | None = None,
) -> list[EngineRequest]:
    """Run requests without new tokens, which a worker prepares, and return them finished."""
    most = state.config.limits.choices
    if not 1 <= n_texts <= most:
        raise ApiError(400, f"{param} must have 1 to {most} texts, got {n_texts}", param=param)
    requests = await state.workers.run_for(request.receive, prepare)
    n_tokens = sum(len(one.prompt) for one in requests)
    note(request, model=served.name, user=user, prompt_tokens=n_tokens, n=len(requests))
    for one in requests:
        one.deadline = state.config.limits.request_s or None
    generation = GenerationStream(
        served, [GenerationRequest(one) for one in requests], state.bridge, state.metrics
    )
    async with generation:
        await unless_gone(request.receive, generation.collect())
    return requests

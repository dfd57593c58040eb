"""``POST /v1/embeddings``: one vector for each text."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from nbflow.engine.request import Request as EngineRequest
from nbflow.server.errors import ApiError, errors_of, json_response
from nbflow.server.routes.completions import prompt_ids
from nbflow.server.routes.evaluation import evaluate
from nbflow.server.schemas import EmbeddingBody, split_texts
from nbflow.server.state import State

router = APIRouter(tags=["OpenAI"])


@router.post("/embeddings", summary="Turn texts into vectors")
async def embeddings(body: EmbeddingBody, request: Request, state: State) -> Response:
    """Turn texts into vectors."""
    served = state.models.find(body.model)
    spec = served.model.spec
    if body.dimensions not in (None, spec.hidden_size):
        raise ApiError(
            400,
            f"dimensions must be {spec.hidden_size}, the size of {served.name}'s vectors, or be "
            f"left out, got {body.dimensions}",
            param="dimensions",
        )
    texts = split_texts(body.input)
    pooling = body.pooling or ("last" if spec.causal else "mean")

    def prepare() -> list[EngineRequest]:
        ids = prompt_ids(served, texts, body.add_special_tokens, "input")
        with errors_of("input"):
            return served.model.embedding_requests(ids, pooling=pooling, normalize=body.normalize)

    requests = await evaluate(served, prepare, len(texts), request, state, "input", body.user)
    n_tokens = sum(len(text.prompt) for text in requests)
    as_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": _written(text.vector, as_base64)}
        for i, text in enumerate(requests)
    ]
    return json_response(
        {
            "object": "list",
            "data": data,
            "model": state.models.shown(body.model, served),
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


def _written(vector: np.ndarray | None, as_base64: bool) -> Any:
    """Return a vector as a list of numbers, or as base64 of little-endian float32."""
    assert vector is not None  # set when the request finished
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()

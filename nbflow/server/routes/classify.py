"""``POST /classify``: labels of texts, with vLLM's fields."""

from __future__ import annotations

import time
from typing import ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from nbflow.engine.classify import classification, classification_requests, head_of
from nbflow.engine.request import Request as EngineRequest
from nbflow.server.errors import ApiError, errors_of, json_response
from nbflow.server.routes.evaluation import evaluate
from nbflow.server.schemas import Body, Text, split_texts
from nbflow.server.state import State
from nbflow.server.workers import check_wanted

router = APIRouter(tags=["vLLM"])


class ClassifyBody(Body):
    """Body of ``POST /classify``."""

    model: str | None = None
    input: Text
    """Text, texts, or token ids."""
    text_pair: str | list[str] | None = None
    """Second text of each pair."""
    user: str | None = None
    """User name for the log."""

    instead: ClassVar[dict[str, str]] = {"prompt": "use input", "inputs": "use input"}


@router.post("/classify", summary="Label texts")
async def classify(body: ClassifyBody, request: Request, state: State) -> Response:
    """Label texts."""
    served = state.models.find(body.model)
    with errors_of("model"):
        head_of(served.model)
    texts = split_texts(body.input)
    pairs = [body.text_pair] if isinstance(body.text_pair, str) else body.text_pair
    if pairs is not None and len(pairs) != len(texts):
        raise ApiError(
            400, f"text_pair must have a text for each of {len(texts)}, got {len(pairs)}",
            param="text_pair",
        )  # fmt: skip

    def prepare() -> list[EngineRequest]:
        found = []
        for i, text in enumerate(texts):
            check_wanted()
            if pairs is not None and not isinstance(text, str):
                raise ApiError(400, "token ids have no text_pair", param="text_pair")
            for part in (text, *([] if pairs is None else [pairs[i]])):
                if isinstance(part, str):
                    served.check_size(part, "input")
            given = text if pairs is None else (str(text), pairs[i])
            with errors_of("input"):
                found += classification_requests(served.model, [given])
        return found

    requests = await evaluate(served, prepare, len(texts), request, state, "input", body.user)
    data = []
    for i, done in enumerate(requests):
        found = classification(served.model, done)
        data.append(
            {
                "index": i, "label": found.label, "probs": found.scores.tolist(),
                "num_classes": len(found.labels),
            }
        )  # fmt: skip
    n_tokens = sum(len(done.prompt) for done in requests)
    return json_response(
        {
            "id": f"classify-{request.state.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or served.name,
            "data": data,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )

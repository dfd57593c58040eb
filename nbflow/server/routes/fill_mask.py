"""``POST /fill-mask``: tokens in place of ``[MASK]``, as Hugging Face's inference API has it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from nbflow.engine.fill_mask import check_fills, fillings, mask_request, masked_ids
from nbflow.engine.request import Request as EngineRequest
from nbflow.server.errors import ApiError, errors_of, json_response
from nbflow.server.routes.evaluation import evaluate
from nbflow.server.schemas import Body
from nbflow.server.state import State
from nbflow.server.workers import check_wanted

router = APIRouter(tags=["Hugging Face"])


class FillMaskParameters(Body):
    """Parameters of a request."""

    top_k: int = Field(default=5, ge=1)
    """Tokens for each mask."""

    instead: ClassVar[dict[str, str]] = {"targets": "look for them among top_k"}


class FillMaskBody(Body):
    """Body of ``POST /fill-mask``."""

    model: str | None = None
    inputs: str | list[str]
    """Text or texts with mask tokens."""
    parameters: FillMaskParameters = FillMaskParameters()

    instead: ClassVar[dict[str, str]] = {"prompt": "use inputs", "input": "use inputs"}


@router.post("/fill-mask", summary="Fill masked tokens")
async def fill_mask(body: FillMaskBody, request: Request, state: State) -> Response:
    """Fill masked tokens.

    A text with one mask gives a list of objects with score, token, token_str and sequence; with
    several masks a list of lists; several texts give a list of these.
    """
    served = state.models.find(body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    with errors_of("model"):
        check_fills(served.model)

    def prepare() -> list[EngineRequest]:
        found = []
        for text in texts:
            check_wanted()
            served.check_size(text, "inputs")
            with errors_of("inputs", {None: "inputs", "top_k": "parameters.top_k"}.get):
                ids = masked_ids(served.model.tokenizer, text, served.options.encoder_template)
                found.append(mask_request(served.model, ids, body.parameters.top_k))
        size = sum(len(one.masked) * len(one.prompt) for one in found) * body.parameters.top_k
        most = state.config.limits.logprobs
        if size > most:
            raise ApiError(
                400,
                f"the texts with each token in place would have {size:,} tokens, and at most "
                f"{most:,} are returned (limits.logprobs); ask for a smaller top_k",
                param="parameters.top_k",
            )
        return found

    requests = await evaluate(served, prepare, len(texts), request, state, "inputs")
    answers = await state.workers.run_for(
        request.receive,
        lambda: [
            _answer([[asdict(one) for one in mask] for mask in fillings(served.model, done)])
            for done in requests
        ],
    )
    return json_response(answers[0] if isinstance(body.inputs, str) else answers)


def _answer(masks: list[list[dict[str, Any]]]) -> list[Any]:
    """Return the tokens of the only mask, or a list for each."""
    return masks[0] if len(masks) == 1 else masks

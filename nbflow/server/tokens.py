"""``/tokenize``, ``/detokenize``, ``/apply-template``: what a prompt is made of."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from nbflow.server.errors import ApiError, json_response
from nbflow.server.fields import DetokenizeBody, TemplateBody, TokenizeBody
from nbflow.server.state import ServerState, state_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", summary="Turn a text or a conversation into token ids")
async def tokenize(
    body: TokenizeBody, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Turn a text or a conversation into token ids."""
    served = state.models.find(body.model)
    if body.messages is not None:
        ids = await asyncio.to_thread(
            served.chat_ids,
            body.messages,
            own_template(body.chat_template, state),
            add_generation_prompt=body.add_generation_prompt,
            parse_special=body.parse_special,
            **body.chat_template_kwargs,
        )
    else:
        tokenizer = served.model.tokenizer
        ids = await asyncio.to_thread(
            tokenizer.encode, body.prompt or "", body.add_special_tokens, body.parse_special
        )
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": served.model.spec.max_context,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [served.model.tokenizer.piece(i) for i in ids]
    return json_response(answer)


@router.post("/detokenize", summary="Turn token ids into text")
async def detokenize(
    body: DetokenizeBody, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Turn token ids into text."""
    tokenizer = state.models.find(body.model).model.tokenizer
    return json_response({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})


@router.post("/apply-template", summary="Put a conversation into the model's template")
async def apply_template(
    body: TemplateBody, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Put a conversation into the model's template."""
    text = await asyncio.to_thread(
        state.models.find(body.model).chat_text,
        body.messages,
        own_template(body.chat_template, state),
        add_generation_prompt=body.add_generation_prompt,
        documents=body.documents,
        **body.chat_template_kwargs,
    )
    return json_response({"prompt": text})


def own_template(given: str | None, state: ServerState) -> str | None:
    """Return a request's own template if the server takes such."""
    if given is not None and not state.config.request_templates:
        raise ApiError(
            400,
            "chat_template: this server takes no templates from requests (request_templates); "
            "leave it out, or use /v1/completions",
            param="chat_template",
        )
    return given

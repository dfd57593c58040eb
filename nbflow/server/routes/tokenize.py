"""``/tokenize``, ``/detokenize`` and ``/apply-template``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nbflow.server.bounds import MIN_PROMPT_BYTES
from nbflow.server.errors import ApiError, errors_of, json_response
from nbflow.server.long_json import long_response
from nbflow.server.schemas import DetokenizeBody, TemplateBody, TokenizeBody
from nbflow.server.served_model import ServedModel
from nbflow.server.state import ServerState, State

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", summary="Turn a text or a conversation into token ids")
async def tokenize(body: TokenizeBody, request: Request, state: State) -> Response:
    """Turn a text or a conversation into token ids."""
    served = state.models.find(body.model)
    template = own_template(body.chat_template, state)

    def answer() -> Response:
        with errors_of("prompt" if body.messages is None else "messages"):
            ids = _ids(served, body, template)
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": served.model.spec.max_context,
            "tokens": ids,
        }
        if body.return_token_strs:
            found["token_strs"] = [served.model.tokenizer.piece(i) for i in ids]
        return long_response(found)

    return await state.workers.run_for(request.receive, answer)


def _ids(served: ServedModel, body: TokenizeBody, template: str | None) -> list[int]:
    """Return the token ids of a body's text or conversation."""
    if body.messages is None:
        text = served.check_size(body.prompt or "", "prompt")
        return served.model.tokenizer.encode(text, body.add_special_tokens, body.parse_special)
    return served.chat_ids(
        body.messages,
        template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        parse_special=body.parse_special,
        **body.chat_template_kwargs,
    )


@router.post("/detokenize", summary="Turn token ids into text")
async def detokenize(body: DetokenizeBody, request: Request, state: State) -> Response:
    """Turn token ids into text."""
    served = state.models.find(body.model)
    most = max(MIN_PROMPT_BYTES, served.model.spec.max_context)
    if len(body.tokens) > most:
        raise ApiError(
            400, f"tokens may have at most {most:,} ids, got {len(body.tokens):,}", param="tokens"
        )
    with errors_of("tokens"):
        text = await state.workers.run_for(
            request.receive, served.model.tokenizer.decode, body.tokens
        )
    return json_response({"prompt": text})


@router.post("/apply-template", summary="Put a conversation into the model's template")
async def apply_template(body: TemplateBody, request: Request, state: State) -> Response:
    """Put a conversation into the model's template."""
    with errors_of("messages"):
        text = await state.workers.run_for(
            request.receive,
            state.models.find(body.model).chat_text,
            body.messages,
            own_template(body.chat_template, state),
            **body.variables(),
        )
    return json_response({"prompt": text})


def own_template(given: str | None, state: ServerState) -> str | None:
    """Return a request's chat template; raise `ApiError` if the server allows none."""
    if given is not None and not state.config.request_templates:
        raise ApiError(
            400,
            "chat_template: this server takes no templates from requests (request_templates); "
            "leave it out, or use /v1/completions",
            param="chat_template",
        )
    return given

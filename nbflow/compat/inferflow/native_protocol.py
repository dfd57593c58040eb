"""Inferflow's HTTP protocol: ``POST /`` or ``/process_query`` with ``text``; JSON lines.

It follows the service of https://github.com/inferflow/inferflow, except that every stream ends
with a chunk that has ``is_end``, also after an error; that no text is dropped at the end; and that
refused requests get an error status and a ``ret_code`` instead of an empty response.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from nbflow.compat.inferflow.strategies import INFERFLOW
from nbflow.options import SamplingParams
from nbflow.server.errors import ApiError, json_response
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.option_models import http_option
from nbflow.server.requests import build_requests
from nbflow.server.schemas import Body, GenerationBody
from nbflow.server.served_model import ServedModel
from nbflow.server.state import ServerState, State, note
from nbflow.server.stream import GenerationStream, OutputChunk, Stream, unless_gone
from nbflow_kernels.errors import UsageError, unknown_name

router = APIRouter(tags=["Inferflow"])

_FLUSH_BYTES = 16  # minimum text of a chunk, except the last
_RET_CODES = {429: "error.busy", 503: "error.busy", 400: "error.invalid_request_format"}


class Header(Body):
    """Function name and user of a request."""

    fn: str = Field(default="process_query", pattern="^(process_query|get_stat|)$")
    user: str = ""
    passcode: str = ""
    """Ignored: API keys are sent as Authorization."""


class NativeBody(Body):
    """Body of an Inferflow request."""

    header: Header = Header()
    text: str | None = None
    """User message."""
    system_prompt: str = ""
    res_prefix: str = ""
    """Prefix of the response, which the model continues."""
    encoder_input_template: str | None = None
    """Query template of what the encoder reads, in a model that has one."""
    decoder_input_template: str | None = None
    """Query template instead of the model's, if the server allows it."""
    max_output_len: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Same as max_output_len; 1024 by default."""
    decoding_alg: str = ""
    """Decoding strategy; by default the model's."""
    random_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed; 0 for a new one each time."""
    temperature: Annotated[float, http_option(SamplingParams, "temperature")] = 1.0
    is_streaming_mode: bool | int = True

    instead: ClassVar[dict[str, str]] = {
        "messages": "use /v1/chat/completions",
        "prompt": "use text, or /v1/completions",
        "stream": "use is_streaming_mode",
        "max_tokens": "use max_output_len",
    }


@router.post("/process_query", summary="Answer an Inferflow request")
@router.post("/", include_in_schema=False)
async def process_query(body: NativeBody, request: Request, state: State) -> Response:
    """Answer an Inferflow request."""
    started = time.monotonic()
    if body.header.fn == "get_stat":
        return await get_stat(state)
    try:
        if not body.text:
            return json_response({"ret_code": "error.empty_request", "error_text": "no text"}, 400)
        served = state.models.generating(None)
        generation = await _start_generation(served, body, state, request)
        note(request, model=served.name, prompt_tokens=len(generation.request_of(0).prompt))
        if body.is_streaming_mode:
            await generation.__aenter__()
            return Stream(_chunks(generation, started), generation.close, "application/json")
        async with generation:
            (chunk,) = await unless_gone(request.receive, generation.collect())
    except (ApiError, UsageError) as error:
        return _refusal(error)
    seconds = time.monotonic() - started
    return json_response({"text": chunk.text, "ret_code": "succ", "time_cost": seconds})


@router.post("/get_stat", include_in_schema=False)
async def get_stat(state: State) -> Response:
    """Return the engines' statistics."""
    return json_response({"ret_code": "succ", **state.engine_stats()})


async def _start_generation(
    served: ServedModel, body: NativeBody, state: ServerState, request: Request
) -> GenerationStream:
    messages = [{"role": "user", "content": body.text}]
    if body.system_prompt:
        messages.insert(0, {"role": "system", "content": body.system_prompt})
    if body.res_prefix:
        messages.append({"role": "assistant", "content": body.res_prefix})
    of_encoder, of_decoder = body.encoder_input_template, body.decoder_input_template
    if (of_encoder or of_decoder) is not None and not state.config.request_templates:
        name = "decoder_input_template" if of_encoder is None else "encoder_input_template"
        raise ApiError(400, f"{name}: this server takes no templates from requests")
    most = body.max_output_len or body.max_new_tokens or 1024

    def prepare() -> list[GenerationRequest]:
        ids, decoder_ids = served.turn_ids(messages, of_decoder, of_encoder)
        if len(ids) >= served.model.spec.max_context:
            raise ApiError(400, "the request is too long", code="error.too_long_request")
        sampling = _sampling(served, body)
        limits = state.config.limits
        return build_requests(
            served, sampling, [ids], most, limits, continues_text=False, decoder_ids=decoder_ids
        )

    requests = await state.workers.run_for(request.receive, prepare)
    return GenerationStream(served, requests, state.bridge, state.metrics)


def _sampling(served: ServedModel, body: NativeBody) -> GenerationBody:
    """Return the sampling fields: Inferflow's default strategy unless the model has one."""
    name = body.decoding_alg.lower().removeprefix("sample.")
    if not name and "decoding" not in served.defaults:
        name = "auto"
    if name and name not in INFERFLOW:
        raise ApiError(400, str(unknown_name("decoding_alg", body.decoding_alg, INFERFLOW)))
    values = {
        "seed": body.random_seed or None,
        "temperature": body.temperature,
        "decoding": f"inferflow.{name}" if name else None,
    }
    return GenerationBody.model_validate(values)


def _refusal(error: ApiError | UsageError) -> Response:
    status = error.status if isinstance(error, ApiError) else 400
    code = error.code if isinstance(error, ApiError) else None
    ours = code if code and code.startswith("error.") else None
    ret_code = ours or _RET_CODES.get(status, "error.processing")
    headers = error.headers if isinstance(error, ApiError) else {}
    return json_response({"ret_code": ret_code, "error_text": str(error)}, status, headers)


async def _chunks(generation: GenerationStream, started: float) -> AsyncIterator[bytes]:
    """Yield chunks of at least `_FLUSH_BYTES` bytes of text; the last one has `is_end`."""
    pending: list[str] = []
    async for chunks in generation:
        for chunk in chunks:
            pending.append(chunk.text)
            if chunk.error is not None or chunk.finish_reason is not None:
                yield _chunk("".join(pending), started, chunk)
                return
        if sum(len(text.encode()) for text in pending) >= _FLUSH_BYTES:
            yield _chunk("".join(pending), started)
            pending.clear()


def _chunk(text: str, started: float, last: OutputChunk | None = None) -> bytes:
    line: dict[str, Any] = {"text": text, "time_cost": round(time.monotonic() - started, 6)}
    if last is not None:
        line["is_end"] = 1
        if last.error is not None:
            line |= {"ret_code": "error.processing", "error_text": last.error.message}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n\n"

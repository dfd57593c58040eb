"""Inferflow's HTTP protocol: ``POST /`` or ``/process_query`` with ``text``; JSON lines.

It follows the service of https://github.com/inferflow/inferflow, except that every stream ends
with a chunk that has ``is_end``, also after an error; that no text is dropped at the end; that
refused requests get an error status and a ``ret_code`` instead of an empty response; and that paths
must be ``/`` or end in a function's name.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from nbflow.compat.inferflow.strategies import INFERFLOW
from nbflow.options import SamplingParams
from nbflow.server.errors import ApiError, ProtocolRouter, json_response
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.option_models import http_option
from nbflow.server.requests import build_requests
from nbflow.server.schemas import Body, GenerationBody
from nbflow.server.served_model import ServedModel
from nbflow.server.state import ServerState, State, note
from nbflow.server.stream import GenerationStream, OutputChunk, Stream, unless_gone
from nbflow_kernels.errors import unknown_name

_FUNCTIONS = ("process_query", "get_stat")
_FLUSH_BYTES = 16  # minimum text of a chunk, except the last
_BUSY = (429, 503)
_JINJA = re.compile(r"\{[{%]")


class _NativeRouter(ProtocolRouter):
    """Inferflow's routes; every error has a ``ret_code``."""

    def answers(self, path: str) -> bool:
        """Return True for ``/`` and paths that end in the name of a function."""
        return path == "/" or path.rsplit("/", 1)[-1] in _FUNCTIONS

    def refusal(self, error: ApiError) -> Response:
        """Return the response of an error."""
        code = error.code or ""
        if not code.startswith("error."):
            invalid = "error.invalid_request_format" if error.status < 500 else "error.processing"
            code = "error.busy" if error.status in _BUSY else invalid
        answer = {"ret_code": code, "error_text": str(error)}
        return json_response(answer, error.status, error.headers)


router = _NativeRouter(tags=["Inferflow"])


class NativeFields(Body):
    """Fields of a request; unknown ones are ignored, as in Inferflow."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def _known_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Drop unknown fields; see `Body._known_fields`."""
        known = {*cls.names(), *cls.instead}
        of_ours = {name: given for name, given in value.items() if name in known}
        return super()._known_fields(of_ours)


class Header(NativeFields):
    """Function name and user of a request."""

    fn: str = Field(default="process_query", pattern="^(process_query|get_stat|)$")
    user: str = ""
    passcode: str = ""
    """Ignored: API keys are sent as Authorization."""


class NativeBody(NativeFields):
    """Body of an Inferflow request."""

    header: Header = Header()
    model: str | None = None
    """Name of a model; by default the first one."""
    text: str = ""
    """User message."""
    system_prompt: str = ""
    res_prefix: str = ""
    """Prefix of the response, which the model continues."""
    encoder_input_template: str | None = None
    """Query template of what the encoder reads, in a model that has one."""
    decoder_input_template: str | None = None
    """Query template instead of the model's; one in Jinja if the server allows it."""
    max_output_len: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Second name of `max_output_len`; 1024 by default."""
    decoding_alg: str = ""
    """Decoding strategy; by default the model's."""
    random_seed: int = Field(default=0, ge=-(2**63), lt=2**64)
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
@router.put("/process_query", include_in_schema=False)
@router.api_route("/", methods=["POST", "PUT"], include_in_schema=False)
@router.api_route("/{folder:path}/process_query", methods=["POST", "PUT"], include_in_schema=False)
async def process_query(body: NativeBody, request: Request, state: State) -> Response:
    """Answer an Inferflow request."""
    started = time.monotonic()
    if body.header.fn == "get_stat":
        return await get_stat(state)
    if not body.text and not body.res_prefix:
        raise ApiError(400, "text and res_prefix are empty", code="error.empty_request")
    served = state.models.generating(body.model)
    generation = await _start_generation(served, body, state, request)
    ignored = sorted(set(await request.json()) - set(NativeBody.names()))
    note(request, model=served.name, prompt_tokens=len(generation.request_of(0).prompt))
    if ignored:
        note(request, ignored_fields=", ".join(ignored)[:200])
    if body.is_streaming_mode:
        await generation.__aenter__()
        return Stream(_chunks(generation, started), generation.close, "application/json")
    async with generation:
        (chunk,) = await unless_gone(request.receive, generation.collect())
    seconds = time.monotonic() - started
    return json_response({"text": chunk.text, "ret_code": "succ", "time_cost": seconds})


@router.api_route("/get_stat", methods=["GET", "POST", "PUT"], include_in_schema=False)
@router.api_route(
    "/{folder:path}/get_stat", methods=["GET", "POST", "PUT"], include_in_schema=False
)
async def get_stat(state: State) -> Response:
    """Return the engines' statistics."""
    return json_response({"ret_code": "succ", **state.engine_stats()})


async def _start_generation(
    served: ServedModel, body: NativeBody, state: ServerState, request: Request
) -> GenerationStream:
    templates = _templates(body, state)
    most = body.max_output_len or body.max_new_tokens or 1024

    def prepare() -> list[GenerationRequest]:
        ids, decoder_ids = _prompt(served, body, *templates)
        if len(ids) >= served.model.spec.max_context:
            raise ApiError(400, "the request is too long", code="error.too_long_request")
        sampling = _sampling(served, body)
        limits = state.config.limits
        return build_requests(
            served, sampling, [ids], most, limits,
            continues_text=bool(body.res_prefix) or not served.has_template,
            decoder_ids=decoder_ids,
        )  # fmt: skip

    requests = await state.workers.run_for(request.receive, prepare)
    return GenerationStream(served, requests, state.bridge, state.metrics)


def _templates(body: NativeBody, state: ServerState) -> tuple[str | None, str | None]:
    """Return the request's templates; raise `ApiError` for one that is not allowed."""
    given = body.decoder_input_template or None, body.encoder_input_template or None
    # the language of {query} computes nothing, so that it needs no permission
    if not state.config.request_templates and any(t and _JINJA.search(t) for t in given):
        raise ApiError(
            400,
            "this server takes no Jinja templates from requests (request_templates); use one with "
            "{query}",
        )
    return given


def _prompt(
    served: ServedModel, body: NativeBody, of_decoder: str | None, of_encoder: str | None
) -> tuple[list[int], list[int] | None]:
    """Return the prompt, and the decoder's in a model with an encoder."""
    has_template = served.has_template or of_decoder or of_encoder
    if not has_template and served.model.spec.encoder is None:  # a base model continues texts
        text = served.check_size(body.text + body.res_prefix, "text")
        return served.model.tokenizer.prompt_ids(text), None
    messages = [{"role": "user", "content": body.text}]
    if body.system_prompt:
        messages.insert(0, {"role": "system", "content": body.system_prompt})
    if body.res_prefix:
        messages.append({"role": "assistant", "content": body.res_prefix})
    return served.turn_ids(
        messages, of_decoder, of_encoder, continue_final_message=bool(body.res_prefix)
    )


def _sampling(served: ServedModel, body: NativeBody) -> GenerationBody:
    """Return the sampling fields: Inferflow's default strategy unless the model has one."""
    name = body.decoding_alg.lower().removeprefix("sample.")
    if not name and "decoding" not in served.defaults:
        name = "auto"
    if name and name not in INFERFLOW:
        raise ApiError(400, str(unknown_name("decoding_alg", body.decoding_alg, INFERFLOW)))
    values = {
        "seed": body.random_seed or None,
        "temperature": body.temperature if "temperature" in body.model_fields_set else None,
        "decoding": f"inferflow.{name}" if name else None,
    }
    return GenerationBody.model_validate(values)


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

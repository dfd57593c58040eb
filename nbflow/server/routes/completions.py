"""``POST /v1/completions``: continue texts or token ids, and score them (echo with logprobs)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nbflow.engine.request import Request as EngineRequest
from nbflow.server.errors import ApiError, json_response
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.logprobs import CompletionLogprobs, of_prompt
from nbflow.server.long_json import long_response
from nbflow.server.requests import build_requests, check_number
from nbflow.server.schemas import CompletionBody
from nbflow.server.served_model import ServedModel
from nbflow.server.state import ServerState, note, state_of
from nbflow.server.stream import (
    DONE,
    GenerationStream,
    OutputChunk,
    Stream,
    event,
    mean_logprob,
    unless_gone,
)
from nbflow.server.workers import Workers, check_wanted

router = APIRouter(tags=["OpenAI"])

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/completions", summary="Continue texts")
async def completions(
    body: CompletionBody, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Continue texts."""
    served = state.models.generating(body.model)
    prompts = body.prompts()
    check_number(body, len(prompts), state.config.limits)
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens

    def prepare() -> tuple[list[list[int]], list[GenerationRequest]]:
        ids = prompt_ids(served, prompts, body.add_special_tokens)
        return ids, build_requests(
            served, body, ids, most, state.config.limits, continues_text=True, echo=body.echo
        )

    ids, requests = await state.workers.run_for(request.receive, prepare)
    writer = _ResponseWriter(
        served, body, body.request_id or request.state.request_id, prompts, ids
    )
    generation = GenerationStream(served, requests, state.bridge, state.metrics)
    n_prompt = sum(map(len, ids))
    note(request, model=served.name, user=body.user, prompt_tokens=n_prompt, n=len(requests))
    if body.stream:
        await generation.__aenter__()  # before the response starts: errors set the status
        return Stream(writer.stream(generation, request, state.workers), generation.close)
    async with generation:
        chunks = await unless_gone(request.receive, generation.collect())
    usage = generation.usage(len(prompts))
    note(request, completion_tokens=usage["completion_tokens"])
    if body.logprobs is None and body.prompt_logprobs is None:
        return json_response(writer.collect(chunks, generation, usage))
    return await state.workers.run_for(
        request.receive, lambda: long_response(writer.collect(chunks, generation, usage))
    )


def prompt_ids(
    served: ServedModel,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool,
    param: str = "prompt",
) -> list[list[int]]:
    """Return the token ids of prompts; error messages name the field `param`."""
    if not prompts:
        raise ApiError(400, "there must be at least one text", param=param)
    for prompt in prompts:
        if isinstance(prompt, str):
            served.check_size(prompt, param)
    found = []
    for prompt in prompts:
        check_wanted()
        ids = served.text_ids(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        found.append(ids)
    return found


class _ResponseWriter:
    """Response writer of one request."""

    def __init__(
        self,
        served: ServedModel,
        body: CompletionBody,
        name: str,
        prompts: Sequence[str | list[int]],
        ids: Sequence[list[int]],
    ) -> None:
        self._served = served
        self._body = body
        self._prompts = prompts
        self._ids = ids
        self._decoded: dict[int, str] = {}
        self._head = {
            "id": f"cmpl-{name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or served.name,
        }

    def collect(
        self, chunks: list[OutputChunk], generation: GenerationStream, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the response body; choices are in prompt-major order."""
        kept: list[OutputChunk] = []
        n_drawn, n = self._body.n_drawn, self._body.n
        for start in range(0, len(chunks), n_drawn):
            some = chunks[start : start + n_drawn]
            if n_drawn > n:
                some = sorted(some, key=mean_logprob, reverse=True)[:n]
            kept += some
        choices = [self._choice(i, chunk, generation, True) for i, chunk in enumerate(kept)]
        return {**self._head, "choices": choices, "usage": usage}

    async def stream(
        self, generation: GenerationStream, request: Request, workers: Workers
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events; chunks that are ready together go out in one write."""
        begun: set[int] = set()
        pending: list[OutputChunk] = []
        async for chunks in generation:
            events = []
            chunks, pending = [*pending, *chunks], []
            for chunk in chunks:
                if chunk.error is not None:
                    yield event(chunk.error.body()) + DONE
                    return
                if self._lacks_prompt(chunk, generation):
                    pending.append(chunk)
                    continue
                first = chunk.index not in begun
                begun.add(chunk.index)
                if first and self._body.echo and self._body.logprobs is not None:
                    events.append(await workers.run(self._chunk_event, chunk, generation, first))
                else:
                    events.append(self._chunk_event(chunk, generation, first))
            yield b"".join(events)
        usage = generation.usage(len(self._prompts))
        note(request, completion_tokens=usage["completion_tokens"])
        yield (self._event([], generation, usage) if self._body.includes_usage else b"") + DONE

    def _lacks_prompt(self, chunk: OutputChunk, generation: GenerationStream) -> bool:
        """Return True while the prompt's log-probabilities that a chunk echoes are pending."""
        asked = self._first_request(chunk, generation)
        return self._body.echo and asked.needs_prompt_logits

    def _first_request(self, chunk: OutputChunk, generation: GenerationStream) -> EngineRequest:
        """Return the request that computes the prompt log-probabilities of a choice."""
        return generation.request_of(chunk.index - chunk.index % self._body.n_drawn)

    def _chunk_event(self, chunk: OutputChunk, generation: GenerationStream, first: bool) -> bytes:
        return self._event([self._choice(chunk.index, chunk, generation, first)], generation)

    def _event(
        self,
        choices: list[dict[str, Any]],
        generation: GenerationStream,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._body.continuous_usage:
            chunk["usage"] = usage or generation.usage(len(self._prompts))
        elif self._body.includes_usage:
            chunk["usage"] = usage
        return event(chunk)

    def _choice(
        self, index: int, chunk: OutputChunk, generation: GenerationStream, first: bool
    ) -> dict[str, Any]:
        """Return a choice; `first` adds the echoed prompt."""
        body, request = self._body, self._first_request(chunk, generation)
        echoed = self._text_of(chunk.index // body.n_drawn) if body.echo else ""
        logprobs = None
        if body.logprobs is not None:
            found = CompletionLogprobs(self._served, body.logprobs, body.return_tokens_as_token_ids)
            if body.echo and first:
                self._add_prompt(found, request.prompt, request.prompt_results)
            for output in chunk.tokens:
                found.add(output, len(echoed))
            logprobs = found.body()
        choice: dict[str, Any] = {
            "index": index,
            "text": (echoed if first else "") + chunk.text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
        }
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = of_prompt(
                self._served, request.prompt, request.prompt_results, body.prompt_logprobs
            )
        if body.return_token_ids:
            choice["token_ids"] = chunk.ids
            choice["prompt_token_ids"] = request.prompt if first else None
        return choice

    def _text_of(self, index: int) -> str:
        """Return the text of a prompt."""
        prompt = self._prompts[index]
        if isinstance(prompt, str):
            return prompt
        if index not in self._decoded:
            tokenizer = self._served.tokenizer
            self._decoded[index] = "" if tokenizer is None else tokenizer.decode(prompt)
        return self._decoded[index]

    def _add_prompt(
        self,
        logprobs: CompletionLogprobs,
        prompt: Sequence[int],
        results: Sequence[tuple[float, list[tuple[int, float]]]],
    ) -> None:
        """Add the prompt's tokens."""
        offset = self._served.offsets()
        logprobs.first(prompt[0], offset(prompt[0]))
        for token, (logprob, top) in zip(prompt[1:], results, strict=False):
            logprobs.add_token(token, logprob, top, offset(token))

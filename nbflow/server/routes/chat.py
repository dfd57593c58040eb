"""``POST /v1/chat/completions``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nbflow.server.errors import json_response
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.logprobs import for_chat, of_prompt
from nbflow.server.long_json import long_response
from nbflow.server.requests import build_requests
from nbflow.server.routes.tokenize import own_template
from nbflow.server.schemas import ChatBody
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

router = APIRouter(tags=["OpenAI"])


@router.post("/chat/completions", summary="Continue a conversation")
async def chat_completions(
    body: ChatBody, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Continue a conversation."""
    served = state.models.generating(body.model)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    template = own_template(body.chat_template, state)

    def prepare() -> tuple[list[int], list[GenerationRequest]]:
        ids = chat_ids(served, body, template)
        return ids, build_requests(
            served, body, [ids], limit, state.config.limits, continues_text=False
        )

    ids, requests = await state.workers.run_for(request.receive, prepare)
    writer = _ResponseWriter(served, body, body.request_id or request.state.request_id)
    generation = GenerationStream(served, requests, state.bridge, state.metrics)
    note(request, model=served.name, user=body.user, prompt_tokens=len(ids), n=len(requests))
    if body.stream:
        await generation.__aenter__()  # before the response starts: errors set the status
        return Stream(writer.stream(generation, request), generation.close)
    async with generation:
        chunks = await unless_gone(request.receive, generation.collect())
    if body.n_drawn > body.n:
        chunks = sorted(chunks, key=mean_logprob, reverse=True)[: body.n]
    usage = generation.usage(1)
    note(request, completion_tokens=usage["completion_tokens"])
    if not body.logprobs and body.prompt_logprobs is None:
        return json_response(writer.collect(chunks, generation, usage))
    return await state.workers.run_for(
        request.receive, lambda: long_response(writer.collect(chunks, generation, usage))
    )


def chat_ids(served: ServedModel, body: ChatBody, template: str | None) -> list[int]:
    """Return the prompt token ids of a conversation."""
    return served.chat_ids(
        body.messages,
        template,
        add_generation_prompt=body.add_generation_prompt,
        documents=body.documents,
        **body.chat_template_kwargs,
    )


class _ResponseWriter:
    """Response writer of one request."""

    def __init__(self, served: ServedModel, body: ChatBody, name: str) -> None:
        self._served = served
        self._body = body
        self._head = {
            "id": f"chatcmpl-{name}",
            "created": int(time.time()),
            "model": body.model or served.name,
        }

    def collect(
        self, chunks: list[OutputChunk], generation: GenerationStream, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the response body."""
        choices = [
            self._choice(
                i, chunk, message={"role": "assistant", "content": chunk.text, "refusal": None}
            )
            for i, chunk in enumerate(chunks)
        ]
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage,
            "system_fingerprint": None,
        }
        request = generation.request_of(0)
        if self._body.prompt_logprobs is not None:
            results = request.prompt_results
            answer["prompt_logprobs"] = of_prompt(
                self._served, request.prompt, results, self._body.prompt_logprobs
            )
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = request.prompt
        return answer

    def _choice(self, index: int, chunk: OutputChunk, **content: Any) -> dict[str, Any]:
        n_top = self._body.n_top_logprobs
        logprobs = None
        if n_top is not None and chunk.tokens:
            as_ids = self._body.return_tokens_as_token_ids
            logprobs = for_chat(self._served, chunk.tokens, n_top, as_ids)
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
        }
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.ids
        return choice

    async def stream(self, generation: GenerationStream, request: Request) -> AsyncIterator[bytes]:
        """Yield server-sent events; chunks that are ready together go out in one write."""
        first = {"role": "assistant", "content": ""}
        choices = [
            self._choice(i, OutputChunk(i), delta=first) for i in range(generation.n_choices)
        ]
        yield b"".join(self._event([choice], generation) for choice in choices)
        async for chunks in generation:
            failed = next((chunk.error for chunk in chunks if chunk.error is not None), None)
            if failed is not None:
                yield event(failed.body()) + DONE
                return
            yield b"".join(
                self._event([choice], generation)
                for chunk in chunks
                for choice in self._deltas(chunk)
            )
        usage = generation.usage(1)
        note(request, completion_tokens=usage["completion_tokens"])
        yield (self._event([], generation, usage) if self._body.includes_usage else b"") + DONE

    def _deltas(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield a choice with the chunk's text, if any, then one with the finish reason."""
        if chunk.text or chunk.tokens:
            text = dataclasses.replace(chunk, finish_reason=None)
            yield self._choice(chunk.index, text, delta={"content": chunk.text})
        if chunk.finish_reason is not None:
            end = dataclasses.replace(chunk, text="", tokens=[])
            yield self._choice(chunk.index, end, delta={})

    def _event(
        self,
        choices: list[dict[str, Any]],
        generation: GenerationStream,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._body.continuous_usage:
            chunk["usage"] = usage or generation.usage(1)
        elif self._body.includes_usage:
            chunk["usage"] = usage
        return event(chunk)

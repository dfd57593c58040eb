"""Responses of the generating endpoints, whole or as a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from nbflow.server.errors import json_response
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.long_json import long_response
from nbflow.server.schemas import GenerationBody
from nbflow.server.served_model import ServedModel
from nbflow.server.state import ServerState, note
from nbflow.server.stream import (
    DONE,
    GenerationStream,
    OutputChunk,
    Stream,
    event,
    mean_logprob,
    unless_gone,
)


class ResponseWriter(ABC):
    """Response writer of one request."""

    id_prefix: str
    """Beginning of the response's id."""
    chunk_object: str
    """Field ``object`` of a chunk of a stream."""
    _body: GenerationBody

    def __init__(
        self,
        served: ServedModel,
        body: GenerationBody,
        request: Request,
        state: ServerState,
        ids: Sequence[list[int]],
    ) -> None:
        self._served = served
        self._request = request
        self._state = state
        self._ids = ids
        self._body = body
        self._head = {
            "id": f"{self.id_prefix}-{body.request_id or request.state.request_id}",
            "created": int(time.time()),
            "model": state.models.shown(body.model, served),
        }

    async def respond(self, requests: Sequence[GenerationRequest]) -> Response:
        """Submit the requests and return the response; a long one is written by a worker."""
        body, request, state = self._body, self._request, self._state
        generation = GenerationStream(self._served, requests, state.bridge, state.metrics)
        n_prompt = sum(map(len, self._ids))
        about = {"model": self._served.name, "user": body.user, "n": len(requests)}
        note(request, **about, prompt_tokens=n_prompt)
        if body.stream:
            await generation.__aenter__()  # before the response starts: errors set the status
            return Stream(self.stream(generation), generation.close)
        async with generation:
            chunks = self._best(await unless_gone(request.receive, generation.collect()))
        usage = self._final_usage(generation)
        if body.n_top_logprobs is None and body.prompt_logprobs is None:
            return json_response(self.collect(chunks, generation, usage))
        return await state.workers.run_for(
            request.receive, lambda: long_response(self.collect(chunks, generation, usage))
        )

    def _best(self, chunks: list[OutputChunk]) -> list[OutputChunk]:
        """Return the n best of each prompt's samples."""
        n_drawn, n = self._body.n_drawn, self._body.n
        if n_drawn == n:
            return chunks
        kept: list[OutputChunk] = []
        for start in range(0, len(chunks), n_drawn):
            drawn = chunks[start : start + n_drawn]
            kept += sorted(drawn, key=mean_logprob, reverse=True)[:n]
        return kept

    @abstractmethod
    def collect(
        self, chunks: list[OutputChunk], generation: GenerationStream, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the response body; choices are in prompt-major order."""

    async def stream(self, generation: GenerationStream) -> AsyncIterator[bytes]:
        """Yield server-sent events; chunks that are ready together go out in one write."""
        yield self._beginning(generation)
        async for chunks in generation:
            failed = next((chunk.error for chunk in chunks if chunk.error is not None), None)
            if failed is not None:
                yield event(failed.body()) + DONE
                return
            yield await self._events(chunks, generation)
        usage = self._final_usage(generation)
        yield (self._event([], generation, usage) if self._body.includes_usage else b"") + DONE

    def _beginning(self, generation: GenerationStream) -> bytes:
        """Return the events before the first tokens."""
        return b""

    @abstractmethod
    async def _events(self, chunks: list[OutputChunk], generation: GenerationStream) -> bytes:
        """Return the events of new chunks."""

    def _event(
        self,
        choices: list[dict[str, Any]],
        generation: GenerationStream,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._body.continuous_usage:
            chunk["usage"] = usage or generation.usage(len(self._ids))
        elif self._body.includes_usage:
            chunk["usage"] = usage
        return event(chunk)

    def _final_usage(self, generation: GenerationStream) -> dict[str, Any]:
        """Return the token counts, and log the new tokens."""
        usage = generation.usage(len(self._ids))
        note(self._request, completion_tokens=usage["completion_tokens"])
        return usage

"""``POST /v1/chat/completions``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nbflow.server.errors import errors_of
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.logprobs import for_chat, of_prompt
from nbflow.server.requests import build_requests
from nbflow.server.routes.generation import ResponseWriter
from nbflow.server.routes.tokenize import own_template
from nbflow.server.schemas import ChatBody
from nbflow.server.state import State
from nbflow.server.stream import GenerationStream, OutputChunk

router = APIRouter(tags=["OpenAI"])


@router.post("/chat/completions", summary="Continue a conversation")
async def chat_completions(body: ChatBody, request: Request, state: State) -> Response:
    """Continue a conversation."""
    served = state.models.generating(body.model)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    template = own_template(body.chat_template, state)

    def prepare() -> tuple[list[int], list[GenerationRequest]]:
        with errors_of("messages"):
            ids, decoder_ids = served.turn_ids(body.messages, template, **body.variables())
            continues = body.continue_final_message or served.continues(body.messages, template)
        return ids, build_requests(
            served, body, [ids], limit, state.config.limits, continues_text=continues,
            decoder_ids=decoder_ids,
        )  # fmt: skip

    ids, requests = await state.workers.run_for(request.receive, prepare)
    return await _ChatWriter(served, body, request, state, [ids]).respond(requests)


class _ChatWriter(ResponseWriter):
    """Response writer of one request."""

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"
    _body: ChatBody

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

    def _beginning(self, generation: GenerationStream) -> bytes:
        first = {"role": "assistant", "content": ""}
        choices = [
            self._choice(i, OutputChunk(i), delta=first) for i in range(generation.n_choices)
        ]
        return b"".join(self._event([choice], generation) for choice in choices)

    async def _events(self, chunks: list[OutputChunk], generation: GenerationStream) -> bytes:
        return b"".join(
            self._event([choice], generation) for chunk in chunks for choice in self._deltas(chunk)
        )

    def _deltas(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield a choice with the chunk's text, if any, then one with the finish reason."""
        if chunk.text or chunk.tokens:
            text = dataclasses.replace(chunk, finish_reason=None)
            yield self._choice(chunk.index, text, delta={"content": chunk.text})
        if chunk.finish_reason is not None:
            end = dataclasses.replace(chunk, text="", tokens=[])
            yield self._choice(chunk.index, end, delta={})

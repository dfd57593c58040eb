"""``POST /v1/completions``: continue texts or token ids, and score them (echo with logprobs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nbflow.engine.request import Request as EngineRequest
from nbflow.engine.request import TopLogprobs
from nbflow.server.errors import ApiError, errors_of
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.logprobs import CompletionLogprobs, of_prompt
from nbflow.server.requests import build_requests, check_number
from nbflow.server.routes.generation import ResponseWriter
from nbflow.server.schemas import CompletionBody
from nbflow.server.served_model import ServedModel
from nbflow.server.state import State
from nbflow.server.stream import GenerationStream, OutputChunk
from nbflow.server.workers import check_wanted

router = APIRouter(tags=["OpenAI"])

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/completions", summary="Continue texts")
async def completions(body: CompletionBody, request: Request, state: State) -> Response:
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
    writer = _CompletionWriter(served, body, request, state, ids)
    return await writer.respond(requests)


def prompt_ids(
    served: ServedModel,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool,
    param: str = "prompt",
) -> list[list[int]]:
    """Return the token ids of prompts; error messages name the field `param`."""
    if not prompts:
        raise ApiError(400, f"{param}: must have at least one text, got []", param=param)
    for prompt in prompts:
        if isinstance(prompt, str):
            served.check_size(prompt, param)
    found = []
    for prompt in prompts:
        check_wanted()
        if isinstance(prompt, str):
            with errors_of(param):
                prompt = served.model.tokenizer.prompt_ids(prompt, add_special_tokens)
        found.append(prompt)
    return found


class _CompletionWriter(ResponseWriter):
    """Response writer of one request."""

    id_prefix, chunk_object = "cmpl", "text_completion"
    _body: CompletionBody

    def __init__(self, served: ServedModel, body: CompletionBody, *rest: Any) -> None:
        super().__init__(served, body, *rest)
        self._prompts = body.prompts()
        self._decoded: dict[int, str] = {}
        self._begun: set[int] = set()
        self._pending: list[OutputChunk] = []

    def collect(
        self, chunks: list[OutputChunk], generation: GenerationStream, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """See `ResponseWriter.collect`."""
        choices = [self._choice(i, chunk, generation, True) for i, chunk in enumerate(chunks)]
        return {**self._head, "object": self.chunk_object, "choices": choices, "usage": usage}

    async def _events(self, chunks: list[OutputChunk], generation: GenerationStream) -> bytes:
        events = []
        chunks, self._pending = [*self._pending, *chunks], []
        for chunk in chunks:
            if self._lacks_prompt(chunk, generation):
                self._pending.append(chunk)
                continue
            first = chunk.index not in self._begun
            self._begun.add(chunk.index)
            if first and self._body.echo and self._body.logprobs is not None:
                run = self._state.workers.run
                events.append(await run(self._chunk_event, chunk, generation, first))
            else:
                events.append(self._chunk_event(chunk, generation, first))
        return b"".join(events)

    def _lacks_prompt(self, chunk: OutputChunk, generation: GenerationStream) -> bool:
        """Return True while the prompt's log-probabilities that a chunk echoes are pending."""
        asked = self._first_request(chunk, generation)
        return self._body.echo and asked.needs_prompt_logits

    def _first_request(self, chunk: OutputChunk, generation: GenerationStream) -> EngineRequest:
        """Return the request that computes the prompt log-probabilities of a choice."""
        return generation.request_of(chunk.index - chunk.index % self._body.n_drawn)

    def _chunk_event(self, chunk: OutputChunk, generation: GenerationStream, first: bool) -> bytes:
        return self._event([self._choice(chunk.index, chunk, generation, first)], generation)

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
                assert output.token is not None
                offset = len(echoed) + output.offset
                found.add(output.token, output.logprob, output.top_logprobs or [], offset)
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
            own = self._served.tokenizer
            self._decoded[index] = "" if own is None else own.decode(own.known(prompt))
        return self._decoded[index]

    def _add_prompt(
        self,
        logprobs: CompletionLogprobs,
        prompt: Sequence[int],
        results: Sequence[tuple[float, TopLogprobs]],
    ) -> None:
        """Add the prompt's tokens."""
        stream = self._served.text_stream()
        first: list[tuple[float | None, TopLogprobs]] = [(None, [])]
        for token, (logprob, top) in zip(prompt, [*first, *results], strict=False):
            logprobs.add(token, logprob, top, stream.n_characters)
            stream.push(token)

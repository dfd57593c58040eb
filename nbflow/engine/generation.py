"""What a request came to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from nbflow.decoding.search import Continuation
from nbflow.engine.request import FinishReason, Request, TopLogprobs
from nbflow.engine.text_stream import TextStream
from nbflow.tokenizer import Tokenizer


@dataclass(frozen=True)
class Generation:
    """A continuation."""

    ids: list[int]
    """New token ids."""
    text: str
    """The new tokens as text, up to a stop text; empty if the model was loaded without a
    tokenizer."""
    logprobs: list[float]
    """Natural logarithm of each new token's probability."""
    finish_reason: FinishReason
    """"stop": an end token was drawn or a stop text came; "length": max_tokens or the context is
    full."""
    prompt_ids: list[int]
    """The prompt as token ids."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """With `logprobs`: the most probable tokens in the place of each new one."""
    prompt_logprobs: list[tuple[float, TopLogprobs]] = field(default_factory=list)
    """With `prompt_logprobs`: for each prompt token but the first its log-probability and the most
    probable tokens."""
    n_drafted: int = 0
    """Tokens that a draft model proposed."""
    n_accepted: int = 0
    """Proposed tokens that were right."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed, but shared with another request."""
    score: float | None = None
    """Of a beam search: the log-probability over the length to the power of the penalty."""

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the proposed tokens that were right; None without proposals."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @classmethod
    def of(cls, request: Request, text: str) -> Generation:
        """Return what a request that has ended came to."""
        assert request.finish_reason is not None
        return cls(
            request.ids, text, request.logprobs, request.finish_reason, request.prompt,
            request.top_logprobs, request.prompt_results, request.n_drafted, request.n_accepted,
            request.cached_tokens,
        )  # fmt: skip

    def replaced(
        self, found: Continuation, stop_ids: frozenset[int], tokenizer: Tokenizer | None
    ) -> Generation:
        """Return the same with another continuation, which a search has found."""
        ended = found.steps[-1].token in stop_ids
        steps = found.steps[:-1] if ended else found.steps
        ids = [step.token for step in steps]
        return dataclasses.replace(
            self,
            ids=ids,
            text="" if tokenizer is None else tokenizer.decode(ids),
            logprobs=[step.logprob for step in steps],
            top_logprobs=[step.top for step in steps if step.top],
            finish_reason="stop" if ended else "length",
            score=found.score,
        )


def text_of(request: Request, tokenizer: Tokenizer | None) -> str:
    """Return the new tokens of a request as text, up to a stop text."""
    if tokenizer is None:
        return ""
    if not request.stop_texts:
        return tokenizer.decode(request.ids)
    stream = TextStream(tokenizer, request.stop_texts, request.include_stop_text)
    return "".join([*(stream.push(i) for i in request.ids), stream.finish()])

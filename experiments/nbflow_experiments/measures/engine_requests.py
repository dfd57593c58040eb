"""Requests through `nbflow.LLMEngine`, for the measures: who asked what, and when it came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM
    from nbflow.engine.llm_engine import LLMEngine

T = TypeVar("T")


@dataclass(frozen=True)
class TimedRequest:
    """One request."""

    prompt: np.ndarray
    """Token ids, int64 (T,)."""
    n_new: int
    """Tokens to generate, greedily; end tokens do not end it."""
    draft: Any = None
    """Source of draft tokens: None, "ngram", or a loaded model."""
    n_draft: int = 5
    """Tokens proposed at a time."""
    salt: str = ""
    """Prompts of different salts share nothing in the prefix cache."""


@dataclass(frozen=True)
class RequestResult:
    """Result of a request."""

    ids: tuple[int, ...]
    """The new tokens."""
    first_token_s: float
    """When the first one was there, since the round began."""
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    n_drafted: int
    """Tokens proposed."""
    n_accepted: int
    """Proposed tokens that were right."""


@dataclass(frozen=True)
class Round:
    """Some requests, all there at the beginning."""

    seconds: float
    """From the beginning to the end of the last one."""
    results: tuple[RequestResult, ...]
    """In the order of the requests."""

    @property
    def n_tokens(self) -> int:
        """Return how many tokens were generated."""
        return sum(len(result.ids) for result in self.results)


def random_prompt(model: LLM, rng: np.random.Generator, n: int) -> np.ndarray:
    """Return `n` random token ids, as the benchmarks use them."""
    return rng.integers(0, model.spec.vocab_size, n)


def with_engine(model: LLM, work: Callable[[LLMEngine], T], **options: Any) -> T | None:
    """Run an engine for `model` and call `work` with it on the rank that leads.

    Every rank of the model calls it alike; the others return None when it is over.
    """
    import nbflow

    with nbflow.LLMEngine(model, **options) as engine:
        if engine.leads:
            return work(engine)
        engine.follow()
        return None


def serve(engine: LLMEngine, requests: Sequence[TimedRequest], *, at_once: bool = True) -> Round:
    """Run requests that all arrive at the same moment.

    Parameters
    ----------
    engine : Engine
        A running engine.
    requests : sequence of TimedRequest
        The requests.
    at_once : bool
        Whether they are submitted together; otherwise one after the other, each when the one before
        has ended.

    Returns
    -------
    Round
        What came out and when, seconds of wall time since the first was submitted.
    """
    submitted = []
    for spec in requests:
        request = engine.model.make_request(
            spec.prompt, spec.n_new, "greedy", 0, True, draft=spec.draft, n_draft=spec.n_draft
        )
        request.wants_logprobs = False
        request.cache_salt = spec.salt
        submitted.append(request)
    began = time.monotonic()
    handles = []
    for request in submitted:
        handles.append(engine.submit(request))
        if not at_once:
            handles[-1].result()
    for handle in handles:
        handle.result()
    ends = [handle.timings.ended or 0.0 for handle in handles]
    return Round(
        max(ends) - began,
        tuple(
            RequestResult(
                tuple(handle.request.ids),
                (handle.timings.first_token or 0.0) - began,
                handle.cached_tokens,
                handle.request.n_drafted,
                handle.request.n_accepted,
            )
            for handle in handles
        ),
    )

"""Timed requests through `nbflow.LLMEngine`, for the measures."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM
    from nbflow.engine.llm_engine import LLMEngine

T = TypeVar("T")


@dataclass(frozen=True)
class TimedRequest:
    """Request to time."""

    prompt: np.ndarray
    """Token ids, int64 (T,)."""
    n_new: int
    """Tokens to generate, greedily; EOS is ignored."""
    draft: Any = None
    """Source of draft tokens: None, "ngram", or a loaded model."""
    n_draft: int = 5
    salt: str = ""
    """Prefix-cache salt: prompts of different salts share no pages."""


@dataclass(frozen=True)
class RequestResult:
    """Tokens and timing of a request."""

    ids: tuple[int, ...]
    first_token_s: float
    """Time to first token, from the start of the round."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    n_drafted: int
    n_accepted: int


@dataclass(frozen=True)
class Round:
    """Requests that arrive at the same moment."""

    seconds: float
    """Wall time until the last one ended."""
    results: tuple[RequestResult, ...]

    @property
    def n_tokens(self) -> int:
        """Return the number of generated tokens."""
        return sum(len(result.ids) for result in self.results)


def random_prompt(model: LLM, rng: np.random.Generator, n: int) -> np.ndarray:
    """Return `n` random token ids, as the benchmarks use them."""
    return rng.integers(0, model.spec.vocab_size, n)


def with_engine(model: LLM, work: Callable[[LLMEngine], T], **options: Any) -> T | None:
    """Run an engine for `model` and call `work` with it on the leading rank.

    Every rank of the model calls this; the others return None at the end.
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
        Submit all together; otherwise sequentially, each after the previous one ended.
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


def repeat_rounds(
    n: int, warmup: int, min_s: float, run: Callable[[int], tuple[Round, ...]]
) -> list[tuple[Round, ...]]:
    """Return the rounds of `n` repetitions, after `warmup` discarded ones.

    ``run(i)`` runs the rounds of the i-th repetition, which differ in kind.  It is called until the
    rounds of each kind take `min_s` seconds, and the mean times count.
    """
    from nbflow.benchmark.timing import repeat_for

    for i in range(warmup):
        run(i)
    repetitions = []
    for i in range(warmup, warmup + n):
        runs = repeat_for(min_s, functools.partial(run, i), _shortest_s)
        repetitions.append(tuple(mean_round(kind) for kind in zip(*runs, strict=True)))
    return repetitions


def _shortest_s(rounds: tuple[Round, ...]) -> float:
    return min(r.seconds for r in rounds)


def mean_round(rounds: Sequence[Round]) -> Round:
    """Return the mean times of rounds of the same requests; the rest is that of the first round."""
    results = [
        replace(same[0], first_token_s=float(np.mean([one.first_token_s for one in same])))
        for same in zip(*(r.results for r in rounds), strict=True)
    ]
    return Round(float(np.mean([r.seconds for r in rounds])), tuple(results))

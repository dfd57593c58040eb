"""Time a loaded model: prompt processing and generation.

What is timed: whole steps as a user gets them (scheduling, kernels, communication, drawing
greedily), from the first step to the last.  What is excluded: loading, compiling (a warm-up run
comes first), making the requests.  Token ids are random with a fixed seed; end tokens are ignored.
"""

from __future__ import annotations

import time

import numpy as np

from nbflow.engine.model import Model
from nbflow.engine.request import Request


def time_prefill(
    model: Model, n_prompt: int, batch: int = 1, repeats: int = 5, warmup: int = 1
) -> list[float]:
    """Return the seconds to run `batch` prompts of `n_prompt` tokens and draw one token each.

    Every rank of the model calls it alike.  One entry per repetition; divide ``batch * n_prompt``
    by it for tokens per second.
    """
    return [_run(model, n_prompt, 1, batch)[0] for _ in range(warmup + repeats)][warmup:]


def time_decode(
    model: Model, n_prompt: int, n_gen: int, batch: int = 1, repeats: int = 5, warmup: int = 1
) -> list[float]:
    """Return the seconds for `n_gen` steps that each draw one token for `batch` sequences.

    Every rank of the model calls it alike.  The sequences begin with `n_prompt` tokens, whose time
    is not counted.  One entry per repetition; divide ``batch * n_gen`` by it for tokens per
    second.
    """
    return [_run(model, n_prompt, n_gen + 1, batch)[1] for _ in range(warmup + repeats)][warmup:]


def _run(model: Model, n_prompt: int, n_new: int, batch: int) -> tuple[float, float]:
    """Return the seconds until every sequence has its first token, and from then to the end."""
    requests = make_requests(model, n_prompt, n_new, batch)
    started = time.perf_counter()
    first = started
    for _ in model.run_requests(requests):
        if any(not r.ids for r in requests):
            continue
        if first == started:
            first = time.perf_counter()
    return first - started, time.perf_counter() - first


def make_requests(model: Model, n_prompt: int, n_new: int, batch: int) -> list[Request]:
    """Return requests with random prompts that draw exactly `n_new` tokens each."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.spec.vocab_size, (batch, n_prompt))
    requests = [model.make_request(row, n_new, "greedy", 0, ignore_eos=True) for row in ids]
    for request in requests:
        request.wants_logprobs = False
    return requests

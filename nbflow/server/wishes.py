"""From the fields of a body to requests of the engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

from nbflow.server.errors import ApiError
from nbflow.server.fields import Sampling
from nbflow.server.job import Wish
from nbflow.server.parameters import make_request
from nbflow.server.served import Served


def make_wishes(
    served: Served,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    *,
    continues_text: bool,
    echo: bool = False,
    most: int,
    request_s: float,
) -> list[Wish]:
    """Return the continuations that a body asks for: prompt by prompt, n of each.

    Parameters
    ----------
    served : Served
        The model.
    body : Sampling
        The fields.
    prompts : sequence of sequence of int
        Token ids of each prompt.
    max_tokens : int or None
        Most new tokens; None for what the context has room for.
    continues_text : bool
        See `Wish`.
    echo : bool
        Whether the prompt's log-probabilities are to be told with the tokens'.
    most : int
        Most continuations of one request.
    request_s : float
        Seconds for each; 0 for no limit.
    """
    n = body.n_drawn
    if len(prompts) * n > most:
        raise ApiError(
            400,
            f"{len(prompts)} prompts x {n} continuations are more than {most}, the most that one "
            "request may ask for (limits.choices); send several requests",
            param="n",
        )
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    wants_logprobs = body.n_top_logprobs is not None or n > body.n
    wishes = []
    for prompt in prompts:
        first = make_request(served, body, list(prompt), max_tokens)
        first.wants_logprobs = wants_logprobs
        first.n_top_logprobs = body.n_top_logprobs or 0
        first.prompt_logprobs = body.prompt_logprobs
        if echo and body.n_top_logprobs is not None:
            first.prompt_logprobs = max(body.n_top_logprobs, body.prompt_logprobs or 0)
        first.priority = body.priority
        first.cache_salt = body.cache_salt
        first.deadline = request_s or None
        for i in range(n):
            request = dataclasses.replace(
                first,
                seed=(seed + i) % 2**64,
                ids=[],
                logprobs=[],
                top_logprobs=[],
                prompt_results=[],
            )
            wishes.append(
                Wish(request, body.stops, body.include_stop_str_in_output, continues_text)
            )
    return wishes

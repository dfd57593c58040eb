"""From the fields of a body to requests of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from nbflow.decoding import Search
from nbflow.engine.request import Request
from nbflow.server.config import Limits
from nbflow.server.errors import ApiError
from nbflow.server.fields import Sampling
from nbflow.server.parameters import make_strategy, search_end_ids, structure_field
from nbflow.server.searches import search_of
from nbflow.server.served import Served
from nbflow.server.stream import Wish
from nbflow.server.workers import check_wanted


def check_number(body: Sampling, n_prompts: int, limits: Limits) -> None:
    """Raise `ApiError` if a body asks for too many continuations; before anything is tokenized."""
    search = search_of(body)
    width = body.n_drawn if search is None else max(body.n_drawn, search.width)
    if n_prompts * width > limits.choices:
        raise ApiError(
            400,
            f"{n_prompts} prompts x {width} continuations are more than {limits.choices}, the "
            "most that one request may ask for (limits.choices); send several requests",
            param="n",
        )


def make_wishes(
    served: Served,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    limits: Limits,
    *,
    continues_text: bool,
    echo: bool = False,
) -> list[Wish]:
    """Return the continuations that a body asks for: prompt by prompt, n of each.

    It may take a while (a schema becomes a grammar): call it in a thread.

    Parameters
    ----------
    served : Served
        The model.
    body : Sampling
        The fields.
    prompts : sequence of sequence of int
        Token ids of each prompt; for a model with an encoder, the encoder's.
    max_tokens : int or None
        Most new tokens; None for what the context has room for.
    limits : Limits
        What one request may take.
    continues_text : bool
        See `Wish`.
    echo : bool
        Whether the prompt's log-probabilities are to be told with the tokens'.

    Raises
    ------
    ApiError, UsageError
        If the model cannot do what the body asks for.
    """
    check_number(body, len(prompts), limits)
    _check_logprobs(body, prompts, limits, echo, continues_text)
    search = search_of(body)
    n = body.n_drawn
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    most = served.model.spec.max_context if max_tokens is None else max_tokens
    if search is not None:
        return _search_wishes(served, body, prompts, most, limits, search, continues_text, echo)
    strategy, stop_ids = make_strategy(served, body)
    wishes = []
    for prompt in prompts:
        check_wanted()
        first = served.model.make_request(
            list(prompt), max(most, 1), strategy, 0, True,
            draft=served.draft, n_draft=served.options.n_draft,
            draft_verify=served.options.draft_verify,
        )  # fmt: skip
        first.max_tokens = min(most, first.max_tokens)  # 0 reads the prompt alone
        first.stop_ids = stop_ids
        _add_wishes(first, body, echo, n > body.n, limits.request_s)
        for i in range(n):
            request = first.copy()
            if i:  # the prompt's are known from the first
                request.prompt_logprobs = None
            request.seed, request.drafter = (seed + i) % 2**64, first.drafter
            wishes.append(
                Wish(
                    request,
                    body.stops,
                    body.include_stop_str_in_output,
                    continues_text,
                    structure=structure_field(body),
                )
            )
    return wishes


def _check_logprobs(
    body: Sampling, prompts: Sequence[Sequence[int]], limits: Limits, echo: bool, each: bool
) -> None:
    """Raise `ApiError` if the answer would have too many log-probabilities of prompts.

    `each` says that they are part of every choice, not told once.
    """
    asked = {"prompt_logprobs": body.prompt_logprobs, "logprobs": body.n_top_logprobs}
    if not echo:
        del asked["logprobs"]
    n_tokens = sum(map(len, prompts)) * (body.n if each else 1)
    for name, n_top in asked.items():
        if n_top is not None and n_tokens * (n_top + 1) > limits.logprobs:
            raise ApiError(
                400,
                f"{name}: {n_tokens:,} tokens of prompts with {n_top} alternatives each are more "
                f"than {limits.logprobs:,} log-probabilities, the most of one answer "
                "(limits.logprobs); ask for fewer alternatives or choices, or send several "
                "requests",
                param=name,
            )


def _search_wishes(
    served: Served,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    limits: Limits,
    search: Search,
    continues_text: bool,
    echo: bool,
) -> list[Wish]:
    """Return a search for each prompt."""
    if max_tokens < 1:
        raise ApiError(400, "a search needs max_tokens of at least 1", param="max_tokens")
    wishes = []
    for prompt in prompts:
        request = served.model.make_request(list(prompt), max_tokens, search)
        request.stop_ids = search_end_ids(served, body)
        _add_wishes(request, body, echo, False, limits.request_s)
        wishes.append(
            Wish(
                request, body.stops, body.include_stop_str_in_output, continues_text,
                search.n_found,
            )
        )  # fmt: skip
    return wishes


def _add_wishes(
    request: Request, body: Sampling, echo: bool, compares: bool, request_s: float
) -> None:
    """Put into a request what is wanted beside its tokens."""
    n_top = body.n_top_logprobs
    request.wants_logprobs = n_top is not None or compares
    request.n_top_logprobs = n_top or 0
    request.prompt_logprobs = body.prompt_logprobs
    if echo and n_top is not None:
        request.prompt_logprobs = max(n_top, body.prompt_logprobs or 0)
    request.priority = body.priority
    request.cache_salt = body.cache_salt
    request.deadline = request_s or None

"""Build engine requests from the body of an HTTP request."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from nbflow.engine.request_validation import build_request
from nbflow.engine.search import BeamSearch, ContrastiveSearch, Search
from nbflow.engine.speculative.config import attach
from nbflow.option_fields import fields
from nbflow.options import DECODER_START, STRUCTURES, SamplingParams, SearchParams
from nbflow.sampling import Strategy, build_strategy, of_other_strategies
from nbflow.server.config import PER_REQUEST, Limits
from nbflow.server.errors import ApiError, errors_of
from nbflow.server.generation_request import GenerationRequest
from nbflow.server.schemas import GenerationBody
from nbflow.server.served_model import ServedModel
from nbflow.server.workers import check_wanted

DEFAULT_BEAMS = 4
"""Beams of a body with neither beam_width nor n."""
_GUIDED = {fields(SamplingParams)[name].http_name: name for name in STRUCTURES}
"""Body field -> structure."""
_HTTP_NAMES = {
    known.name: known.http_name
    for kind in (SearchParams, SamplingParams)
    for known in fields(kind).values()
    if known.http_name
} | {"repeat_penalty": "repetition_penalty", "dry_breakers": "dry_sequence_breakers"}
"""Parameter of the engine -> body field."""
_BEAM = ("beam_width", "length_penalty", "early_stopping")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "min_tokens": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,), "logit_bias": ({},), "bad_words": ([],), "stop": ([],),
    "best_of": (1,),
}  # fmt: skip
"""Values without an effect, which some clients send with searches."""
_NEUTRAL_OF_STRATEGIES = {name: _NEUTRAL[name] for name in ("top_p", "top_k", "min_p")}
_WITH_DEFAULT = set(fields(SamplingParams)) - PER_REQUEST
"""Parameters with a default per model."""
_DRAWN = {fields(SamplingParams)[name].http_name for name in _WITH_DEFAULT} | {"best_of"}
_DRAWN -= {"decoding", "ignore_eos", "stop_token_ids", *DECODER_START}
"""Fields that a search refuses."""
_STOPS = {"stop", "include_stop_str_in_output"}


def check_number(body: GenerationBody, n_prompts: int, limits: Limits) -> None:
    """Raise `ApiError` for a body with too many continuations, before tokenization."""
    with _naming(body):
        search = search_of(body)
    width = body.n_drawn if search is None else max(body.n_drawn, search.n_sequences)
    if n_prompts * width > limits.choices:
        wide = "n" if search is None or not body.beam_width else "beam_width"
        wide = "best_of" if body.n_drawn == width > body.n else wide
        raise ApiError(
            400,
            f"{n_prompts} prompts x {width} choices exceed the limit {limits.choices} of a request "
            "(limits.choices); send several requests",
            param=body.prompt_field if width == 1 else wide,
        )


def build_requests(
    served: ServedModel,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    limits: Limits,
    *,
    continues_text: bool,
    echo: bool = False,
    decoder_ids: Sequence[int] | None = None,
) -> list[GenerationRequest]:
    """Return the engine requests of a body in prompt-major order, n for each prompt.

    Compiling a schema may take long: call it in a worker thread.

    `prompts` are token ids (the encoder's in an encoder-decoder model).  `max_tokens` None stands
    for the rest of the context; with `echo`, log-probabilities cover the prompt, too.
    `decoder_ids` are the decoder's prompt in an encoder-decoder model, e.g. of a template.
    """
    check_number(body, len(prompts), limits)
    _check_logprobs(body, prompts, limits, echo, continues_text)
    with _naming(body):
        search = search_of(body)
        params = _sampling_params(served, body, max_tokens, search)
        strategy: Strategy | Search = search or _strategy(served, body, params)
        if search is not None and params.max_tokens < 1:
            raise ApiError(400, "a search needs max_tokens of at least 1", param="max_tokens")
        if echo and params.logprobs is not None:
            n_top = max(params.logprobs, params.prompt_logprobs or 0)
            params = dataclasses.replace(params, prompt_logprobs=n_top)
        n_drawn, n_found = (body.n_drawn, 1) if search is None else (1, search.n_found)
        found = []
        for prompt in prompts:
            check_wanted()
            first = build_request(served.model, list(prompt), params, strategy, decoder_ids)
            first.wants_logprobs = params.logprobs is not None or n_drawn > body.n
            first.priority, first.cache_salt = body.priority, body.cache_salt
            first.deadline = limits.request_s or None
            if search is None and served.draft is not None:
                speculative = served.options
                attach(
                    served.draft, served.model, first, speculative.n_draft, speculative.draft_verify
                )
            for i in range(n_drawn):
                request = first.copy()
                if i:  # the first request computes those of the prompt
                    request.prompt_logprobs = None
                request.seed, request.drafter = (first.seed + i) % 2**64, first.drafter
                found.append(
                    GenerationRequest(
                        request, params, continues_text, n_found, structure_field(body)
                    )
                )
        return found


def _naming(body: GenerationBody) -> contextlib.AbstractContextManager[None]:
    """Name the body's fields in errors about parameters of the engine; see `errors_of`."""

    def field_of(param: str | None) -> str | None:
        if param is None or param in STRUCTURES:
            return param and (structure_field(body) or param)
        name = _HTTP_NAMES.get(param, param)
        in_text = body.decoding and getattr(body, name, None) is None  # NAME:PARAMETER=VALUE
        return "decoding" if in_text else name

    return errors_of(body.prompt_field, field_of)


def _sampling_params(
    served: ServedModel, body: GenerationBody, max_tokens: int | None, search: Search | None
) -> SamplingParams:
    """Return the parameters of a body over the model's defaults.

    The temperature defaults to 1, as in OpenAI's API.
    """
    given = {name: v for name, v in body.sampling_values().items() if name not in STRUCTURES}
    given |= structure_of(body)
    if search is not None:
        kept = PER_REQUEST | {"ignore_eos", "stop_token_ids", *DECODER_START}
        given = {name: value for name, value in given.items() if name in kept}
    elif body.decoding is None:
        given = _with_defaults(served, given)
        if "decoding" not in given:
            given.setdefault("temperature", 1.0)
    given.setdefault("seed", secrets.randbits(63))
    given["max_tokens"] = served.model.spec.max_context if max_tokens is None else max_tokens
    return SamplingParams.parse(given | {"n": 1})


def _with_defaults(served: ServedModel, given: dict[str, Any]) -> dict[str, Any]:
    """Return parameters over the model's defaults.

    Parameters that the default strategy does not have choose another one, as they do without a
    default; with a neutral value they are left out.
    """
    defaults = served.defaults
    others = of_other_strategies(given, defaults["decoding"]) if "decoding" in defaults else set()
    unset = {name for name in others if given[name] in _NEUTRAL_OF_STRATEGIES.get(name, ())}
    if others - unset:
        defaults = served.defaults_with(None)
    kept = {name: value for name, value in given.items() if name not in unset}
    return {**{k: v for k, v in defaults.items() if k in _WITH_DEFAULT}, **kept}


def _strategy(served: ServedModel, body: GenerationBody, params: SamplingParams) -> Strategy:
    """Return the decoding strategy of a body with its constraints."""
    # `params` has them without a strategy of the body
    defaults = {} if body.decoding is None else served.defaults_with(body.decoding)
    n_vocab = served.model.spec.vocab_size
    return build_strategy(params, n_vocab, served.tokenizer, served.end_ids, defaults)


def _check_logprobs(
    body: GenerationBody, prompts: Sequence[Sequence[int]], limits: Limits, echo: bool, each: bool
) -> None:
    """Raise `ApiError` if the response would have too many prompt log-probabilities.

    `each` counts them in every choice instead of once.
    """
    requested = {"prompt_logprobs": body.prompt_logprobs, "logprobs": body.n_top_logprobs}
    if not echo:
        del requested["logprobs"]
    n_tokens = sum(map(len, prompts)) * (body.n if each else 1)
    for name, n_top in requested.items():
        if n_top is not None and n_tokens * (n_top + 1) > limits.logprobs:
            raise ApiError(
                400,
                f"{name}: {n_tokens:,} tokens of prompts with {n_top} alternatives each are more "
                f"than {limits.logprobs:,} log-probabilities, the most of one answer "
                "(limits.logprobs); ask for fewer alternatives or choices, or send several "
                "requests",
                param=name,
            )


# ---- structures -----------------------------------------------------------------------------


def structure_field(body: GenerationBody) -> str | None:
    """Return the body field that constrains the output, or None."""
    names = (*_GUIDED, "structured_outputs", "response_format")
    return next((name for name in names if getattr(body, name) is not None), None)


def structure_of(body: GenerationBody) -> dict[str, Any]:
    """Return the structured output of a body under its name in `SamplingParams`."""
    found = [
        (kind, getattr(body, name))
        for name, kind in _GUIDED.items()
        if getattr(body, name) is not None
    ]
    for given in (body.response_format, body.structured_outputs):
        if given is not None:
            found += given.structure().items()
    if len(found) > 1:
        raise ApiError(
            400,
            f"give one of response_format, structured_outputs and {', '.join(_GUIDED)}, and one "
            "structure in it",
            param=structure_field(body),
        )
    return dict(found)


# ---- searches -------------------------------------------------------------------------------


def search_of(body: GenerationBody) -> Search | None:
    """Return the search of a body, or None.

    Names are those of vLLM (beams) and transformers (contrastive).  A search does not sample:
    sampling fields are refused by name unless their value is neutral.
    """
    given = {name for name in type(body).model_fields if getattr(body, name) not in (None, False)}
    beam = body.use_beam_search or body.decoding == "beam"
    contrastive = body.penalty_alpha is not None or body.decoding == "contrastive"
    if beam and contrastive:
        raise ApiError(400, "give one of use_beam_search and penalty_alpha", param="penalty_alpha")
    if not beam:
        for name in _BEAM:
            if name in given:
                message = f"{name} belongs to beam search; add use_beam_search: true"
                raise ApiError(400, message, param=name)
    if beam:
        _check_search_fields(body, given, "beam search", _DRAWN | _STOPS)
        width = body.beam_width or (body.n if body.n > 1 else DEFAULT_BEAMS)
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return BeamSearch(width, penalty, body.early_stopping or False, body.n)
    if contrastive:
        _check_search_fields(body, given, "contrastive search", _DRAWN - _STOPS - {"top_k"})
        if body.n > 1:
            raise ApiError(400, "contrastive search finds one continuation; leave n out", param="n")
        usual = ContrastiveSearch()
        return ContrastiveSearch(
            usual.top_k if body.top_k is None else body.top_k,
            usual.penalty_alpha if body.penalty_alpha is None else body.penalty_alpha,
        )
    return None


def _check_search_fields(
    body: GenerationBody, given: set[str], search: str, refused: set[str]
) -> None:
    """Raise `ApiError` for a given field that the search does not support."""
    if body.decoding not in (None, "beam", "contrastive"):
        raise ApiError(400, f"decoding {body.decoding!r} is not a {search}", param="decoding")
    if structure_of(body):
        raise ApiError(
            400, f"{search} follows no structure; leave response_format and the like out",
            param=structure_field(body),
        )  # fmt: skip
    for name in sorted(given & refused):
        if getattr(body, name) not in _NEUTRAL.get(name, ()):
            raise ApiError(
                400, f"{name} does not go with {search}, which draws nothing; leave it out",
                param=name,
            )  # fmt: skip

"""From the decoding parameters of a body to a strategy."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbflow.decoding import Parameters, Strategy
from nbflow.decoding.structured import KINDS, StructureError
from nbflow.server.errors import ApiError
from nbflow.server.fields import Sampling
from nbflow.server.served import Served

_OURS = {"max_tokens", "seed", "n", "stop", "include_stop_str_in_output", "prompt_logprobs"}
_OURS |= {"logprobs", *KINDS}
"""Parameters that are not the strategy's, or have more than one name in a body."""
_NAMES = {f.name: f.name for f in dataclasses.fields(Parameters) if f.name not in _OURS}
_NAMES |= {"dry_breakers": "dry_sequence_breakers"}
STRATEGY_FIELDS = {name: field for name, field in _NAMES.items() if field in Sampling.model_fields}
"""Parameter of `Parameters` -> field of a body."""
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def make_strategy(served: Served, body: Sampling) -> tuple[Strategy, frozenset[int]]:
    """Return how tokens are drawn, and the tokens that end a continuation.

    What a body does not state is the model's default; without one, the temperature is 1, as in
    OpenAI's API.

    Raises
    ------
    ApiError
        If the structure is wrong.
    UsageError
        If a value is out of range, or parameters do not go together.
    """
    given: dict[str, Any] = {
        name: getattr(body, field)
        for name, field in STRATEGY_FIELDS.items()
        if getattr(body, field) is not None
    }
    given |= structure_of(body)
    defaults = dict(served.defaults)
    if body.decoding is None:
        known = {name: value for name, value in defaults.items() if name in _ALL}
        given = {**known, **given}
        if "decoding" not in given:
            given.setdefault("temperature", 1.0)
        defaults = {}
    parameters = Parameters.parse(given)
    ends, n_vocab = served.end_ids, served.model.spec.vocab_size
    try:
        strategy = parameters.strategy(n_vocab, served.tokenizer, ends, defaults)
    except StructureError as error:
        raise ApiError(400, str(error), param=structure_field(body)) from error
    return strategy, frozenset(parameters.end_ids(ends, n_vocab))


def search_end_ids(served: Served, body: Sampling) -> frozenset[int]:
    """Return the tokens that end a continuation of a search."""
    asked = Parameters(ignore_eos=body.ignore_eos, stop_token_ids=tuple(body.stop_token_ids or ()))
    return frozenset(asked.end_ids(served.end_ids, served.model.spec.vocab_size))


_ALL = {f.name for f in dataclasses.fields(Parameters)} - _OURS


def structure_field(body: Sampling) -> str | None:
    """Return the field that asks for a structure, if one does."""
    fields = (*_GUIDED, "structured_outputs", "response_format")
    return next((name for name in fields if getattr(body, name) is not None), None)


def structure_of(body: Sampling) -> dict[str, Any]:
    """Return the structure that a body asks for, whatever it calls it."""
    found: list[tuple[str, Any]] = []
    for name, kind in _GUIDED.items():
        if getattr(body, name) is not None:
            found.append((kind, getattr(body, name)))
    for asked in (body.response_format, body.structured_outputs):
        if asked is not None:
            found += asked.structure().items()
    if len(found) > 1:
        raise ApiError(
            400,
            "give one of response_format, structured_outputs and guided_json, guided_regex, "
            "guided_choice, guided_grammar, and one structure in it",
            param="response_format",
        )
    return dict(found)

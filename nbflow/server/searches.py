"""Searches that a body asks for, under the names of vLLM (beams) and transformers (contrastive).

A search draws nothing: a field that says how to draw is refused with its name, unless its value
changes nothing.
"""

from __future__ import annotations

from typing import Any

from nbflow.decoding import BeamSearch, ContrastiveSearch, Search
from nbflow.server.errors import ApiError
from nbflow.server.fields import Sampling
from nbflow.server.parameters import STRATEGY_FIELDS, structure_of

DEFAULT_BEAMS = 4
"""Beams where a body states neither beam_width nor n."""

_BEAM = ("beam_width", "length_penalty", "early_stopping")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "min_tokens": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,), "logit_bias": ({},), "bad_words": ([],), "stop": ([],),
    "best_of": (1,),
}  # fmt: skip
"""Values that ask for nothing, where clients are known to state them."""
_DRAWN = {*STRATEGY_FIELDS.values(), "best_of"} - {"decoding", "ignore_eos", "stop_token_ids"}
"""Fields that a search has no use for."""
_STOPS = {"stop", "include_stop_str_in_output"}


def search_of(body: Sampling) -> Search | None:
    """Return the search that a body asks for, or None.

    Raises
    ------
    ApiError
        If a field belongs to another search, or to none.
    UsageError
        If a value is out of range.
    """
    given = {name for name in type(body).model_fields if getattr(body, name) not in (None, False)}
    beam = body.use_beam_search or body.decoding == "beam"
    contrastive = body.penalty_alpha is not None or body.decoding == "contrastive"
    if beam and contrastive:
        raise ApiError(400, "give one of use_beam_search and penalty_alpha", param="penalty_alpha")
    if not beam:
        _belongs(given, _BEAM, "use_beam_search: true")
    if beam:
        _check(body, given, "beam search", _DRAWN | _STOPS)
        width = body.beam_width or (body.n if body.n > 1 else DEFAULT_BEAMS)
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return BeamSearch(width, penalty, body.early_stopping or False, body.n)
    if contrastive:
        _check(body, given, "contrastive search", _DRAWN - _STOPS - {"top_k"})
        if body.n > 1:
            raise ApiError(400, "contrastive search finds one continuation; leave n out", param="n")
        usual = ContrastiveSearch()
        return ContrastiveSearch(
            usual.top_k if body.top_k is None else body.top_k,
            usual.penalty_alpha if body.penalty_alpha is None else body.penalty_alpha,
        )
    return None


def _belongs(given: set[str], names: tuple[str, ...], to: str) -> None:
    for name in names:
        if name in given:
            raise ApiError(400, f"{name} belongs to beam search; add {to}", param=name)


def _check(body: Sampling, given: set[str], search: str, refused: set[str]) -> None:
    """Raise unless everything that is given goes with the search."""
    if body.decoding not in (None, "beam", "contrastive"):
        raise ApiError(400, f"decoding {body.decoding!r} is no {search}", param="decoding")
    if structure_of(body):
        raise ApiError(
            400, f"{search} follows no structure; leave response_format and the like out",
            param="response_format",
        )  # fmt: skip
    for name in sorted(given & refused):
        if getattr(body, name) not in _NEUTRAL.get(name, ()):
            raise ApiError(
                400, f"{name} does not go with {search}, which draws nothing; leave it out",
                param=name,
            )  # fmt: skip

"""Options of decoding: `SamplingParams`, `SearchParams` and `SpeculativeConfig`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import nbflow
from nbflow.cli.option_arguments import add_options, given_options, read_argument
from nbflow.engine import LLM
from nbflow.engine.search.api import SEARCHES
from nbflow.options import SamplingParams, SearchParams, SpeculativeConfig
from nbflow.sampling import STRATEGIES, implied_decoding
from nbflow_kernels.errors import UsageError

_SEARCHES = {
    "beam": ("num_beams", "length_penalty", "early_stopping"),
    "contrastive": ("penalty_alpha",),
}
"""Search -> its own options."""


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options of all sampling parameters except the number of tokens."""
    names = ", ".join((*STRATEGIES, *SEARCHES))
    group = parser.add_argument_group("decoding", f"see docs/decoding.md; strategies: {names}")
    converters = {"json_schema": _schema, "grammar": read_argument, "logit_bias": _bias}
    add_options(group, SamplingParams, converters=converters, unset=True)


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options of searches and speculative decoding."""
    group = parser.add_argument_group("searches and speculation", "see docs/decoding.md")
    add_options(group, SearchParams, converters={"early_stopping": _stopping}, unset=True)
    add_draft_arguments(group)


def add_draft_arguments(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add options of speculative decoding, with llama.cpp's names."""
    add_options(group, SpeculativeConfig)


def search_name(arguments: argparse.Namespace) -> str | None:
    """Return the name of the search, or None.

    Raises `UsageError` for an option of another search.
    """
    given = [n for n, f in _SEARCHES.items() if any(getattr(arguments, o) is not None for o in f)]
    name = arguments.decoding if arguments.decoding in SEARCHES else next(iter(given), None)
    if name is None:
        return None
    for other in given:
        if other != name:
            option = next(o for o in _SEARCHES[other] if getattr(arguments, o) is not None)
            raise UsageError(f"--{option.replace('_', '-')} belongs to --decoding {other}")
    if arguments.decoding not in (None, name):
        raise UsageError(f"--decoding {arguments.decoding} does not go with a {name} search")
    if arguments.draft is not None:
        raise UsageError("a search takes no --draft")
    return name


def search_values(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the given options for `nbflow.engine.search.api.search`."""
    values = decoding_values(arguments)
    values.pop("decoding", None)
    own = given_options(SearchParams, arguments)
    return values | {option: own[option] for option in _SEARCHES[name] if option in own}


@contextlib.contextmanager
def load_draft(arguments: argparse.Namespace) -> Iterator[LLM | str | None]:
    """Yield the draft model, "ngram" or None."""
    options = SpeculativeConfig(**given_options(SpeculativeConfig, arguments))
    if options.draft in (None, "ngram"):
        yield arguments.draft
        return
    with nbflow.load(arguments.draft, weights=options.draft_weights) as model:
        yield model


def request_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options for `LLM.make_request`."""
    values = with_decoding(decoding_values(arguments))
    return {**values, "n_draft": arguments.n_draft, "draft_verify": arguments.draft_verify}


def with_decoding(values: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with a strategy; greedy if none of them implies another."""
    return {"decoding": implied_decoding(values), **values}


def decoding_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options for `SamplingParams.parse`."""
    given = given_options(SamplingParams, arguments)
    given.pop("max_tokens", None)  # the command's own option
    return given


def _schema(path: str) -> Any:
    text = read_argument(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias must be ID=BIAS, e.g. 15=-2.5, got {text!r}") from None


def _stopping(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)

"""Command-line arguments of decoding: every field of `nbflow.decoding.Parameters`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbflow
from nbflow.decoding import STRATEGIES, Constraints
from nbflow.decoding.structured import KINDS
from nbflow.engine import Model
from nbflow.engine.search import SEARCHES
from nbflow_kernels.errors import UsageError

NUMBERS: dict[str, tuple[type, str]] = {
    "temperature": (float, "divide the logits by this; 0 is greedy"),
    "top_k": (int, "keep this many of the best tokens"),
    "top_p": (float, "keep the best tokens that have this mass"),
    "min_p": (float, "keep tokens this probable, relative to the best"),
    "typical_p": (float, "keep locally typical tokens of this mass"),
    "tfs_z": (float, "cut the tail where this share of the bends is passed"),
    "top_n_sigma": (float, "keep logits this many standard deviations below the best"),
    "xtc_probability": (float, "how often top choices are excluded"),
    "xtc_threshold": (float, "from which probability on a token is a top choice"),
    "dynatemp_range": (float, "how far the temperature follows the entropy"),
    "dynatemp_exponent": (float, "how the entropy is bent for that"),
    "min_keep": (int, "least number of tokens that a sampler leaves"),
    "repeat_last_n": (int, "how many tokens the chain's penalties see; -1 all"),
    "repetition_penalty": (float, "factor for tokens that occurred"),
    "frequency_penalty": (float, "subtracted for each occurrence"),
    "presence_penalty": (float, "subtracted for having occurred"),
    "no_repeat_ngram_size": (int, "n-grams of this size come once"),
    "dry_multiplier": (float, "penalty of going on with a repetition"),
    "dry_base": (float, "its growth with each token"),
    "dry_allowed_length": (int, "shorter repetitions go free"),
    "dry_penalty_last_n": (int, "how many tokens it sees; -1 all"),
    "mirostat": (int, "version of mirostat, 1 or 2"),
    "mirostat_tau": (float, "its wanted surprise in bits"),
    "mirostat_eta": (float, "its rate"),
    "mirostat_m": (int, "how many tokens version 1 looks at"),
    "max_k": (int, "inferflow: most tokens kept"),
    "pool_size": (int, "inferflow: most tokens looked at"),
    "eos_bypassing_max": (int, "inferflow.std: how many end tokens are passed over"),
    "k": (int, "inferflow.fsd: how many tokens are compared"),
    "alpha": (float, "inferflow.fsd: weight of the penalty"),
    "order": (int, "inferflow.fsd: order of the n-gram model"),
    "beta": (float, "inferflow.fsd: share of the longest context"),
    "z": (float, "inferflow.tfs: share of the bends"),
    "p": (float, "inferflow.typical: mass besides the first token"),
    "tau": (float, "inferflow.mirostat: wanted surprise in bits"),
    "eta": (float, "inferflow.mirostat: rate"),
    "min_tokens": (int, "no end token before so many"),
    "seed": (int, "seed of the draws (0)"),
    "logprobs": (int, "report so many most probable tokens (--json)"),
}
"""Parameter -> its type and what it does."""
OTHER_FLAGS = {
    "temperature": ("--temp",),
    "repetition_penalty": ("--repeat-penalty",),
    "typical_p": ("--typical",),
}
"""llama.cpp's names of some."""
CONSTRAINTS = {f.name for f in dataclasses.fields(Constraints)} | {*KINDS, "stop_token_ids"}
"""Parameters that any strategy goes with."""
_SEARCHES = {
    "beam": ("num_beams", "length_penalty", "early_stopping"),
    "contrastive": ("penalty_alpha",),
}
"""Search -> the arguments that are its own."""


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for every decoding parameter but the number of tokens."""
    group = parser.add_argument_group("decoding", "see docs/decoding.md")
    group.add_argument(
        "--decoding",
        help=f"strategy (what the other parameters mean): {', '.join((*STRATEGIES, *SEARCHES))}",
    )
    for name, (kind, text) in NUMBERS.items():
        flags = [f"--{name.replace('_', '-')}", *OTHER_FLAGS.get(name, ())]
        metavar = "N" if kind is int else "X"
        group.add_argument(*flags, dest=name, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--sampler-order", "--samplers", dest="samplers", metavar="ORDER",
        help='the chain\'s samplers: "top_k;top_p;temperature", or letters: "kpt"',
    )  # fmt: skip
    many: list[tuple[str, str, str]] = [
        ("--dry-breaker", "dry_breakers", "text over which no repetition reaches"),
        ("--stop", "stop", "text that ends the output"),
        ("--bad-word", "bad_words", "text that may not come"),
        ("--choice", "choice", "one of the texts the output must be"),
    ]
    for flag, name, text in many:
        group.add_argument(flag, dest=name, action="append", help=f"{text}; may be repeated")
    group.add_argument(
        "--logit-bias", action="append", metavar="ID=BIAS", help="added to a logit; may be repeated"
    )
    for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, dest=name, type=int, nargs="+", metavar="ID", help="token ids")
    group.add_argument("--regex", help="regular expression the output must match")
    group.add_argument("--json-schema", metavar="FILE", help="JSON schema the output must follow")
    group.add_argument("--grammar", metavar="FILE", help="grammar (GBNF or Lark) of the output")
    group.add_argument(
        "--include-stop-str-in-output", action="store_true", help="keep the stop text"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end token")


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for searches and proposals."""
    group = parser.add_argument_group("searches and proposals", "see docs/decoding.md")
    group.add_argument("--num-beams", type=int, metavar="N", help="beam search over so many (4)")
    group.add_argument("--length-penalty", type=float, help="beam search: power of the length (1)")
    group.add_argument(
        "--early-stopping", choices=("true", "false", "never"), help="beam search: when it ends"
    )
    group.add_argument(
        "--penalty-alpha", type=float, metavar="A",
        help="contrastive search with this weight of likeness (0.6) over --top-k (4) tokens",
    )  # fmt: skip
    add_draft_arguments(group)


def add_draft_arguments(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add arguments for who proposes tokens, with llama.cpp's names for them."""
    group.add_argument(
        "--draft", "--draft-model", metavar="MODEL",
        help='a smaller model that proposes tokens, or "ngram"',
    )  # fmt: skip
    group.add_argument(
        "--n-draft", "--draft-max", type=int, default=5, metavar="N",
        help="tokens proposed at once (5)",
    )  # fmt: skip
    group.add_argument(
        "--draft-verify", choices=("same", "chain"), default="same",
        help="keep the very tokens (same), or their distribution and more proposals (chain)",
    )  # fmt: skip


def search_name(arguments: argparse.Namespace) -> str | None:
    """Return the search that is asked for, or None.

    Raises
    ------
    UsageError
        If something is given that belongs to another one.
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
    """Return what was given, for `nbflow.engine.search.search`."""
    values = decoding_values(arguments)
    values.pop("decoding", None)
    for option in _SEARCHES[name]:
        if getattr(arguments, option) is not None:
            values[option] = getattr(arguments, option)
    stopping = {"true": True, "false": False}
    if "early_stopping" in values:
        values["early_stopping"] = stopping.get(values["early_stopping"], "never")
    return values


@contextlib.contextmanager
def load_draft(arguments: argparse.Namespace) -> Iterator[Model | str | None]:
    """Yield who proposes tokens."""
    if arguments.draft in (None, "ngram"):
        yield arguments.draft
        return
    with nbflow.load(arguments.draft) as model:
        yield model


def request_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was given, for `Model.make_request`; greedy if nothing says how to choose."""
    values = decoding_values(arguments)
    free = {"seed", "logprobs", "stop", "include_stop_str_in_output", "ignore_eos"}
    if "decoding" not in values:
        values["decoding"] = "auto" if set(values) - CONSTRAINTS - free else "greedy"
    return {**values, "n_draft": arguments.n_draft, "draft_verify": arguments.draft_verify}


def decoding_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was given, for `nbflow.decoding.Parameters.parse`."""
    names = [
        "decoding", *NUMBERS, "samplers", "dry_breakers", "stop", "bad_words", "choice",
        "allowed_token_ids", "banned_token_ids", "stop_token_ids", "regex",
    ]  # fmt: skip
    given = {name: getattr(arguments, name) for name in names}
    given["ignore_eos"] = arguments.ignore_eos or None
    given["include_stop_str_in_output"] = arguments.include_stop_str_in_output or None
    if arguments.json_schema is not None:
        given["json_schema"] = _schema(arguments.json_schema)
    if arguments.grammar is not None:
        given["grammar"] = _read(arguments.grammar)
    if arguments.logit_bias:
        given["logit_bias"] = _biases(arguments.logit_bias)
    return {name: value for name, value in given.items() if value is not None}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def _schema(path: str) -> Any:
    try:
        return json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: is not JSON: {error}") from None


def _biases(texts: Sequence[str]) -> dict[int, float]:
    found = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias must be ID=BIAS, e.g. 15=-2.5, got {text!r}") from None
    return found

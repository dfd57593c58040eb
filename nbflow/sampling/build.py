"""Strategy and logits processors of a request, from its `SamplingParams`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbflow.option_fields import aliases
from nbflow.options import DECODER_START, STRUCTURES, SamplingParams, Word
from nbflow.sampling.dry_breakers import breaker_sequences
from nbflow.sampling.logits_processors import LogitsProcessors, check_token_ids, constrain
from nbflow.sampling.sampler_chain import parse_samplers
from nbflow.sampling.strategies import (
    STRATEGIES,
    make_strategy,
    shared_parameters,
    split_decoding,
)
from nbflow.sampling.strategy import Strategy
from nbflow.sampling.structured_output import Grammar
from nbflow.tokenization import Tokenizer
from nbflow_kernels.errors import UsageError

WITHOUT_STRATEGY = {
    *(f.name for f in dataclasses.fields(LogitsProcessors)), *STRUCTURES, *DECODER_START,
    "max_tokens", "seed", "n", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "logprobs", "prompt_logprobs",
}  # fmt: skip
"""Sampling parameters valid with every strategy, which therefore imply none."""
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def end_ids(params: SamplingParams, known: Sequence[int], n_vocab: int) -> tuple[int, ...]:
    """Return the end tokens of a request.

    Parameters
    ----------
    params : SamplingParams
        The parameters of the request.
    known : sequence of int
        End tokens of the model; those without a logit are dropped.
    n_vocab : int
        Number of the model's logits.

    Raises
    ------
    UsageError
        If `stop_token_ids` holds an id outside of the vocabulary.
    """
    given = params.stop_token_ids or ()
    check_token_ids("stop_token_ids", given, n_vocab)
    own = () if params.ignore_eos else (token for token in known if 0 <= token < n_vocab)
    return tuple(dict.fromkeys((*own, *(int(token) for token in given))))


def with_recommended(
    stated: Mapping[str, Any], recommended: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return stated parameters over those that a checkpoint recommends.

    With a strategy among the stated ones (`decoding`), recommendations hold where it has such a
    parameter.  Inferflow's strategies get none, as Inferflow reads none.
    """
    text = stated.get("decoding")
    if text is None:
        return {**(recommended or {}), **stated}
    name = text.partition(":")[0]
    own = () if name not in STRATEGIES or name.startswith("inferflow.") else _fields(name)
    return {k: v for k, v in (recommended or {}).items() if k in own} | dict(stated)


def implied_decoding(given: Iterable[str]) -> str:
    """Return the `decoding` of a request that states none, from the names of its parameters.

    Examples
    --------
    >>> implied_decoding(["seed", "temp"]), implied_decoding(["seed"])
    ('auto', 'greedy')
    """
    others = aliases(SamplingParams)
    names = {others.get(name, name) for name in given}
    return "auto" if names - WITHOUT_STRATEGY else "greedy"


def of_other_strategies(parameters: Iterable[str], decoding: str) -> set[str]:
    """Return the parameters of strategies that this one does not have."""
    name = decoding.partition(":")[0]
    own = _fields(name) if name in STRATEGIES else ()
    return {p for p in parameters if p in shared_parameters() and p not in own}


def build_strategy(
    params: SamplingParams,
    n_vocab: int,
    tokenizer: Tokenizer | None = None,
    known_end_ids: Sequence[int] = (),
    defaults: Mapping[str, float] | None = None,
    inner: Strategy | None = None,
) -> Strategy:
    """Return the strategy of a request with its logits processors.

    Without `decoding`, temperature 0 selects greedy; `mirostat` 1 or 2 selects Mirostat;
    temperature, top_k, top_p and min_p select `Filters`; other parameters of llama.cpp's chain
    select a `Chain` with all other samplers off; the default is greedy.

    Parameters
    ----------
    params : SamplingParams
        The parameters of the request.
    n_vocab : int
        Number of the model's logits.
    tokenizer : Tokenizer, optional
        Needed for structured output, bad words and breakers given as text.
    known_end_ids : sequence of int
        The model's end tokens.
    defaults : mapping, optional
        Parameters recommended by the model, used where none is given.
    inner : Strategy, optional
        A ready strategy; `params` may then hold logits processors only.

    Raises
    ------
    UsageError
        If a value is out of range, or the strategy does not take a parameter.
    MissingExtraError
        If structured output is requested without llguidance.
    """
    ends = end_ids(params, known_end_ids, n_vocab)
    own: dict[str, Any] = {}
    if params.decoding:
        name, own = split_decoding(params.decoding)
    else:
        name = _strategy_name(params, defaults or {})
    given = _strategy_parameters(params, name, tokenizer, ends)
    for key in own:
        if key in given:
            text = f"decoding={params.decoding!r:.120}"
            raise UsageError(f"{key} is given twice, the second time in {text}", key)
    given |= own
    if inner is None and params.decoding is None:
        recommended = {k: v for k, v in (defaults or {}).items() if v and k in _fields(name)}
        inner = make_strategy(name, **{**_NEUTRAL.get(name, {}), **recommended, **given})
    elif inner is None:
        inner = make_strategy(name, defaults, **given)
    elif given or params.decoding is not None:
        names = ", ".join(given) or "decoding"
        raise UsageError(f"a Strategy has its parameters; give {names} to it")
    rules = _constraints(params, name, n_vocab, tokenizer, ends)
    rules.check_vocabulary(n_vocab)
    return constrain(inner, rules)


def _penalties_in_chain(params: SamplingParams) -> bool:
    """Return whether penalties belong to the chain (llama.cpp: a window of prompt and text)."""
    return (params.decoding or "").partition(":")[0] == "chain" or (
        params.decoding is None and params.repeat_last_n is not None
    )


def _strategy_name(params: SamplingParams, defaults: Mapping[str, float]) -> str:
    """Return the name of the strategy inferred from the parameters."""
    if params.temperature == 0.0 and not params.dynatemp_range:
        return "greedy"
    if params.mirostat:
        return "mirostat"
    chain = set(_fields("chain")) - set(_fields("filters")) - {*PENALTIES, *_CHAIN_NAMES.values()}
    if any(getattr(params, _PARAMS_NAMES.get(f, f)) is not None for f in chain):
        return "chain"
    own = {f: getattr(params, f) for f in _fields("filters")}
    filtered = any(v is not None for v in own.values()) or any(defaults.get(f) for f in own)
    return "filters" if filtered else "greedy"


def _strategy_parameters(
    params: SamplingParams, name: str, tokenizer: Tokenizer | None, ends: tuple[int, ...]
) -> dict[str, Any]:
    """Return the parameters of the strategy, by field name."""
    own = shared_parameters()
    given = {f: getattr(params, f) for f in own if getattr(params, f) is not None}
    if params.samplers is not None:
        given["samplers"] = parse_samplers(params.samplers)
    if params.dry_sequence_breakers is not None:
        need = _need(tokenizer, "dry_sequence_breakers")
        given["dry_breakers"] = breaker_sequences(need, tuple(params.dry_sequence_breakers))
    elif params.dry_multiplier and tokenizer is not None:
        given["dry_breakers"] = breaker_sequences(tokenizer)
    if _penalties_in_chain(params):
        given |= {_CHAIN_NAMES.get(p, p): getattr(params, p) for p in PENALTIES}
    if name.startswith("inferflow.") and ends and params.eos_bypassing_max:
        given["eos_ids"] = ends
    if params.decoding is None:
        if params.top_k is not None:
            given["top_k"] = max(params.top_k, 0)  # -1 disables, as in vLLM
        if name == "greedy":  # temperature 0 disables filters
            given = {f: v for f, v in given.items() if f not in {*_fields("chain"), "mirostat"}}
        if not params.mirostat:
            given.pop("mirostat", None)
    return given


def _constraints(
    params: SamplingParams,
    name: str,
    n_vocab: int,
    tokenizer: Tokenizer | None,
    ends: tuple[int, ...],
) -> LogitsProcessors:
    """Return the logits processors."""
    given = () if _penalties_in_chain(params) else PENALTIES
    penalties = {p: getattr(params, p) for p in given}
    kind, grammar = params.structure, None
    if kind is not None:
        grammar = Grammar(kind, getattr(params, kind), _need(tokenizer, kind), n_vocab, ends)
    banned = tuple(params.banned_token_ids or ())
    if name.startswith("inferflow.") and tokenizer is not None:
        unknown = tokenizer.token_id(tokenizer.named_tokens.get("unk_token", ""))
        banned += () if unknown is None else (unknown,)
    return LogitsProcessors(
        grammar=grammar,
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        no_repeat_ngram_size=params.no_repeat_ngram_size or 0,
        logit_bias=_biases(params.logit_bias),
        banned_token_ids=banned,
        bad_words=_words(params.bad_words or (), tokenizer),
        min_tokens=params.min_tokens or 0,
        end_ids=ends,
        **{p: value for p, value in penalties.items() if value is not None},
    )


_CHAIN_NAMES = {
    "repetition_penalty": "repeat_penalty", "dry_sequence_breakers": "dry_breakers",
}  # fmt: skip
"""Names in `SamplingParams` -> names in `Chain`, whose breakers are tokens."""
_PARAMS_NAMES = {chain: name for name, chain in _CHAIN_NAMES.items()}
_NEUTRAL: dict[str, dict[str, Any]] = {
    "chain": {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": -1,
    },
    "mirostat": {"temperature": 1.0},
}  # fmt: skip
"""Neutral values, where the strategy is inferred from other parameters."""


def _fields(name: str) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(STRATEGIES[name]))


def _need(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    if tokenizer is None:
        raise UsageError(f"{name} needs the model's tokenizer; load the model with one", name)
    return tokenizer


def _biases(bias: Mapping[Any, Any] | Sequence[Any] | None) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs; JSON has tokens as strings, llama.cpp bans with false."""
    pairs = bias.items() if isinstance(bias, Mapping) else bias or ()
    try:
        return tuple((_token_id(i), _bias(x)) for i, x in pairs)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"logit_bias must map token ids to numbers, got {bias!r:.60}", "logit_bias"
        ) from None


def _bias(given: Any) -> float:
    """Return a bias; -inf for false."""
    if given is False:
        return -math.inf
    if given is True or not isinstance(given, numbers.Real):
        raise TypeError(given)
    return float(given)


def _token_id(given: Any) -> int:
    """Return a token id from an integer or ASCII digits."""
    if isinstance(given, str) and not (given.isascii() and given.isdigit()):
        raise ValueError(given)
    if isinstance(given, bool) or not isinstance(given, str | numbers.Integral):
        raise TypeError(given)
    return int(given)


def _words(words: Sequence[Word], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of bad words, with and without a leading space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(int(token) for token in word))
            continue
        need = _need(tokenizer, "bad_words")
        for text in (word.lstrip(), " " + word.lstrip()):
            found.append(tuple(need.encode(text)))
    return tuple(dict.fromkeys(found))

"""Parameters: everything a request can ask of decoding, under the names of vLLM and OpenAI.

llama.cpp's names are understood too (`OTHER_NAMES`).  `Parameters.strategy` makes the strategy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow.decoding.breakers import breaker_sequences
from nbflow.decoding.chain import parse_samplers
from nbflow.decoding.constraints import Constraints, check_token_ids, constrain
from nbflow.decoding.strategy import Strategy
from nbflow.decoding.structured import KINDS, Grammar
from nbflow.decoding.table import STRATEGIES, make_strategy
from nbflow.tokenizer import Tokenizer
from nbflow_kernels.errors import UsageError, unknown_name

OTHER_NAMES = {
    "temp": "temperature", "repeat_penalty": "repetition_penalty", "typ_p": "typical_p",
    "typical": "typical_p", "n_predict": "max_tokens", "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "n_probs": "logprobs",
    "tail_free": "tfs_z", "dry_sequence_breakers": "dry_breakers", "stop_strings": "stop",
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar",
}  # fmt: skip
"""Names of other programs."""
MAX_STOP_BYTES = 4096
"""Longest stop text."""
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

Word = str | Sequence[int]
"""A word as text, or as tokens."""


@dataclass(frozen=True)
class Parameters:
    """What is asked for; None is not asked for, which leaves the strategy's own value."""

    decoding: str | None = None
    """Name of a strategy; None lets the other parameters decide, see `strategy`."""
    # what a strategy takes
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    samplers: str | Sequence[str] | None = None
    min_keep: int | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_breakers: Sequence[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    mirostat_m: int | None = None
    # what Inferflow's strategies take besides
    max_k: int | None = None
    pool_size: int | None = None
    eos_bypassing_max: int | None = None
    k: int | None = None
    alpha: float | None = None
    order: int | None = None
    beta: float | None = None
    z: float | None = None
    p: float | None = None
    tau: float | None = None
    eta: float | None = None
    # constraints
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[Any, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Word] | None = None
    min_tokens: int = 0
    # structure
    choice: Sequence[str] | None = None
    regex: str | None = None
    json_schema: Mapping[str, Any] | str | None = None
    grammar: str | None = None
    # length, end and report
    max_tokens: int = 128
    seed: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.decoding is not None and self.decoding not in STRATEGIES:
            raise unknown_name("decoding strategy", self.decoding, STRATEGIES)
        for f in dataclasses.fields(self):
            _check_type(f.name, str(f.type), getattr(self, f.name))
        for name, low, high in (
            # without new tokens, the prompt's log-probabilities must be wanted
            ("max_tokens", int(self.prompt_logprobs is None), 2**31 - 1),
            ("min_tokens", 0, 2**31 - 1), ("n", 1, 1024), ("seed", 0, 2**64 - 1),
            ("logprobs", 0, 2**20), ("prompt_logprobs", 0, 2**20),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} must be in {low}..{high}, got {value}")
        for text in self.stop_texts:
            if not isinstance(text, str) or not 0 < len(text.encode()) <= MAX_STOP_BYTES:
                raise UsageError(
                    f"stop must hold texts of 1..{MAX_STOP_BYTES} bytes, got {text!r:.40}"
                )
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise UsageError(
                "allowed_token_ids must hold at least one token id; leave it out to allow all"
            )
        asked = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(asked) > 1:
            raise UsageError(f"give one of {', '.join(KINDS)}; got {' and '.join(asked)}")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Parameters:
        """Return the parameters of a mapping, e.g. of a JSON object.

        Parameters
        ----------
        values : mapping
            Names of fields, or `OTHER_NAMES`; None is as good as left out.

        Raises
        ------
        UsageError
            If a name is unknown, given twice, or a value out of range or of a wrong type.

        Examples
        --------
        >>> Parameters.parse({"temp": 0.7, "top_k": 20}).temperature
        0.7
        """
        known = [f.name for f in dataclasses.fields(cls)]
        given: dict[str, Any] = {}
        for key, value in values.items():
            name = OTHER_NAMES.get(key, key)
            if name not in known:
                raise unknown_name("decoding parameter", key, [*known, *OTHER_NAMES])
            if value is None:
                continue
            if name in given:
                raise UsageError(f"{name} is given twice, the second time as {key!r}")
            given[name] = value
        return cls(**given)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def end_ids(self, known: Sequence[int], n_vocab: int) -> tuple[int, ...]:
        """Return the tokens that end the output.

        Parameters
        ----------
        known : sequence of int
            The model's end tokens; those without a logit are left out, as they are never drawn.
        n_vocab : int
            Number of the model's logits.

        Raises
        ------
        UsageError
            If `stop_token_ids` holds an id outside of the vocabulary.
        """
        check_token_ids("stop_token_ids", self.stop_token_ids, n_vocab)
        own = () if self.ignore_eos else (token for token in known if 0 <= token < n_vocab)
        return tuple(dict.fromkeys((*own, *(int(token) for token in self.stop_token_ids))))

    def strategy(
        self,
        n_vocab: int,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
        defaults: Mapping[str, float] | None = None,
        inner: Strategy | None = None,
    ) -> Strategy:
        """Return the strategy with its constraints.

        Without `decoding`, a temperature of 0 is greedy; `mirostat` of 1 or 2 is that; temperature,
        top_k, top_p and min_p are `Filters`; whatever else belongs to llama.cpp's chain makes a
        `Chain` whose other samplers are off; nothing at all is greedy.

        Parameters
        ----------
        n_vocab : int
            Number of the model's logits.
        tokenizer : Tokenizer, optional
            Needed for structures, bad words and breakers given as text.
        end_ids : sequence of int
            The model's end tokens.
        defaults : mapping, optional
            Parameters that the model recommends, taken where none is given.
        inner : Strategy, optional
            The strategy itself; then only constraints may be asked for.

        Raises
        ------
        UsageError
            If a value is out of range, or the strategy does not take a parameter.
        MissingExtraError
            If a structure is asked for and llguidance is not installed.
        """
        ends = self.end_ids(end_ids, n_vocab)
        name = self.decoding or self._name(defaults or {})
        given = self._of_strategy(name, tokenizer, ends)
        if inner is None and self.decoding is None:
            recommended = {k: v for k, v in (defaults or {}).items() if v and k in _fields(name)}
            inner = make_strategy(name, **{**_NEUTRAL.get(name, {}), **recommended, **given})
        elif inner is None:
            inner = make_strategy(name, defaults, **given)
        elif given or self.decoding is not None:
            asked = ", ".join(given) or "decoding"
            raise UsageError(f"a Strategy has its parameters; give {asked} to it")
        rules = self._constraints(name, n_vocab, tokenizer, ends)
        rules.check_vocabulary(n_vocab)
        return constrain(inner, rules)

    @property
    def _penalties_in_chain(self) -> bool:
        """Whether penalties follow llama.cpp: a window of prompt and text, a place in the chain."""
        return self.decoding == "chain" or (
            self.decoding is None and self.repeat_last_n is not None
        )

    def _name(self, defaults: Mapping[str, float]) -> str:
        """Return the strategy that the given parameters mean."""
        if self.temperature == 0.0 and not self.dynatemp_range:
            return "greedy"
        if self.mirostat:
            return "mirostat"
        chain = set(_fields("chain")) - set(_fields("filters")) - {*PENALTIES, "repeat_penalty"}
        if any(getattr(self, f) is not None for f in chain):
            return "chain"
        own = {f: getattr(self, f) for f in _fields("filters")}
        asked = any(v is not None for v in own.values()) or any(defaults.get(f) for f in own)
        return "filters" if asked else "greedy"

    def _of_strategy(
        self, name: str, tokenizer: Tokenizer | None, ends: tuple[int, ...]
    ) -> dict[str, Any]:
        """Return what is given to the strategy, under its names."""
        given = {f: getattr(self, f) for f in _STRATEGY_FIELDS if getattr(self, f) is not None}
        if self.samplers is not None:
            given["samplers"] = parse_samplers(self.samplers)
        if self.dry_breakers is not None:
            need = _need(tokenizer, "dry_breakers")
            given["dry_breakers"] = breaker_sequences(need, tuple(self.dry_breakers))
        elif self.dry_multiplier and tokenizer is not None:
            given["dry_breakers"] = breaker_sequences(tokenizer)
        if self._penalties_in_chain:
            given |= {_CHAIN_NAMES.get(p, p): getattr(self, p) for p in PENALTIES}
        if name.startswith("inferflow.") and ends and self.eos_bypassing_max:
            given["eos_ids"] = ends
        if self.decoding is None:
            if self.top_k is not None:
                given["top_k"] = max(self.top_k, 0)  # -1 is off, as in vLLM
            if name == "greedy":  # a temperature of 0 makes the filters void
                given = {f: v for f, v in given.items() if f not in {*_fields("chain"), "mirostat"}}
            if not self.mirostat:
                given.pop("mirostat", None)
        return given

    def _constraints(
        self, name: str, n_vocab: int, tokenizer: Tokenizer | None, ends: tuple[int, ...]
    ) -> Constraints:
        """Return what is changed in the logits."""
        asked = () if self._penalties_in_chain else PENALTIES
        penalties = {p: getattr(self, p) for p in asked}
        kind = next((kind for kind in KINDS if getattr(self, kind) is not None), None)
        grammar = None
        if kind is not None:
            grammar = Grammar(kind, getattr(self, kind), _need(tokenizer, kind), n_vocab, ends)
        banned = tuple(self.banned_token_ids or ())
        if name.startswith("inferflow.") and tokenizer is not None:
            unknown = tokenizer.token_id(tokenizer.named_tokens.get("unk_token", ""))
            banned += () if unknown is None else (unknown,)
        return Constraints(
            grammar=grammar,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            no_repeat_ngram_size=self.no_repeat_ngram_size or 0,
            logit_bias=_biases(self.logit_bias),
            banned_token_ids=banned,
            bad_words=_words(self.bad_words or (), tokenizer),
            min_tokens=self.min_tokens,
            end_ids=ends,
            **{p: value for p, value in penalties.items() if value is not None},
        )


_CHAIN_NAMES = {"repetition_penalty": "repeat_penalty"}
_NEUTRAL: dict[str, dict[str, Any]] = {
    "chain": {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": -1,
    },
    "mirostat": {"temperature": 1.0},
}  # fmt: skip
"""Values that change nothing, where the strategy follows from other parameters."""


def _fields(name: str) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(STRATEGIES[name]))


_STRATEGY_FIELDS = tuple(
    dict.fromkeys(
        f.name
        for f in dataclasses.fields(Parameters)
        if any(f.name in _fields(name) for name in STRATEGIES) and f.name not in PENALTIES
    )
)
assert set(_fields("chain")) - set(_STRATEGY_FIELDS) == {"repeat_penalty", *PENALTIES[1:]}


def _check_type(name: str, wanted: str, value: Any) -> None:
    """Raise `UsageError` unless a value has the type that its annotation says."""
    if value is None and "None" in wanted:
        return
    kinds = [kind for kind in wanted.split(" | ") if kind != "None"]
    if not any(_TYPES.get(kind, _anything)(value) for kind in kinds):
        raise UsageError(f"{name} must be of type {' or '.join(kinds)}, got {value!r:.60}")


def _anything(value: Any) -> bool:
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    good = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return good and not math.isnan(value)


def _is_list(value: Any, item: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(item, value))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_whole,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "Sequence[int]": lambda value: _is_list(value, _is_whole),
    "Sequence[str]": lambda value: _is_list(value, lambda item: isinstance(item, str)),
    "Sequence[Word]": lambda value: _is_list(
        value, lambda item: isinstance(item, str) or _is_list(item, _is_whole)
    ),
    "Mapping[str, Any]": lambda value: isinstance(value, Mapping),
}
"""Annotation -> whether a value is that."""


def _need(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    if tokenizer is None:
        raise UsageError(f"{name} needs the model's tokenizer; load the model with one")
    return tokenizer


def _biases(bias: Mapping[Any, float] | Sequence[tuple[int, float]] | None) -> Any:
    """Return (token, bias); JSON spells tokens as texts, llama.cpp forbids by false."""
    pairs = bias.items() if isinstance(bias, Mapping) else bias or ()
    try:
        return tuple((_token_id(i), -math.inf if x is False else float(x)) for i, x in pairs)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"logit_bias must map token ids to numbers, got {bias!r:.60}") from None


def _token_id(given: Any) -> int:
    """Return a token id that is a whole number, or its ASCII digits."""
    if isinstance(given, str) and not (given.isascii() and given.isdigit()):
        raise ValueError(given)
    if not isinstance(given, str) and not _is_whole(given):
        raise TypeError(given)
    return int(given)


def _words(words: Sequence[Word], tokenizer: Tokenizer | None) -> Any:
    """Return the token sequences of bad words: as they are, and after a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(int(token) for token in word))
            continue
        need = _need(tokenizer, "bad_words")
        for text in (word.lstrip(), " " + word.lstrip()):
            found.append(tuple(need.encode(text)))
    return tuple(dict.fromkeys(found))

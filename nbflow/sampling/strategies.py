"""Stateless strategies, the table of all strategies by name, and `make_strategy`.

Top-k: A. Fan et al., 2018, arXiv:1805.04833.  Top-p: A. Holtzman et al., 2020, arXiv:1904.09751.
Min-p: N. N. Minh et al., 2024, arXiv:2407.01082.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nbflow.option_fields import Option, OptionField, fields
from nbflow.options import SamplingParams
from nbflow.sampling.mirostat import Mirostat
from nbflow.sampling.sampler_chain import Chain
from nbflow.sampling.strategy import FilteredSampling, Strategy
from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.plugins import Registry
from nbflow_kernels.sampling import cpu, cuda


@dataclass(frozen=True)
class Greedy(Strategy):
    """Argmax; the lowest id wins a tie."""

    def launch(
        self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray, out: np.ndarray
    ) -> None:
        (cuda if is_cuda(logits) else cpu).argmax(logits, out)

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        p = np.zeros(logits.shape, np.float32)
        p[np.arange(len(logits)), logits.argmax(axis=1)] = 1.0
        return p


@dataclass(frozen=True)
class Sample(FilteredSampling):
    """Sample from the whole distribution."""

    name: ClassVar[str] = "sample"


@dataclass(frozen=True)
class TopK(FilteredSampling):
    """Sample from the `top_k` most probable tokens."""

    top_k: int = 40
    """Number of tokens kept; 40 is the default of llama.cpp."""

    name: ClassVar[str] = "top_k"


@dataclass(frozen=True)
class TopP(FilteredSampling):
    """Nucleus sampling: the smallest set of most probable tokens with mass `top_p`."""

    top_p: float = 0.9
    """Mass kept; 0.9 is the default of Inferflow."""

    name: ClassVar[str] = "top_p"


@dataclass(frozen=True)
class MinP(FilteredSampling):
    """Sample from the tokens at least `min_p` times as probable as the best one."""

    min_p: float = 0.05
    """Smallest probability kept, relative to the best; 0.05 as in llama.cpp and Inferflow."""

    name: ClassVar[str] = "min_p"


@dataclass(frozen=True)
class Filters(FilteredSampling):
    """Temperature, top-k, top-p of the remainder, then min-p: the order of Hugging Face."""

    top_k: int = 0
    """Number of tokens kept; 0 for all."""
    top_p: float = 1.0
    """Mass kept after `top_k`; 1 for all."""
    min_p: float = 0.0
    """Smallest probability kept, relative to the best; 0 for all."""

    name: ClassVar[str] = "filters"
    least_top_k: ClassVar[int] = 0


class StrategyTable(Mapping[str, type[Strategy]]):
    """Strategies by name; a "module:table" entry is imported on first use.

    The table of that module has the strategy under its name without the prefix.
    """

    def __init__(self, entries: Mapping[str, type[Strategy] | str]) -> None:
        self._entries = dict(entries)
        self.registered: Registry[type[Strategy]] = Registry(
            "decoding strategy", "nbflow.register_strategy"
        )
        """Strategies of plugins."""

    def __getitem__(self, name: str) -> type[Strategy]:
        if name in self.registered:
            return self.registered[name]
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, table = entry.partition(":")
            found: Mapping[str, type[Strategy]] = getattr(importlib.import_module(module), table)
            entry = self._entries[name] = found[name.partition(".")[2]]
        return entry

    @property
    def built_in(self) -> tuple[str, ...]:
        """Names of the strategies that come with nbflow."""
        return tuple(self._entries)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._entries, self.registered)

    def __len__(self) -> int:
        return len(self._entries) + len(self.registered)


STRATEGIES = StrategyTable(
    {
        "greedy": Greedy,
        "sample": Sample,
        "top_k": TopK,
        "top_p": TopP,
        "min_p": MinP,
        "filters": Filters,
        "chain": Chain,
        "mirostat": Mirostat,
        **{
            f"inferflow.{name}": "nbflow.compat.inferflow.strategies:INFERFLOW"
            for name in (
                "std", "auto", "greedy", "top_k", "top_p", "fsd", "random_fsd", "min_p", "tfs",
                "typical", "mirostat",
            )
        },
    }
)  # fmt: skip


def make_strategy(
    name: str, defaults: Mapping[str, float] | None = None, **parameters: Any
) -> Strategy:
    """Return a strategy by name.

    Parameters
    ----------
    name : str
        One of `STRATEGIES`.
    defaults : mapping of str to float, optional
        Parameters recommended by the model, used where none is given; 0 means no recommendation,
        as in Hugging Face's generation_config.json.
    **parameters
        Parameters of the strategy; None selects the default of the model or strategy.

    Raises
    ------
    UsageError
        If the name or a parameter is unknown, or a value is out of range.

    Examples
    --------
    >>> make_strategy("top_p", top_p=0.9, temperature=0.7)
    TopP(temperature=0.7, top_p=0.9)
    """
    if name not in STRATEGIES:
        raise unknown_name("decoding strategy", name, STRATEGIES, "decoding")
    kind = STRATEGIES[name]
    known = [f.name for f in dataclasses.fields(kind)]
    given = {key: value for key, value in parameters.items() if value is not None}
    for key in given:
        declared = parameter(name, key)
        if declared is not None:
            given[key] = declared.checked(given[key], name=f"decoding {name!r}: {key}")
    recommended = {key: value for key, value in (defaults or {}).items() if key in known and value}
    return kind(**{**recommended, **given})


def parameter(name: str, key: str) -> OptionField | None:
    """Return a parameter of a strategy with its type, default and bounds.

    None for one that a built-in strategy checks itself.

    Raises
    ------
    UsageError
        If the strategy has no such parameter.
    """
    known = {f.name: f for f in dataclasses.fields(STRATEGIES[name])}
    if key not in known:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        if name == "greedy":
            takes += "; name another strategy, or auto, which chooses one by its parameters"
        raise UsageError(f"decoding {name!r} has no parameter {key!r}; {takes}", key)
    declared: Option | None = known[key].metadata.get("option")
    if declared is None:
        return None
    hint = typing.get_type_hints(STRATEGIES[name])[key]
    return OptionField(key, hint, known[key].default, declared)


def split_decoding(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and parameters of a strategy written ``NAME:PARAMETER=VALUE,...``.

    Raises
    ------
    UsageError
        If the text has parameters of an unknown strategy, or one that is unknown, given twice, or
        not a number, true, false or text, as it has to be.

    Examples
    --------
    >>> split_decoding("top_p:top_p=0.9,temperature=0.7")
    ('top_p', {'top_p': 0.9, 'temperature': 0.7})
    >>> split_decoding("greedy")
    ('greedy', {})
    """
    name, colon, rest = text.partition(":")
    if not colon:
        return name, {}
    if name not in STRATEGIES:
        raise unknown_name("decoding strategy", name, STRATEGIES, "decoding")
    values: dict[str, Any] = {}
    for part in rest.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not key:
            raise UsageError(
                f"decoding {text!r:.120}: parameters are written NAME:PARAMETER=VALUE,..., for "
                "example top_p:top_p=0.9,temperature=0.7",
                "decoding",
            )
        if key in values:
            raise UsageError(f"decoding {text!r:.120}: {key} is given twice", "decoding")
        parameter(name, key)  # raises for an unknown one
        hint = typing.get_type_hints(STRATEGIES[name])[key]
        values[key] = _parsed(value, hint, f"decoding {name!r}: {key}")
    return name, values


def _parsed(text: str, hint: Any, where: str) -> Any:
    """Return the value of a parameter that is given as text."""
    if hint is bool:
        if text not in ("true", "false"):
            raise UsageError(f"{where} must be true or false, got {text!r:.60}", "decoding")
        return text == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            wanted = "a whole number" if hint is int else "a number"
            raise UsageError(f"{where} must be {wanted}, got {text!r:.60}", "decoding") from None
    if hint is str or typing.get_origin(hint) is typing.Literal:
        return text
    raise UsageError(
        f"{where} cannot be written in the text; give it as a parameter of its own", "decoding"
    )


def register_strategy(name: str, kind: type[Strategy]) -> type[Strategy]:
    """Register a decoding strategy under a name.

    Parameters
    ----------
    name : str
        The name, for ``--decoding``, `LLM.generate` and requests.
    kind : type
        Frozen dataclass, a subclass of `Strategy`.  Its fields are the parameters, each made by
        `nbflow.option_fields.option` with a default, a description and bounds (``low``, ``high``);
        types are int, float, bool, str or a Literal of texts.  Fields that a built-in strategy has
        (`temperature`, `top_k`, ...) are also set by the sampling parameter of that name.

    Returns
    -------
    type
        `kind`.

    Raises
    ------
    UsageError
        If the name is taken, or the class is not such a dataclass.

    See Also
    --------
    nbflow.sampling.strategy.SampledState : State of strategies that draw from candidates.
    """
    where = f"register_strategy({name!r})"
    if name in STRATEGIES.built_in or name in ("auto", "beam", "contrastive"):
        raise UsageError(f"{where}: this is a built-in strategy; choose another name")
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise UsageError(f"{where}: needs a subclass of nbflow.sampling.Strategy, got {kind!r:.80}")
    settings = getattr(kind, "__dataclass_params__", None)
    if "__dataclass_fields__" not in vars(kind) or settings is None or not settings.frozen:
        raise UsageError(f"{where}: {kind.__name__} must be a @dataclass(frozen=True)")
    function = "launch" if kind.compiled else "begin"
    if getattr(kind, function) is getattr(Strategy, function):
        raise UsageError(
            f"{where}: {kind.__name__} needs {function}; with compiled = False it is begin"
        )
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        _check_parameter(field, hints[field.name], f"{where}: {kind.__name__}.{field.name}")
    STRATEGIES.registered.add(name, kind, kind)
    return kind


def _check_parameter(field: dataclasses.Field[Any], hint: Any, where: str) -> None:
    """Raise `UsageError` unless a field of a user's strategy is declared with a type and bounds."""
    if field.name in fields(SamplingParams):
        if field.name not in shared_parameters():
            raise UsageError(f"{where} is a parameter of every request; choose another name")
    elif "option" not in field.metadata:
        raise UsageError(
            f"{where} must be declared with a description, a default and bounds: "
            f'{field.name}: float = option(1.0, "what it does", low=0, high=10)'
        )
    if hint not in (int, float, bool, str) and typing.get_origin(hint) is not typing.Literal:
        raise UsageError(f"{where} must be int, float, bool, str or Literal[...], got {hint}")
    if field.default is dataclasses.MISSING:
        raise UsageError(f"{where} needs a default")


@functools.cache
def shared_parameters() -> tuple[str, ...]:
    """Return the fields of `SamplingParams` that belong to strategies and not to every request."""
    kinds = [STRATEGIES[name] for name in STRATEGIES.built_in]
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    penalties = {"repetition_penalty", "frequency_penalty", "presence_penalty"}
    return tuple(name for name in fields(SamplingParams) if name in known - penalties)

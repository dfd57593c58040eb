"""Stateless strategies, the table of all strategies by name, and `make_strategy`.

Top-k: A. Fan et al., 2018, arXiv:1805.04833.  Top-p: A. Holtzman et al., 2020, arXiv:1904.09751.
Min-p: N. N. Minh et al., 2024, arXiv:2407.01082.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nbflow.sampling.mirostat import Mirostat
from nbflow.sampling.sampler_chain import Chain
from nbflow.sampling.strategy import FilteredSampling, Strategy
from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
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

    def __getitem__(self, name: str) -> type[Strategy]:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, table = entry.partition(":")
            found: Mapping[str, type[Strategy]] = getattr(importlib.import_module(module), table)
            entry = self._entries[name] = found[name.partition(".")[2]]
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


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
        raise unknown_name("decoding strategy", name, STRATEGIES)
    kind = STRATEGIES[name]
    known = [f.name for f in dataclasses.fields(kind)]
    given = {key: value for key, value in parameters.items() if value is not None}
    for key in given:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UsageError(f"decoding {name!r} has no parameter {key!r}; {takes}")
    recommended = {key: value for key, value in (defaults or {}).items() if key in known and value}
    return kind(**{**recommended, **given})

"""The table of strategies, and how one is made by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbflow.compat.inferflow.strategies import INFERFLOW
from nbflow.sampling.filters import Filters
from nbflow.sampling.greedy import Greedy
from nbflow.sampling.min_p import MinP
from nbflow.sampling.mirostat import Mirostat
from nbflow.sampling.sample import Sample
from nbflow.sampling.sampler_chain import Chain
from nbflow.sampling.strategy import Strategy
from nbflow.sampling.top_k import TopK
from nbflow.sampling.top_p import TopP
from nbflow_kernels.errors import UsageError, unknown_name

STRATEGIES: dict[str, type[Strategy]] = {
    "greedy": Greedy,
    "sample": Sample,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "filters": Filters,
    "chain": Chain,
    "mirostat": Mirostat,
    **{f"inferflow.{name}": kind for name, kind in INFERFLOW.items()},
}


def make_strategy(
    name: str, defaults: Mapping[str, float] | None = None, **parameters: Any
) -> Strategy:
    """Return the strategy with this name.

    Parameters
    ----------
    name : str
        One of `STRATEGIES`.
    defaults : mapping of str to float, optional
        What a model recommends; taken where the strategy has such a parameter and none is given.
        0 recommends nothing, as in Hugging Face's generation_config.json.
    **parameters
        The strategy's parameters; None means the model's default, or else the strategy's.

    Raises
    ------
    UsageError
        If the name is unknown, a parameter is not one of the strategy's, or its value is out of
        range.

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

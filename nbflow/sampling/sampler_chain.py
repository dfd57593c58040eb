"""Sampler chain: llama.cpp's samplers in a configurable order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nbflow.sampling.candidates import Candidates, TopCandidates, random_number
from nbflow.sampling.samplers import (
    ALIASES,
    IS_NOOP,
    LETTERS,
    SAMPLERS,
    SamplerContext,
    SamplerOptions,
    n_lowered_by,
)
from nbflow.sampling.strategy import SampledState, Strategy, check_range
from nbflow_kernels.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Chain(SamplerOptions, Strategy):
    """Sample after a chain of samplers; names and defaults are those of llama.cpp."""

    compiled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "samplers", parse_samplers(self.samplers))
        for name, low, high in (
            ("temperature", -np.inf, 100.0), ("dynatemp_range", 0.0, 100.0),
            ("dynatemp_exponent", 0.0, 100.0), ("top_k", -np.inf, 2**31 - 1), ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0), ("typical_p", 0.0, 1.0), ("tfs_z", 0.0, 1.0),
            ("top_n_sigma", -np.inf, 1e6), ("xtc_probability", 0.0, 1.0),
            ("xtc_threshold", 0.0, 1.0), ("repeat_last_n", -1, 2**31 - 1),
            ("repeat_penalty", 1e-6, 1e6), ("frequency_penalty", -100.0, 100.0),
            ("presence_penalty", -100.0, 100.0), ("dry_multiplier", 0.0, 1e6),
            ("dry_base", 0.0, 1e6), ("dry_allowed_length", 1, 2**31 - 1),
            ("dry_penalty_last_n", -1, 2**31 - 1), ("min_keep", 0, 2**31 - 1),
        ):  # fmt: skip
            check_range("chain", name, getattr(self, name), low, high)

    def begin(self, prompt_ids: Sequence[int], seed: int) -> ChainState:
        return ChainState(self, prompt_ids, seed)


class ChainState(SampledState):
    """State of a chain: the tokens so far."""

    def __init__(self, chain: Chain, prompt_ids: Sequence[int], seed: int) -> None:
        super().__init__(prompt_ids, seed)
        self._chain = chain

    def n_best(self) -> int | None:
        """See `State.n_best`: `top_k`, plus the tokens lowered by samplers before it."""
        chain = self._chain
        if chain.top_k <= 0 or "top_k" not in chain.samplers:
            return None
        n_lowered = 0
        for name in chain.samplers[: chain.samplers.index("top_k")]:
            n = n_lowered_by(name, chain, len(self.tokens))
            if n is None:
                return None
            n_lowered += n
        return chain.top_k + n_lowered

    def candidates(self, logits: np.ndarray | TopCandidates) -> Candidates:
        found = Candidates(logits)
        place = self.tokens.n_new
        context = SamplerContext(self.tokens.array, lambda: random_number(self.seed, place, 1))
        for name in self._chain.samplers:
            if not IS_NOOP[name](self._chain):
                SAMPLERS[name](found, self._chain, context)
        return found


def parse_samplers(order: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of samplers.

    Parameters
    ----------
    order : str or sequence of str
        Names, or a string with names separated by semicolons or llama.cpp's letters ("edskypmxt").

    Raises
    ------
    UsageError
        If a name or letter is unknown.

    Examples
    --------
    >>> parse_samplers("top_k;temp")
    ('top_k', 'temperature')
    >>> parse_samplers("kpt")
    ('top_k', 'top_p', 'temperature')
    """
    if isinstance(order, str):
        whole = ALIASES.get(order, order)
        if order and ";" not in order and whole not in SAMPLERS and set(order) <= set(LETTERS):
            return tuple(LETTERS[letter] for letter in order)
        order = [name.strip() for name in order.split(";") if name.strip()]
    names = [ALIASES.get(name, name) for name in order]
    for name in names:
        if name not in SAMPLERS:
            raise unknown_name("sampler", name, SAMPLERS, "samplers")
    if not names:
        raise UsageError(
            "samplers must name at least one sampler; to sample from all tokens use "
            "decoding='sample'",
            "samplers",
        )
    return tuple(names)

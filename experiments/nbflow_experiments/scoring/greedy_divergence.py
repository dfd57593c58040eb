"""Length of the common prefix of two models' greedy outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM


@dataclass(frozen=True)
class Parting:
    """Result for a number of prompts."""

    n_tokens: int
    common: np.ndarray
    """int64 (prompts,): common prefix in tokens; `n_tokens` if identical."""

    @property
    def identical_share(self) -> float:
        """Return the share of prompts with identical outputs."""
        return float(np.mean(self.common == self.n_tokens))

    @property
    def median(self) -> float:
        """Return the median common-prefix length."""
        return float(np.median(self.common))


def greedy_tokens(
    model: LLM, prompts: Sequence[Sequence[int]], n_tokens: int
) -> list[Sequence[int]]:
    """Return the greedy continuation of each prompt; end tokens do not end it."""
    results = model.generate_batch(prompts, max_tokens=n_tokens, ignore_eos=True)
    return [result.ids for result in results]


def common_prefixes(
    ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]], n_tokens: int
) -> Parting:
    """Compare continuations token by token."""
    common = []
    for a, b in zip(ones, others, strict=True):
        same = [x == y for x, y in zip(a, b, strict=False)]
        common.append(same.index(False) if False in same else len(same))
    return Parting(n_tokens, np.array(common, np.int64))


def parting(model: LLM, reference: LLM, prompts: Sequence[Sequence[int]], n_tokens: int) -> Parting:
    """Continue prompts greedily with both models and compare token by token."""
    ones, others = (greedy_tokens(one, prompts, n_tokens) for one in (model, reference))
    return common_prefixes(ones, others, n_tokens)

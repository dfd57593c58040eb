"""Mirostat: truncation with feedback control of the surprise.

S. Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity",
ICLR 2021, arXiv:2007.14966.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nbflow.sampling.candidates import MIN_TEMPERATURE, Candidates, TopCandidates
from nbflow.sampling.strategy import SampledState, Strategy, check_range
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Mirostat(Strategy):
    """Sample below an adaptive bound of the surprise."""

    temperature: float = 0.8
    """Divisor of the logits, applied first; llama.cpp's default."""
    mirostat: int = 2
    """Version: 1 estimates top-k from a fitted Zipf law, 2 truncates by surprise."""
    mirostat_tau: float = 5.0
    """Target surprise of a token in bits."""
    mirostat_eta: float = 0.1
    """Learning rate of the bound."""
    mirostat_m: int = 100
    """Number of tokens in the fit of version 1."""

    compiled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range("mirostat", "temperature", self.temperature, 0.0, 100.0, open_low=True)
        check_range("mirostat", "mirostat_tau", self.mirostat_tau, 0.0, 100.0)
        check_range("mirostat", "mirostat_eta", self.mirostat_eta, 0.0, 100.0)
        check_range("mirostat", "mirostat_m", self.mirostat_m, 2, 2**31 - 1)
        if self.mirostat not in (1, 2):
            raise UsageError(
                f"mirostat: mirostat must be 1 or 2, got {self.mirostat!r}", "mirostat"
            )

    def begin(self, prompt_ids: Sequence[int], seed: int) -> MirostatState:
        return MirostatState(self, prompt_ids, seed)


class MirostatState(SampledState):
    """State of Mirostat: the surprise bound `mu`."""

    def __init__(self, strategy: Mirostat, prompt_ids: Sequence[int], seed: int) -> None:
        super().__init__(prompt_ids, seed)
        self._strategy = strategy
        self.mu = 2.0 * strategy.mirostat_tau
        self._seen: tuple[np.ndarray, np.ndarray] | None = None

    def candidates(self, logits: np.ndarray | TopCandidates) -> Candidates:
        strategy = self._strategy
        found = Candidates(logits)
        if strategy.temperature != 1.0:
            found.scale(1.0 / max(strategy.temperature, MIN_TEMPERATURE))
        if strategy.mirostat == 1:
            found.first(max(1, _count(found, self.mu, strategy.mirostat_m)))
        else:
            surprise = -np.log2(np.maximum(found.probs(), np.finfo(np.float64).tiny))
            found.first(max(1, int((surprise <= self.mu).sum())))
        self._seen = found.ids, found.probs()
        return found

    def accept(self, token: int) -> None:
        super().accept(token)
        if self._seen is None:
            return
        ids, probs = self._seen
        place = np.flatnonzero(ids == token)
        # a replayed token outside the candidates does not change the bound
        if len(place) and probs[place[0]] > 0.0:
            error = -math.log2(probs[place[0]]) - self._strategy.mirostat_tau
            self.mu -= self._strategy.mirostat_eta * error


def _count(candidates: Candidates, mu: float, m: int) -> int:
    """Return k of version 1 (algorithm 1 of the paper) from the fitted Zipf exponent."""
    p = candidates.probs()
    p = -np.sort(-(p if len(p) <= m else np.partition(p, len(p) - m)[len(p) - m :]))
    p = p[p > 0.0]
    if len(p) < 2:
        return 1
    place = np.arange(len(p) - 1)
    t = np.log((place + 2.0) / (place + 1.0))
    b = np.log(p[:-1] / p[1:])
    s = float((t * b).sum() / (t * t).sum())
    epsilon = s - 1.0
    if s <= 0.0:  # equal probabilities: every token is needed for the surprise
        return len(candidates)
    if abs(epsilon) < 1e-9:  # the limit of epsilon / (1 - N ** -epsilon)
        ratio = 1.0 / math.log(candidates.n_vocab)
    else:
        ratio = epsilon / (1.0 - candidates.n_vocab**-epsilon)
    power = (math.log(ratio) + mu * math.log(2.0)) / s
    return len(candidates) if power > math.log(len(candidates)) else int(math.exp(power))

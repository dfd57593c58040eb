"""Inferflow's decoding strategies with its rules, defaults and random number generator.

Every strategy samples from a pool of the most probable tokens: temperature first, then truncation
relative to the probability mass of the pool.  With Java's ``Random``, equal logits and seeds give
Inferflow's tokens, with two exceptions: seed 0 is an ordinary seed (there, the time of day), and
the n-gram model of `RandomFsd` contains the prompt from the first token on (there, a sampled first
token is counted before the model exists).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nbflow.compat.inferflow.fsd import NgramModel
from nbflow.compat.inferflow.java_random import JavaRandom
from nbflow.option_fields import fields
from nbflow.options import SamplingParams
from nbflow.sampling.candidates import Candidates, TopCandidates
from nbflow.sampling.samplers import least_typical_last, tail_free_count
from nbflow.sampling.strategy import Strategy, check_range

LEAST_TEMPERATURE = 0.001
"""Lower bound of temperatures."""
N_RANDOM = 10
"""Number of first new tokens that randomised FSD may sample."""


@dataclass(frozen=True)
class Pooled(Strategy):
    """Base class: a pool of the most probable tokens, temperature, truncation, sampling."""

    temperature: float = 1.0
    """Divisor of the logits, before truncation; at least 0.001."""
    pool_size: int = 50
    """Size of the pool."""

    compiled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, known in fields(SamplingParams).items():
            low, high = known.option.low, known.option.high
            if name in vars(self) and low is not None and high is not None:
                check_range(self._name, name, getattr(self, name), low, high)

    @property
    def _name(self) -> str:
        return f"inferflow {type(self).__name__}"

    def begin(self, prompt_ids: Sequence[int], seed: int) -> PoolState:
        return PoolState(self, prompt_ids, seed)

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        """Truncate the sorted pool."""

    def number(self, state: PoolState) -> float:
        """Return the uniform number in [0, 1) that samples a token."""
        return state.random.next_double()


@dataclass(frozen=True)
class TopPMaxK(Pooled):
    """Top-p of at most `max_k` tokens."""

    max_k: int = 8
    """Maximum number of tokens to keep, at least 1."""
    top_p: float = 0.9
    """Probability mass to keep."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        _top_p(pool, self.top_p, self.max_k)


@dataclass(frozen=True)
class Std(TopPMaxK):
    """`TopPMaxK` that may replace end tokens."""

    eos_bypassing_max: int = 0
    """Number of sampled end tokens to replace by the most probable other token."""
    eos_ids: tuple[int, ...] = ()
    """End tokens."""


@dataclass(frozen=True)
class Auto(Std):
    """`Std` with top_p 1: the `max_k` most probable tokens."""

    top_p: float = 1.0
    """Probability mass to keep."""


@dataclass(frozen=True)
class MaxK(Pooled):
    """Top-k: the `max_k` most probable tokens."""

    max_k: int = 8
    """Number of tokens to keep."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        pool.first(self.max_k)


@dataclass(frozen=True)
class Best(Pooled):
    """Greedy: the most probable token."""

    pool_size: int = 1
    """Size of the pool."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        pool.first(1)


@dataclass(frozen=True)
class Fsd(Pooled):
    """Argmax of ``(1 - alpha) p - alpha penalty`` over the `k` most probable tokens."""

    k: int = 6
    """Number of candidate tokens."""
    alpha: float = 0.5
    """Weight of the penalty."""
    order: int = 3
    """Order of the n-gram model."""
    beta: float = 0.9
    """Weight of the longest context in the n-gram model."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        probs = pool.probs()[: self.k]
        pool.first(self.k)
        model = state.ngrams(self.order, self.beta)
        penalties = np.array([model.penalty(int(i)) for i in pool.ids])
        best = int(np.argmax((1.0 - self.alpha) * probs - self.alpha * penalties))
        pool.take(slice(best, best + 1))

    def number(self, state: PoolState) -> float:
        return 0.0


@dataclass(frozen=True)
class RandomFsd(Fsd):
    """`Fsd` that samples each of the first 10 new tokens by `TopPMaxK` with probability 0.5."""

    top_p: float = 0.93
    """Probability mass to keep where a token is sampled."""
    max_k: int = 8
    """Maximum number of tokens to keep where a token is sampled."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        state.ngrams(self.order, self.beta)  # counts the prompt before the first new token
        if self._tosses(state):
            _top_p(pool, self.top_p, self.max_k)
        else:
            super().truncate(pool, state)

    def number(self, state: PoolState) -> float:
        if not self._tosses(state):
            return 0.0
        return state.random.next_double()

    def _tosses(self, state: PoolState) -> bool:
        """Return True if the next token is sampled; one random decision for each token."""
        if state.n_new >= N_RANDOM:
            return False
        if state.coin is None or state.coin[0] != state.n_new:
            state.coin = state.n_new, state.random.next_double() < 0.5
        return state.coin[1]


@dataclass(frozen=True)
class MinPShare(Pooled):
    """Min-p: tokens at least `min_p` times as probable as the best one."""

    min_p: float = 0.05
    """Minimum probability relative to the best token."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        probs = pool.probs()
        pool.keep(probs >= self.min_p * probs[0])


@dataclass(frozen=True)
class TailFree(Pooled):
    """Tail-free sampling without the first second derivative."""

    z: float = 0.95
    """Share of the second derivatives to keep."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        pool.first(tail_free_count(pool.probs(), self.z, first_counts=False))


@dataclass(frozen=True)
class Typical(Pooled):
    """Typical sampling whose mass `p` does not count the most typical token."""

    p: float = 0.95
    """Probability mass to keep after the most typical token."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        probs = pool.probs()
        order = least_typical_last(probs)
        passed = np.flatnonzero(np.cumsum(probs[order[1:]]) > self.p)
        n = int(passed[0]) + 2 if len(passed) else len(order)
        pool.take(np.sort(order[:n]))


@dataclass(frozen=True)
class MirostatPool(Pooled):
    """Mirostat 2: tokens with a surprise below an adaptive bound."""

    tau: float = 5.0
    """Target surprise in bits."""
    eta: float = 0.1
    """Learning rate of the bound."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        bits = -np.log2(np.maximum(pool.probs(), np.finfo(np.float64).tiny))
        pool.first(max(1, int((bits <= state.mu).sum())))


class PoolState:
    """State of one sequence: random numbers, text, mirostat's bound and the n-gram model."""

    takes_device_rows = False

    def __init__(self, strategy: Pooled, prompt_ids: Sequence[int], seed: int) -> None:
        self._strategy = strategy
        self._text = list(prompt_ids)
        self.n_new = 0
        """Number of new tokens."""
        self.random = JavaRandom(seed)
        """Random number generator of the request."""
        self.mu = 2.0 * getattr(strategy, "tau", 0.0)
        """Mirostat's bound on the surprise."""
        self.coin: tuple[int, bool] | None = None
        """Randomised FSD: index of a new token, and True if it is sampled."""
        self._ngrams: NgramModel | None = None
        self._bypassed = 0
        self._drawn: tuple[Candidates, int, bool] | None = None

    def n_best(self) -> int | None:
        """See `nbflow.sampling.State.n_best`."""
        return self._strategy.pool_size

    def choose(self, logits: np.ndarray | TopCandidates) -> int:
        """See `nbflow.sampling.State.choose`."""
        if self._drawn is None:
            pool = self._pool(logits)
            self._strategy.truncate(pool, self)
            token, bypassed = self._past_end(pool, pool.draw(self._strategy.number(self)))
            self._drawn = pool, token, bypassed
        return self._drawn[1]

    def probs(self, logits: np.ndarray) -> np.ndarray:
        """See `nbflow.sampling.State.probs`; not for `RandomFsd`."""
        pool = self._pool(logits)
        self._strategy.truncate(pool, self)
        return pool.dense()

    def accept(self, token: int) -> None:
        """See `nbflow.sampling.State.accept`."""
        if self._drawn is None:  # replayed text: skip its random number
            self._strategy.number(self)
        elif self._drawn[1] == token:
            self._follow(*self._drawn)
        if self._ngrams is not None:
            self._ngrams.extend([token])
        self._text.append(token)
        self.n_new += 1
        self._drawn = None

    def fork(self) -> PoolState:
        """See `nbflow.sampling.State.fork`."""
        return copy.deepcopy(self)

    def ngrams(self, order: int, beta: float) -> NgramModel:
        """Return the n-gram model of prompt and new tokens."""
        if self._ngrams is None:
            self._ngrams = NgramModel(order, beta)
            self._ngrams.extend(self._text)
        return self._ngrams

    def _pool(self, logits: np.ndarray | TopCandidates) -> Candidates:
        pool = Candidates(logits)
        pool.first(self._strategy.pool_size)
        pool.scale(1.0 / max(self._strategy.temperature, LEAST_TEMPERATURE))
        return pool

    def _past_end(self, pool: Candidates, token: int) -> tuple[int, bool]:
        """Return the token, or the best other one for an end token to bypass."""
        strategy = self._strategy
        if not isinstance(strategy, Std) or token not in strategy.eos_ids:
            return token, False
        others = [int(i) for i in pool.ids if i not in strategy.eos_ids]
        if not others or self._bypassed >= strategy.eos_bypassing_max:
            return token, False
        return others[0], True

    def _follow(self, pool: Candidates, token: int, bypassed: bool) -> None:
        self._bypassed += bypassed
        if isinstance(self._strategy, MirostatPool):
            share = float(pool.probs()[pool.ids == token][0])
            self.mu -= self._strategy.eta * (-np.log2(share) - self._strategy.tau)


def _top_p(pool: Candidates, top_p: float, max_k: int) -> None:
    reached = np.flatnonzero(np.cumsum(pool.probs()) >= top_p)
    n = int(reached[0]) + 1 if len(reached) else len(pool)
    pool.first(min(n, max_k))


INFERFLOW: dict[str, type[Pooled]] = {
    "std": Std,
    "auto": Auto,
    "greedy": Best,
    "top_k": MaxK,
    "top_p": TopPMaxK,
    "fsd": Fsd,
    "random_fsd": RandomFsd,
    "min_p": MinPShare,
    "tfs": TailFree,
    "typical": Typical,
    "mirostat": MirostatPool,
}
"""Strategies by Inferflow's names; `SamplingParams.decoding` prefixes them with ``inferflow.``."""

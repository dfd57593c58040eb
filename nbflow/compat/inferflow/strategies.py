"""Inferflow's ten strategies, by its rules, defaults and random numbers.

All of them look at a pool of the best tokens; the temperature comes before every truncation, and
what is truncated is relative to the mass of the pool.  The draws are those of Java's ``Random``, so
equal logits and seeds give Inferflow's tokens, except that seed 0 is a seed like others here (there
it means the time of day), and that the n-gram model of `RandomFsd` knows the prompt from the first
token on (there a sampled first token is counted before the model exists).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nbflow.compat.inferflow.fsd import NgramModel
from nbflow.compat.inferflow.java_random import JavaRandom
from nbflow.sampling.candidates import Candidates, TopCandidates
from nbflow.sampling.samplers import least_typical_last, tail_free_count
from nbflow.sampling.strategy import Strategy, check_range

LEAST_TEMPERATURE = 0.001
"""Lower temperatures become this one."""
N_RANDOM = 10
"""The first new tokens of randomised FSD, which may be sampled."""


@dataclass(frozen=True)
class Pooled(Strategy):
    """What they share: a pool of the best tokens, a temperature, a rule, a draw."""

    temperature: float = 1.0
    """Logits are divided by it before anything else; at least 0.001."""
    pool_size: int = 50
    """How many of the best tokens are looked at."""

    compiled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range(self._name, "temperature", self.temperature, 0.0, 100.0)
        for name, low, high in (
            ("pool_size", 1, 2**31 - 1), ("max_k", 1, 2**31 - 1), ("top_p", 0.0, 1.0),
            ("k", 1, 2**31 - 1), ("alpha", 0.0, 1.0), ("order", 1, 64), ("beta", 0.0, 1.0),
            ("min_p", 0.0, 1.0), ("z", 0.0, 1.0), ("p", 0.0, 1.0), ("tau", 0.0, 100.0),
            ("eta", 0.0, 100.0), ("eos_bypassing_max", 0, 2**31 - 1),
        ):  # fmt: skip
            if hasattr(self, name):
                check_range(self._name, name, getattr(self, name), low, high)

    @property
    def _name(self) -> str:
        return f"inferflow {type(self).__name__}"

    def begin(self, prompt_ids: Sequence[int], seed: int) -> PoolState:
        return PoolState(self, prompt_ids, seed)

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        """Cut the pool, which is sorted, down to what may be drawn."""

    def number(self, state: PoolState) -> float:
        """Return the number in [0, 1) that a token is drawn with."""
        return state.random.next_double()


@dataclass(frozen=True)
class Std(Pooled):
    """The best tokens until they have mass `top_p` or are `max_k`."""

    max_k: int = 8
    """Most tokens that are kept, at least 1."""
    top_p: float = 0.9
    """Mass that is kept."""
    eos_bypassing_max: int = 0
    """How often a drawn end token is replaced by the best other token that is kept."""
    eos_ids: tuple[int, ...] = ()
    """The end tokens."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        _top_p(pool, self.top_p, self.max_k)


@dataclass(frozen=True)
class Auto(Std):
    """`Std` with all of the mass: the best `max_k`."""

    top_p: float = 1.0
    """Mass that is kept."""


@dataclass(frozen=True)
class TopPMaxK(Pooled):
    """The best tokens until they have mass `top_p` or are `max_k`."""

    max_k: int = 8
    """Most tokens that are kept, at least 1."""
    top_p: float = 0.9
    """Mass that is kept."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        _top_p(pool, self.top_p, self.max_k)


@dataclass(frozen=True)
class MaxK(Pooled):
    """The best `max_k` tokens."""

    max_k: int = 8
    """How many tokens are kept."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        pool.first(self.max_k)


@dataclass(frozen=True)
class Best(Pooled):
    """The best token."""

    pool_size: int = 1
    """How many of the best tokens are looked at."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        pool.first(1)


@dataclass(frozen=True)
class Fsd(Pooled):
    """Of the best `k` tokens the one of greatest ``(1 - alpha) p - alpha penalty``; no draw."""

    k: int = 6
    """How many tokens are compared."""
    alpha: float = 0.5
    """Weight of the penalty."""
    order: int = 3
    """Order of the n-gram model."""
    beta: float = 0.9
    """Share of the longest context in the model's estimate."""

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
    """`Fsd`, but the first 10 new tokens are drawn as by `TopPMaxK` half of the time."""

    top_p: float = 0.93
    """Mass that is kept where a token is drawn."""
    max_k: int = 8
    """Most tokens that are kept there."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        state.ngrams(self.order, self.beta)  # the model knows the prompt before a token is counted
        if self._tosses(state):
            _top_p(pool, self.top_p, self.max_k)
        else:
            super().truncate(pool, state)

    def number(self, state: PoolState) -> float:
        if not self._tosses(state):
            return 0.0
        return state.random.next_double()

    def _tosses(self, state: PoolState) -> bool:
        """Return whether the next token is drawn; the coin is tossed once for each token."""
        if state.n_new >= N_RANDOM:
            return False
        if state.coin is None or state.coin[0] != state.n_new:
            state.coin = state.n_new, state.random.next_double() < 0.5
        return state.coin[1]


@dataclass(frozen=True)
class MinPShare(Pooled):
    """The tokens at least `min_p` times as probable as the best."""

    min_p: float = 0.05
    """Least probability kept, relative to the best."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        probs = pool.probs()
        pool.keep(probs >= self.min_p * probs[0])


@dataclass(frozen=True)
class TailFree(Pooled):
    """The tokens before the flat tail; the first bend does not count."""

    z: float = 0.95
    """Share of the bends that is kept."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        pool.first(tail_free_count(pool.probs(), self.z, first_counts=False))


@dataclass(frozen=True)
class Typical(Pooled):
    """The most typical token, and those after it until their mass, without its, passes `p`."""

    p: float = 0.95
    """Mass that is kept besides the most typical token."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        probs = pool.probs()
        order = least_typical_last(probs)
        passed = np.flatnonzero(np.cumsum(probs[order[1:]]) > self.p)
        n = int(passed[0]) + 2 if len(passed) else len(order)
        pool.take(np.sort(order[:n]))


@dataclass(frozen=True)
class MirostatPool(Pooled):
    """The tokens whose surprise is below a bound that follows the text (version 2)."""

    tau: float = 5.0
    """Wanted surprise of a token in bits."""
    eta: float = 0.1
    """How fast the bound follows."""

    def truncate(self, pool: Candidates, state: PoolState) -> None:
        bits = -np.log2(np.maximum(pool.probs(), np.finfo(np.float64).tiny))
        pool.first(max(1, int((bits <= state.mu).sum())))


class PoolState:
    """The random numbers, the text, and what single strategies remember."""

    takes_device_rows = False

    def __init__(self, strategy: Pooled, prompt_ids: Sequence[int], seed: int) -> None:
        self._strategy = strategy
        self._text = list(prompt_ids)
        self.n_new = 0
        """New tokens."""
        self.random = JavaRandom(seed)
        """The request's numbers."""
        self.mu = 2.0 * getattr(strategy, "tau", 0.0)
        """Mirostat's bound of surprise."""
        self.coin: tuple[int, bool] | None = None
        """What randomised FSD tossed for which new token."""
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
        """See `nbflow.sampling.State.probs`; not for strategies that toss a coin."""
        pool = self._pool(logits)
        self._strategy.truncate(pool, self)
        return pool.dense()

    def accept(self, token: int) -> None:
        """See `nbflow.sampling.State.accept`."""
        if self._drawn is None:  # a replayed text: its draw is passed over
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
        """Return the token, or the best other one if it is an end token to be passed over."""
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
"""Strategies by Inferflow's names; here they begin with ``inferflow.``."""

"""Interfaces of decoding strategies: compiled ones, and states of the others."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from nbflow.sampling.candidates import MIN_TEMPERATURE, Candidates, TopCandidates, random_number
from nbflow.sampling.token_buffer import TokenBuffer
from nbflow_kernels import embedding
from nbflow_kernels.arrays import empty, is_cuda, on_device, on_host
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import (
    cpu,
    cuda,
    min_p_renorm_probs,
    softmax,
    top_k_renorm_probs,
    top_p_renorm_probs,
)
from nbflow_kernels.sampling.argument_checks import limits_of


class State(Protocol):
    """State of a strategy for one request."""

    takes_device_rows: bool = False
    """True if `choose` accepts rows on a CUDA device."""

    def n_best(self) -> int | None:
        """Return the number of top candidates that `choose` needs; None: the whole row."""
        return None

    def choose(self, logits: np.ndarray | TopCandidates) -> int:
        """Return the next token; idempotent until `accept`.

        Parameters
        ----------
        logits : array of float32, shape (V,), or TopCandidates
            Logits, which may be modified; `TopCandidates` only if `n_best` allows it.
        """

    def probs(self, logits: np.ndarray) -> np.ndarray:
        """Return the distribution of `choose`, float32 (V,)."""

    def accept(self, token: int) -> None:
        """Append the next token, which may differ from the chosen one."""

    def fork(self) -> State:
        """Return an independent copy."""


class SampledState(State):
    """State that samples from candidates with Philox random numbers."""

    def __init__(self, prompt_ids: Sequence[int], seed: int) -> None:
        self.tokens = TokenBuffer(prompt_ids)
        self.seed = seed

    def candidates(self, logits: np.ndarray | TopCandidates) -> Candidates:
        """Return the remaining candidates with their final logits."""
        raise NotImplementedError

    def choose(self, logits: np.ndarray | TopCandidates) -> int:
        return self.candidates(logits).draw(random_number(self.seed, self.tokens.n_new))

    def probs(self, logits: np.ndarray) -> np.ndarray:
        return self.candidates(logits).dense()

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def fork(self) -> Self:
        other = copy.copy(self)
        other.tokens = self.tokens.copy()
        return other


@dataclass(frozen=True)
class Strategy:
    """Decoding strategy: selects the next token from logits.

    A `compiled` strategy depends on logits, seed and token index only, and has `launch`.  Others
    have `begin`, which returns a state for each request.
    """

    compiled: ClassVar[bool] = True
    """True if it has `launch`; otherwise it has `begin`."""

    def begin(self, prompt_ids: Sequence[int], seed: int) -> State:
        """Return the initial state of a request."""
        return CompiledState(self, seed)

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        """Return the sampling distribution for logits, both float32 (B, V)."""
        raise NotImplementedError

    def launch(
        self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray, out: np.ndarray
    ) -> None:
        """Write the next token of each row to `out`; -1 for a row without a distribution.

        Must consist of compiled calls only (`nbflow_kernels.cpu.parallel_for.capture`), so that
        multi-step decode can append them to those of the model.

        Parameters
        ----------
        logits : array of float32, shape (B, V)
            Logits; on a CUDA device sampling runs there, with the same result.
        seeds : array of uint64, shape (B,)
            Seed of each row's request.
        offsets : array of uint64, shape (B,)
            Number of tokens sampled before by each row's request.
        out : array of int32, shape (B,)
            Output, on the device of the logits.
        """
        raise NotImplementedError

    def choose(self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the next token of each row, int32 (B,); parameters as in `launch`.

        Raises
        ------
        UsageError
            If a row has a NaN, +inf or nothing but -inf.
        """
        tokens = self.drawn(logits, seeds, offsets)
        check_sampled(tokens)
        return tokens

    def drawn(self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return as `choose`, with -1 for a row without a distribution."""
        out = empty(logits, (len(logits),), np.int32)
        self.launch(logits, seeds, offsets, out)
        tokens: np.ndarray = on_host(out)
        return tokens


class CompiledState(State):
    """State of a compiled strategy: the number of tokens."""

    takes_device_rows = True

    def __init__(self, strategy: Strategy, seed: int) -> None:
        self._strategy = strategy
        self._seed = np.array([seed], np.uint64)
        self._n = 0

    def choose(self, logits: np.ndarray | TopCandidates) -> int:
        assert not isinstance(logits, TopCandidates)
        offset = np.array([self._n], np.uint64)
        return int(self._strategy.choose(logits[None], self._seed, offset)[0])

    def probs(self, logits: np.ndarray) -> np.ndarray:
        row: np.ndarray = self._strategy.distribution(logits[None])[0]
        return row

    def accept(self, token: int) -> None:
        self._n += 1

    def fork(self) -> CompiledState:
        return copy.copy(self)


@dataclass(frozen=True)
class FilteredSampling(Strategy):
    """Sampling with a temperature from the tokens that filters keep."""

    temperature: float = 1.0
    """Divisor of the logits, applied first."""

    name: ClassVar[str]
    """Name in `nbflow.sampling.STRATEGIES`, for messages."""
    least_top_k: ClassVar[int] = 1
    """Least value of ``top_k``; 0 stands for all tokens."""

    def __post_init__(self) -> None:
        for name, low, high, open_low in (
            ("temperature", 0.0, 100.0, True), ("top_k", self.least_top_k, 2**31 - 1, False),
            ("top_p", 0.0, 1.0, True), ("min_p", 0.0, 1.0, False),
        ):  # fmt: skip
            if hasattr(self, name):
                check_range(self.name, name, getattr(self, name), low, high, open_low=open_low)

    def filters(self) -> dict[str, float]:
        """Return temperature and the filters: ``top_k``, ``top_p``, ``min_p``."""
        return {name: x for name, x in vars(self).items() if x or name != "top_k"}

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        filters = self.filters()
        p: np.ndarray = softmax(logits, max(filters.pop("temperature"), MIN_TEMPERATURE))
        renorm = {
            "top_k": top_k_renorm_probs, "top_p": top_p_renorm_probs, "min_p": min_p_renorm_probs
        }  # fmt: skip
        for name, value in filters.items():
            p = renorm[name](p, value)
        return p

    def launch(
        self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray, out: np.ndarray
    ) -> None:
        FilteredRows([self] * len(logits)).launch(logits, seeds, offsets, out)


@functools.lru_cache(maxsize=4096)
def _parameters(strategy: FilteredSampling) -> tuple[float, np.ndarray]:
    """Return temperature and `limits_of` for one row."""
    filters = strategy.filters()
    temperature = max(filters.pop("temperature"), MIN_TEMPERATURE)
    return temperature, limits_of(1, **filters)[0]


class FilteredRows:
    """Temperatures and filters of rows of logits, which one launch reads.

    Parameters
    ----------
    strategies : sequence of FilteredSampling
        Strategy of each row.
    """

    def __init__(self, strategies: Sequence[Any]) -> None:
        known = [_parameters(strategy) for strategy in strategies]
        self.temperature = np.array([each for each, _ in known], np.float32)
        self.limits = np.array([each for _, each in known])

    def fill(self, strategies: Sequence[Any]) -> None:
        """Replace the strategies; captured launches read the new ones."""
        for i, (temperature, limits) in enumerate(map(_parameters, strategies)):
            self.temperature[i], self.limits[i] = temperature, limits

    def launch(
        self,
        logits: np.ndarray,
        seeds: np.ndarray,
        offsets: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray | None = None,
    ) -> None:
        """Write the next token of `rows`, int32 (B,), by default of all; see `Strategy.launch`."""
        if rows is None:
            rows = np.arange(len(logits), dtype=np.int32)
        (cuda if is_cuda(logits) else cpu).sample_logits(
            logits, rows, self.temperature, self.limits, True, seeds, offsets, out
        )


def is_filtered(strategy: Strategy) -> bool:
    """Return whether a strategy may be one of `FilteredRows`."""
    return type(strategy).launch is FilteredSampling.launch


def choose_rows(
    strategies: Sequence[Strategy],
    logits: np.ndarray,
    rows: Sequence[int],
    seeds: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """Return the next token of some rows of logits, each with its compiled strategy.

    Filters with any parameters share a launch, which reads the logits in place.

    Parameters
    ----------
    strategies : sequence of Strategy
        Compiled strategy of each row.
    logits : array of float32, shape (R, V)
        Logits, in host memory or on a CUDA device.
    rows : sequence of int
        B rows of `logits`, ascending.
    seeds, offsets : array of uint64, shape (B,)
        As in `Strategy.launch`.

    Returns
    -------
    array of int32, shape (B,)

    Raises
    ------
    UsageError
        If a row has a NaN, +inf or nothing but -inf.
    """
    groups: dict[Any, list[int]] = {}
    for i, strategy in enumerate(strategies):
        key = FilteredSampling if is_filtered(strategy) else strategy
        groups.setdefault(key, []).append(i)
    tokens = np.empty(len(rows), np.int32)
    for key, group in groups.items():
        mine = [rows[i] for i in group]
        if key is FilteredSampling:
            out = empty(logits, (len(group),), np.int32)
            filtered = FilteredRows([strategies[i] for i in group])
            at = np.array(mine, np.int32)
            filtered.launch(logits, seeds[group], offsets[group], out, at)
            tokens[group] = on_host(out)
        else:
            some = rows_of(logits, mine)
            tokens[group] = key.drawn(some, seeds[group], offsets[group])
    check_sampled(tokens)
    return tokens


def rows_of(logits: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return some rows of logits on their device; `logits` itself if all are selected."""
    if len(rows) == len(logits):  # no row twice: in order
        return logits
    if not is_cuda(logits):
        return logits[rows]
    found: np.ndarray = embedding(on_device(np.array(rows, np.int32), logits), logits)
    return found


def check_sampled(tokens: np.ndarray) -> None:
    """Raise `UsageError` if a row had no distribution."""
    if (tokens < 0).any():
        raise no_distribution()


def no_distribution() -> UsageError:
    """Return the error for logits without a distribution."""
    return UsageError(
        "the model's logits have a NaN or an infinity, so that no token can be sampled; its "
        "weights or the KV cache may exceed their format: try another (weights=, kv=)"
    )


def check_range(
    strategy: str, name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise `UsageError` unless a parameter lies in [low, high], or (low, high] with `open_low`."""
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise UsageError(
            f"{strategy}: {name} must be in {bracket}{low:g}, {high:g}], got {value!r}", name
        )

"""What every strategy offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import cpu
from nbflow_kernels.sampling.checks import limits_of


class State(Protocol):
    """What a strategy remembers of one request."""

    def choose(self, logits: np.ndarray) -> int:
        """Return the next token; asking again without `accept` gives the same.

        Parameters
        ----------
        logits : array of float32, shape (V,)
            Scores of the vocabulary; may be changed.
        """

    def accept(self, token: int) -> None:
        """Take the token that came next; it need not be the chosen one."""

    def fork(self) -> State:
        """Return a copy that goes on by itself."""


@dataclass(frozen=True)
class Strategy:
    """How the next token is chosen from the logits.

    A strategy that needs nothing but the logits, a seed and the number of draws before is
    `compiled`: it has `launch`.  Others have `begin`, which gives a state for each request.
    """

    compiled: ClassVar[bool] = True
    """Whether it has `launch`; else it has `begin`."""

    def begin(self, prompt_ids: Sequence[int], seed: int) -> State:
        """Return what it remembers of a request before the first new token."""
        raise NotImplementedError

    def launch(
        self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray, out: np.ndarray
    ) -> None:
        """Write the next token of each row to `out`; -1 for a row without a distribution.

        It is a launcher (`nbflow_kernels.threads.capture`): compiled calls and nothing else, so
        that generation can run them behind the model's.

        Parameters
        ----------
        logits : array of float32, shape (B, V)
            Scores of the vocabulary.
        seeds : array of uint64, shape (B,)
            Seed of each row's request.
        offsets : array of uint64, shape (B,)
            Number of tokens each row's request has drawn before.
        out : array of int32, shape (B,)
            Where to write.
        """
        raise NotImplementedError

    def choose(self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the next token of each row, int32 (B,); parameters as in `launch`.

        Raises
        ------
        UsageError
            If a row has a NaN, +inf or nothing but -inf.
        """
        out = np.empty(len(logits), np.int32)
        self.launch(logits, seeds, offsets, out)
        check_drawn(out)
        return out


@dataclass(frozen=True)
class Draw(Strategy):
    """A draw from the tokens that a filter keeps, the probabilities after a temperature."""

    def filters(self) -> dict[str, float]:
        """Return temperature and the filters: ``top_k``, ``top_p``, ``min_p``."""
        raise NotImplementedError

    def launch(
        self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray, out: np.ndarray
    ) -> None:
        """See `Strategy.launch`."""
        filters, n = self.filters(), len(logits)
        temperature = np.full(n, filters.pop("temperature"), np.float32)
        rows, limits = np.arange(n, dtype=np.int32), limits_of(n, **filters)
        cpu.sample_logits(logits, rows, temperature, limits, True, seeds, offsets, out)


def check_drawn(tokens: np.ndarray) -> None:
    """Raise `UsageError` if a row had no distribution to draw from."""
    if (tokens < 0).any():
        raise no_distribution()


def no_distribution() -> UsageError:
    """Return the error for logits from which no token can be drawn."""
    return UsageError(
        "the model's logits have a NaN or an infinity, so that no token can be drawn; its "
        "weights or the key/value cache may exceed their format: try another (weights=, kv=)"
    )


def check_range(
    strategy: str, name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise `UsageError` unless a parameter lies in [low, high], or (low, high] with `open_low`."""
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise UsageError(
            f"{strategy}: {name} must be in {bracket}{low:g}, {high:g}], got {value!r}"
        )

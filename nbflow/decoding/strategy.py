"""What every strategy offers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Strategy:
    """How the next token is chosen from the logits."""

    def choose(self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the next token of each row.

        Parameters
        ----------
        logits : array of float32, shape (B, V)
            Scores of the vocabulary.
        seeds : array of uint64, shape (B,)
            Seed of each row's request.
        offsets : array of uint64, shape (B,)
            Number of tokens each row's request has drawn before.

        Returns
        -------
        array of int32, shape (B,)
        """
        raise NotImplementedError

    @property
    def is_compiled(self) -> bool:
        """Whether the strategy is made of compiled calls alone, so that it has `launch`."""
        return type(self).launch is not Strategy.launch

    def launch(
        self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray, out: np.ndarray
    ) -> None:
        """Do as `choose` into `out`, by launchers of compiled calls only; nothing is checked."""
        raise NotImplementedError


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

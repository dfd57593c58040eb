"""Pooling of a text's hidden states into one vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POOLINGS = ("mean", "first", "last")


@dataclass(eq=False)
class Pooling:
    """Pooling of one text, and its state on the rank with the head."""

    method: str
    """One of `POOLINGS`."""
    normalize: bool
    """Divide the vector by its length."""
    whole: bool
    """All tokens must run in one step: each sees all others."""
    token_types: list[int] | None = None
    """Types of the tokens, for models that have an embedding for them."""
    total: NDArray[np.float32] | None = None
    """Sum of the hidden states so far, or the only one that is wanted."""

    @property
    def takes_cached(self) -> bool:
        """Return whether pages of the prefix cache may be used."""
        return self.method == "last" and not self.whole and self.token_types is None

    def rows(self, n_done: int, n_tokens: int, n_prompt: int) -> range:
        """Return which of the `n_tokens` tokens behind the first `n_done` are wanted."""
        if self.method == "mean":
            return range(n_tokens)
        wanted = (0 if self.method == "first" else n_prompt - 1) - n_done
        return range(wanted, wanted + 1) if 0 <= wanted < n_tokens else range(0)

    def add(self, states: NDArray[np.float32], n_done: int) -> None:
        """Take the wanted hidden states of a step, in which the prompt went on from `n_done`."""
        if not len(states):
            return
        if self.method != "mean" or n_done == 0:  # 0 again after a preemption
            self.total, states = states[0].copy(), states[1:]
        assert self.total is not None
        for row in states:  # row by row: the sum does not depend on where the steps were cut
            self.total += row

    def vector(self, n_prompt: int) -> NDArray[np.float32]:
        """Return the vector of a text that has been read."""
        assert self.total is not None
        vector = self.total / np.float32(n_prompt) if self.method == "mean" else self.total
        if self.normalize:
            vector = vector / np.linalg.norm(vector)
        return np.asarray(vector, np.float32)

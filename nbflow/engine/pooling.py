"""Pooling of hidden states into one embedding vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POOLINGS = ("mean", "first", "last")


@dataclass(eq=False)
class Pooling:
    """Pooling method of a text, and its running sum on the rank with the head."""

    method: str
    """Pooling method, of `POOLINGS`."""
    normalize: bool
    """True to normalize the vector to length 1."""
    whole: bool
    """True if all tokens must run in one step (bidirectional attention)."""
    token_types: list[int] | None = None
    """Token types, for models with a type embedding."""
    total: NDArray[np.float32] | None = None
    """Sum of the hidden states so far, or the selected one."""

    @property
    def uses_prefix_cache(self) -> bool:
        """Return whether pages of the prefix cache may be used."""
        return self.method == "last" and not self.whole and self.token_types is None

    def rows(self, n_computed: int, n_tokens: int, n_prompt: int) -> range:
        """Return the needed rows of the `n_tokens` tokens after the first `n_computed`."""
        if self.method == "mean":
            return range(n_tokens)
        wanted = (0 if self.method == "first" else n_prompt - 1) - n_computed
        return range(wanted, wanted + 1) if 0 <= wanted < n_tokens else range(0)

    def add(self, states: NDArray[np.float32], n_computed: int) -> None:
        """Add the needed hidden states of a step that begins at token `n_computed`."""
        if not len(states):
            return
        if self.method != "mean" or n_computed == 0:  # 0 again after a preemption
            self.total, states = states[0].copy(), states[1:]
        assert self.total is not None
        for row in states:  # row by row, so that the sum is independent of the chunks
            self.total += row

    def vector(self, n_prompt: int) -> NDArray[np.float32]:
        """Return the vector after the last token."""
        assert self.total is not None
        vector = self.total / np.float32(n_prompt) if self.method == "mean" else self.total
        if self.normalize:
            vector = vector / np.linalg.norm(vector)
        return np.asarray(vector, np.float32)

"""Growing token array of a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenBuffer:
    """Prompt and new tokens of a request."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._array = np.array(prompt_ids, np.int32)
        self._n = self.n_prompt = len(prompt_ids)

    def __len__(self) -> int:
        return self._n

    @property
    def n_new(self) -> int:
        """Number of new tokens."""
        return self._n - self.n_prompt

    @property
    def array(self) -> np.ndarray:
        """All tokens, int32; valid until the next `append`."""
        return self._array[: self._n]

    def append(self, token: int) -> None:
        """Append a token."""
        if self._n == len(self._array):
            self._array = np.concatenate([self._array, np.zeros(self._n + 64, np.int32)])
        self._array[self._n] = token
        self._n += 1

    def copy(self) -> TokenBuffer:
        """Return an independent copy."""
        other = TokenBuffer(())
        other._array, other._n = self.array.copy(), self._n
        other.n_prompt = self.n_prompt
        return other

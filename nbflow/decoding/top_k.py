"""Top-k: a draw from the k most probable tokens (A. Fan et al., 2018, arXiv:1805.04833)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import nbflow_kernels as nk
from nbflow.decoding.strategy import Strategy, check_range


@dataclass(frozen=True)
class TopK(Strategy):
    """A draw from the `top_k` most probable tokens."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""
    top_k: int = 40
    """How many tokens are kept; 40 is the default of llama.cpp."""

    def __post_init__(self) -> None:
        check_range("top_k", "temperature", self.temperature, 0.0, 100.0, open_low=True)
        check_range("top_k", "top_k", self.top_k, 1, 2**31 - 1)

    def choose(self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        probabilities = nk.softmax(logits, self.temperature)
        tokens: np.ndarray = nk.top_k_sampling_from_probs(
            probabilities, int(self.top_k), seed=seeds, offset=offsets
        )
        return tokens

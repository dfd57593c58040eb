"""Top-p: a draw from the smallest set of tokens that has mass p.

A. Holtzman et al., 2020, arXiv:1904.09751.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import nbflow_kernels as nk
from nbflow.decoding.strategy import Strategy, check_range


@dataclass(frozen=True)
class TopP(Strategy):
    """A draw from the most probable tokens that together have mass `top_p`."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""
    top_p: float = 0.9
    """Mass that is kept; 0.9 is the default of Inferflow."""

    def __post_init__(self) -> None:
        check_range("top_p", "temperature", self.temperature, 0.0, 100.0, open_low=True)
        check_range("top_p", "top_p", self.top_p, 0.0, 1.0, open_low=True)

    def choose(self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        probabilities = nk.softmax(logits, self.temperature)
        tokens: np.ndarray = nk.top_p_sampling_from_probs(
            probabilities, self.top_p, seed=seeds, offset=offsets
        )
        return tokens

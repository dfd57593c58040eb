"""Sample: a draw from the whole distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import nbflow_kernels as nk
from nbflow.decoding.strategy import Strategy, check_range


@dataclass(frozen=True)
class Sample(Strategy):
    """A draw from all tokens."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""

    def __post_init__(self) -> None:
        check_range("sample", "temperature", self.temperature, 0.0, 100.0, open_low=True)

    def choose(self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        probabilities = nk.softmax(logits, self.temperature)
        tokens: np.ndarray = nk.sampling_from_probs(probabilities, seed=seeds, offset=offsets)
        return tokens

"""Greedy: the most probable token, the lowest id among equals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbflow.sampling.strategy import Strategy
from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.sampling import cpu, cuda


@dataclass(frozen=True)
class Greedy(Strategy):
    """Always the most probable token."""

    def launch(
        self, logits: np.ndarray, seeds: np.ndarray, offsets: np.ndarray, out: np.ndarray
    ) -> None:
        (cuda if is_cuda(logits) else cpu).argmax(logits, out)

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        p = np.zeros(logits.shape, np.float32)
        p[np.arange(len(logits)), logits.argmax(axis=1)] = 1.0
        return p

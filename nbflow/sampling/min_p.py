"""Min-p: a draw from the tokens not much less probable than the best.

N. N. Minh et al., 2024, arXiv:2407.01082.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbflow.sampling.strategy import Draw, check_range


@dataclass(frozen=True)
class MinP(Draw):
    """A draw from the tokens whose probability is at least `min_p` times the best one's."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""
    min_p: float = 0.05
    """Smallest probability kept, relative to the best; 0.05 as in llama.cpp and Inferflow."""

    def __post_init__(self) -> None:
        check_range("min_p", "temperature", self.temperature, 0.0, 100.0, open_low=True)
        check_range("min_p", "min_p", self.min_p, 0.0, 1.0)

    def filters(self) -> dict[str, float]:
        return {"temperature": self.temperature, "min_p": self.min_p}

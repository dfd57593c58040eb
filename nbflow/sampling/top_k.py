"""Top-k: a draw from the k most probable tokens (A. Fan et al., 2018, arXiv:1805.04833)."""

from __future__ import annotations

from dataclasses import dataclass

from nbflow.sampling.strategy import Draw, check_range


@dataclass(frozen=True)
class TopK(Draw):
    """A draw from the `top_k` most probable tokens."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""
    top_k: int = 40
    """How many tokens are kept; 40 is the default of llama.cpp."""

    def __post_init__(self) -> None:
        check_range("top_k", "temperature", self.temperature, 0.0, 100.0, open_low=True)
        check_range("top_k", "top_k", self.top_k, 1, 2**31 - 1)

    def filters(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_k": self.top_k}

"""Top-p: a draw from the smallest set of tokens that has mass p.

A. Holtzman et al., 2020, arXiv:1904.09751.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbflow.sampling.strategy import Draw, check_range


@dataclass(frozen=True)
class TopP(Draw):
    """A draw from the most probable tokens that together have mass `top_p`."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""
    top_p: float = 0.9
    """Mass that is kept; 0.9 is the default of Inferflow."""

    def __post_init__(self) -> None:
        check_range("top_p", "temperature", self.temperature, 0.0, 100.0, open_low=True)
        check_range("top_p", "top_p", self.top_p, 0.0, 1.0, open_low=True)

    def filters(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_p": self.top_p}

"""Filters: temperature, top-k, top-p and min-p together, in the order of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass

from nbflow.sampling.strategy import Draw, check_range


@dataclass(frozen=True)
class Filters(Draw):
    """A draw from what top-k, then top-p of that, then min-p keep."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""
    top_k: int = 0
    """How many of the best tokens are kept; 0 for all."""
    top_p: float = 1.0
    """Mass that is kept of what `top_k` leaves; 1 for all."""
    min_p: float = 0.0
    """Least probability kept, relative to the best; 0 for all."""

    def __post_init__(self) -> None:
        check_range("filters", "temperature", self.temperature, 0.0, 100.0, open_low=True)
        check_range("filters", "top_k", self.top_k, 0, 2**31 - 1)
        check_range("filters", "top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_range("filters", "min_p", self.min_p, 0.0, 1.0)

    def filters(self) -> dict[str, float]:
        filters: dict[str, float] = {"temperature": self.temperature}
        if self.top_k:
            filters["top_k"] = self.top_k
        return {**filters, "top_p": self.top_p, "min_p": self.min_p}

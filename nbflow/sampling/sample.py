"""Sample: a draw from the whole distribution."""

from __future__ import annotations

from dataclasses import dataclass

from nbflow.sampling.strategy import Draw, check_range


@dataclass(frozen=True)
class Sample(Draw):
    """A draw from all tokens."""

    temperature: float = 1.0
    """Logits are divided by it before anything else."""

    def __post_init__(self) -> None:
        check_range("sample", "temperature", self.temperature, 0.0, 100.0, open_low=True)

    def filters(self) -> dict[str, float]:
        return {"temperature": self.temperature}

"""Engine request with what its HTTP response needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbflow.engine.request import Request
from nbflow.options import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """Engine request and the parameters of its response."""

    request: Request
    params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters."""
    continues_text: bool = False
    """Detokenize as a continuation of the prompt, so that a word keeps its leading space."""
    n: int = 1
    """Number of results, of a search."""
    structure: str | None = None
    """Body field that constrains the output."""

"""Request of the engine with the facts that its HTTP response needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbflow.engine.request import Request
from nbflow.options import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """A request of the engine, and what its answer needs to know."""

    request: Request
    params: SamplingParams = field(default_factory=SamplingParams)
    """Its parameters."""
    continues_text: bool = False
    """The text continues the prompt, with a space if its first token begins a word."""
    n: int = 1
    """Results of a search."""
    structure: str | None = None
    """Field of the body that asks for a structure."""

"""The numbers of a running engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Numbers of a running engine; counters count from its start."""

    running: int
    """Requests with pages."""
    waiting: int
    """Requests without."""
    pages_used: int
    """Pages that requests hold."""
    pages_cached: int
    """Pages that nobody holds, kept for requests that begin alike."""
    pages_total: int
    """Pages there may be."""
    prefix_queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int
    """Those of them that were there."""
    preemptions: int
    """How often a request had to give its pages back."""
    steps: int
    """Steps, and bursts of steps."""
    step_seconds: float
    """Time in steps."""
    prompt_tokens: int
    """Prompt tokens that were read, those from the cache included."""
    generated_tokens: int
    """Tokens that came out."""
    drafted_tokens: int
    """Tokens that were proposed to requests that have ended."""
    accepted_tokens: int
    """Those of them that were right."""
    finished: dict[str, int]
    """Requests that have ended, by reason."""

"""Statistics of a running engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Gauges and counters of a running engine; counters start at 0 with it."""

    running: int
    """Running requests, which hold pages."""
    waiting: int
    """Waiting requests."""
    pages_used: int
    """Pages held by requests."""
    pages_cached: int
    """Unreferenced pages kept in the prefix cache."""
    pages_total: int
    """Pages of the KV cache."""
    prefix_queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found in the prefix cache."""
    preemptions: int
    """Preemptions of running requests."""
    steps: int
    """Engine steps; a multi-step decode counts as one."""
    step_seconds: float
    """Seconds spent in steps."""
    prompt_tokens: int
    """Prompt tokens processed, including cached ones."""
    generated_tokens: int
    """Generated tokens."""
    drafted_tokens: int
    """Draft tokens of finished requests."""
    accepted_tokens: int
    """Accepted draft tokens of finished requests."""
    finished: dict[str, int]
    """Finished requests by reason."""

"""Statistics of a running engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Gauges and counters of a running engine; counters start at 0 with it."""

    running: int = 0
    """Running requests, which hold pages."""
    waiting: int = 0
    """Waiting requests."""
    pages_used: int = 0
    """Pages held by requests."""
    pages_cached: int = 0
    """Unreferenced pages kept in the prefix cache."""
    pages_total: int = 0
    """Pages of the KV cache."""
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    """Preemptions of running requests."""
    steps: int = 0
    """Engine steps; a multi-step decode counts as one."""
    step_seconds: float = 0.0
    """Seconds spent in steps."""
    prompt_tokens: int = 0
    """Prompt tokens processed, including cached ones."""
    generated_tokens: int = 0
    """Generated tokens."""
    drafted_tokens: int = 0
    """Draft tokens of finished requests."""
    accepted_tokens: int = 0
    """Accepted draft tokens of finished requests."""
    finished: Counter[str] = field(default_factory=Counter)
    """Finished requests by reason."""

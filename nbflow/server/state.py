"""What a running server knows; every endpoint gets it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from nbflow.server.config import ServerConfig
from nbflow.server.metrics import Metrics, Stats
from nbflow.server.served_model import Models
from nbflow.server.stream import LoopBridge
from nbflow.server.workers import Workers


class ServerState:
    """Configuration, models and numbers of a server."""

    def __init__(self, config: ServerConfig, models: Models, mailbox: LoopBridge) -> None:
        self.config = config
        self.models = models
        self.mailbox = mailbox
        self.workers = Workers()
        self.metrics = Metrics(self.engine_stats)
        self.started = time.time()
        self.draining = False
        """Whether the server finishes what it has and takes nothing new."""
        self.n_requests = 0
        """Requests that are worked on."""

    def engine_stats(self) -> dict[str, Stats]:
        """Return the numbers of every model's engine."""
        return {served.name: _stats(served.engine.stats()) for served in self.models.all}


def _stats(stats: Any) -> Mapping[str, float]:
    """Return an engine's numbers under the names of `nbflow.server.metrics`."""
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.pages_used / max(1, stats.pages_total),
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "num_preemptions": stats.preemptions,
        "spec_decode_num_draft_tokens": stats.drafted_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
        "iteration_steps": stats.steps,
        "iteration_seconds": stats.step_seconds,
    }


async def state_of(request: Request) -> ServerState:
    """Return the state of the server that a request came to; a FastAPI dependency.

    It is a coroutine so that FastAPI does not call it in a thread.
    """
    state: ServerState = request.app.state.server
    return state


def note(request: Request, **facts: Any) -> None:
    """Add facts to the request's line in the log."""
    request.state.log.update(facts)

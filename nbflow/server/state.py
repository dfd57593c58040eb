"""State of a running server, a dependency of every route."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.responses import Response

from nbflow.server.config import ServerConfig
from nbflow.server.errors import ApiError, ProtocolRouter
from nbflow.server.metrics import Metrics, Stats
from nbflow.server.request_limiter import RequestLimiter
from nbflow.server.served_model import Models
from nbflow.server.stream import LoopBridge
from nbflow.server.workers import Workers


class ServerState:
    """Configuration, models and metrics of a server."""

    def __init__(self, config: ServerConfig, models: Models, bridge: LoopBridge) -> None:
        self.config = config
        self.models = models
        self.bridge = bridge
        self.workers = Workers()
        self.metrics = Metrics(self.engine_stats)
        self.started = time.time()
        self.draining = False
        """True while the server finishes accepted requests and refuses new ones."""
        self.limiter = RequestLimiter(config.limits.requests, config.limits.queue)
        self.protocols: Sequence[ProtocolRouter] = ()
        """Other protocols, which answer errors in their own form."""

    @property
    def n_requests(self) -> int:
        """POST and PUT requests in flight."""
        return self.limiter.n_running

    def refusal(self, path: str, error: ApiError) -> Response:
        """Return the response of an error in the protocol of a path."""
        for protocol in self.protocols:
            if protocol.answers(path):
                return protocol.refusal(error)
        return error.response()

    def engine_stats(self) -> dict[str, Stats]:
        """Return the statistics of every model's engine."""
        return {served.name: _stats(served.engine.stats()) for served in self.models.all}


def _stats(stats: Any) -> Mapping[str, float]:
    """Return an engine's statistics under the names of `nbflow.server.metrics`."""
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
    """Return the server state of a request; a FastAPI dependency.

    FastAPI would run a plain function in a thread.
    """
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(state_of)]
"""Parameter of a route: the server's state."""


def note(request: Request, **facts: Any) -> None:
    """Add fields to the request's log line."""
    request.state.log.update(facts)

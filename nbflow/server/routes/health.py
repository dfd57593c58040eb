"""Health, readiness, metrics and version."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import nbflow
from nbflow.server.errors import json_response
from nbflow.server.state import State

router = APIRouter(tags=["server"])


@router.get("/health", summary="Liveness of the engines")
async def health(state: State) -> Response:
    """Return 200 while the engines run, also while draining."""
    dead = [served.name for served in state.models.all if not served.engine.alive]
    if dead:
        return json_response({"status": "failed", "models": dead}, 503)
    return json_response({"status": "draining" if state.draining else "ok"})


@router.get("/ready", summary="Readiness for new requests")
async def ready(state: State) -> Response:
    """Return 200 if the server accepts new requests."""
    if state.draining:
        return json_response({"status": "draining"}, 503)
    return await health(state)


@router.get("/metrics", summary="Metrics in Prometheus text format", response_class=Response)
async def metrics(state: State) -> Response:
    """Return metrics in Prometheus text format."""
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/version", summary="The version")
async def version() -> Response:
    """Return the version."""
    return json_response({"version": nbflow.__version__})


@router.get("/server_info", summary="Models, limits and machine")
async def server_info(state: State) -> Response:
    """Return models, limits and machine, without API keys."""
    config = state.config
    return json_response(
        {
            "version": nbflow.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "pid": os.getpid(),
            "uptime_s": round(time.time() - state.started, 3),
            "draining": state.draining,
            "requests": state.n_requests,
            "limits": config.limits.model_dump(),
            "models": {served.name: _about(served) for served in state.models.all},
        }
    )


def _about(served: Any) -> dict[str, Any]:
    """Return a model's size, formats, partition and engine options."""
    spec, options = served.model.spec, served.options
    return {
        "spec": spec.name,
        "aliases": options.aliases,
        "max_context": spec.max_context,
        "vocab_size": spec.vocab_size,
        "weights": options.weights or "as stored",
        "kv": options.kv,
        "state": options.state,
        "activations": options.activations,
        "partition": served.model.plan.partition,
        "replicas": served.model.plan.partition.count("/") + 1,
        "threads": served.model.threads,
        "engine": options.engine.model_dump(),
        "defaults": served.defaults,
    }

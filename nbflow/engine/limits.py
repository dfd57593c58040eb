"""How much an engine takes on at a time."""

from __future__ import annotations

from dataclasses import dataclass

from nbflow.engine.interfaces import ModelRunner
from nbflow.engine.request import Request
from nbflow.engine.request_validation import check_request
from nbflow.engine.scheduler import check_width, room_for
from nbflow.options import MAX_SEQUENCES, EngineOptions
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """What an engine never exceeds."""

    max_step_tokens: int
    """Tokens in a step."""
    max_sequences: int
    """Requests that run at once."""
    max_waiting: int
    """Requests that wait."""
    max_pages: int
    """Pages of keys and values."""
    page_size: int
    """Tokens of a page."""
    prefix_cache: bool
    """Whether pages are kept for requests that begin alike."""

    @property
    def max_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.max_pages * self.page_size


def choose_limits(model: ModelRunner, options: EngineOptions) -> Limits:
    """Return the limits for a model, the same on each of its ranks, which all must call it."""
    kv_bytes = options.kv_bytes
    steps = options.max_step_tokens or model.workers[0].max_step_tokens
    sequences = min(options.max_sequences or MAX_SEQUENCES, steps)
    page_size = model.workers[0].storage.page_size
    ranks = model.gather("page_memory")
    hosts = [r["host"] for r in ranks]  # ranks of one machine share what it has
    room = min(
        (kv_bytes or r["available_bytes"] // (2 * hosts.count(r["host"]))) // r["page_bytes"]
        for r in ranks
    )
    if room < 1:
        most = max(r["page_bytes"] for r in ranks)
        raise UsageError(
            f"kv_bytes must be at least {most}, the size of one page of {page_size} tokens, got "
            f"{kv_bytes}"
            if kv_bytes
            else f"there is not enough memory for a page of {most} bytes of keys and values"
        )
    if kv_bytes is None:
        room = min(room, sequences * -(-model.spec.max_context // page_size))
    return Limits(steps, sequences, options.max_waiting, room, page_size, options.prefix_cache)


def fit(request: Request, spec: ModelSpec, limits: Limits) -> None:
    """Shorten a request to what the key/value cache holds.

    Raises
    ------
    UsageError
        If it cannot run even alone, a field is out of range, or it has been submitted before.
    """
    if request.id >= 0 or request.finish_reason is not None:
        raise UsageError("a request is submitted once; make another one")
    check_request(spec, request)
    check_width(request, limits.max_sequences)
    most = limits.max_tokens
    if len(request.prompt) > most:
        raise UsageError(
            f"the prompt has {len(request.prompt)} tokens, but the key/value cache holds "
            f"{most}; shorten it, or give the cache more memory (kv_bytes)"
        )
    room = room_for(request, limits.max_pages, limits.page_size)
    if room < 1:
        raise UsageError(
            f"the key/value cache holds {most} tokens, too few for {request.width} "
            f"continuations of a prompt of {len(request.prompt)}; follow fewer, or give the "
            "cache more memory (kv_bytes)"
        )
    request.max_tokens = min(request.max_tokens, room)

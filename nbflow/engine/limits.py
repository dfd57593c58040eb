"""Admission limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbflow.engine.interfaces import ModelInfo, ModelRunner
from nbflow.engine.request import Request
from nbflow.engine.request_validation import check_request
from nbflow.engine.scheduler import check_n_sequences, max_new_tokens_for
from nbflow.kv_cache.block_table import UNLIMITED
from nbflow.options import MAX_SEQUENCES, EngineOptions
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Limits of an engine."""

    max_step_tokens: int
    """Most tokens in a step."""
    max_sequences: int
    """Most sequences that run at once."""
    max_waiting: int
    """Most waiting requests."""
    max_pages: int
    """Pages of the KV cache."""
    page_size: int
    """Tokens per page."""
    prefix_cache: bool
    """True to share prompt pages between requests."""
    prefix_states: int
    """Recurrent states kept at page borders of prompts."""

    @property
    def max_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.max_pages * self.page_size


def choose_limits(model: ModelRunner, options: EngineOptions) -> Limits:
    """Return the limits for a model; collective, with the same result on every rank."""
    kv_bytes = options.kv_bytes
    steps = options.max_step_tokens or model.workers[0].max_step_tokens
    sequences = min(options.max_sequences or MAX_SEQUENCES, steps)
    page_size = model.workers[0].storage.page_size
    ranks = model.gather("page_memory")
    hosts = [r["host"] for r in ranks]  # ranks of one machine share its memory
    all_pages = sequences * -(-model.spec.max_context // page_size)
    is_recurrent = any(r["state_bytes"] for r in ranks)
    kept = options.n_prefix_states if is_recurrent else 0
    n_rows = sequences + kept
    room = min(
        _n_pages(kv_bytes or r["available_bytes"] // (2 * hosts.count(r["host"])), n_rows, r)
        for r in ranks
    )
    if room < 1:
        most = max(r["page_bytes"] + n_rows * r["state_bytes"] for r in ranks)
        what = f"one page of {page_size} tokens"
        if is_recurrent:
            what += f" and the recurrent states of {sequences} sequences (max_sequences)"
        if kept:
            what += f" and {kept} kept ones (prefix_states)"
        raise UsageError(
            f"kv_bytes must be at least {most}, the size of {what}, got {kv_bytes}"
            if kv_bytes
            else f"there is not enough memory for {what}, {most} bytes"
        )
    if kv_bytes is None or not any(r["page_bytes"] for r in ranks):
        room = min(room, all_pages)
    shares = options.prefix_cache
    return Limits(steps, sequences, options.max_waiting, room, page_size, shares, kept)


def _n_pages(kv_bytes: int, n_states: int, rank: dict[str, Any]) -> int:
    """Return the pages of a rank for which the recurrent states leave memory."""
    left = kv_bytes - n_states * int(rank["state_bytes"])
    if rank["page_bytes"]:
        return left // int(rank["page_bytes"])
    return UNLIMITED if left >= 0 else 0  # no layer with keys and values


def fit(request: Request, model: ModelInfo, limits: Limits) -> None:
    """Reduce the `max_tokens` of a request to the capacity of the KV cache.

    Raises
    ------
    UsageError
        If it does not fit alone, a field is out of range, it was submitted before, or it has stop
        texts and the model no tokenizer.
    """
    if request.id >= 0 or request.finish_reason is not None:
        raise UsageError("this request was submitted before; create a new one")
    check_request(model.spec, request)
    if request.stop_texts:
        _ = model.tokenizer  # raises without one
    check_n_sequences(request, limits.max_sequences)
    most = limits.max_tokens
    if len(request.prompt) > most:
        raise UsageError(
            f"the prompt has {len(request.prompt)} tokens, but the key/value cache holds "
            f"{most}; shorten it, or give the cache more memory (kv_bytes)"
        )
    room = max_new_tokens_for(request, limits.max_pages, limits.page_size)
    if room < 1:
        raise UsageError(
            f"the key/value cache holds {most} tokens, too few for {request.n_sequences} "
            f"continuations of a prompt of {len(request.prompt)}; follow fewer, or give the "
            "cache more memory (kv_bytes)"
        )
    request.max_tokens = min(request.max_tokens, room)

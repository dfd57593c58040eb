"""Inputs of a worker's forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from nbflow.engine.interfaces import StepRunner
from nbflow.executor.step import Step, make_step


def worker_step(
    worker: StepRunner,
    sequences: Sequence[int],
    tokens: Sequence[Sequence[int]],
    logit_rows: Sequence[int],
    types: Sequence[int] | None = None,
    n_logits: int | None = None,
) -> Step:
    """Extend sequences of a worker by new tokens and return the step that computes them.

    Hidden states are computed for `logit_rows`, logits for the first `n_logits` of them (all by
    default); parameters as of `nbflow.executor.make_step`.
    """
    cross = None if worker.cross_attention is None else worker.cross_attention.table
    return make_step(
        worker.table, sequences, tokens, logit_rows, types, cross,
        short_context=worker.spec.short_context, n_logits=n_logits,
    )  # fmt: skip

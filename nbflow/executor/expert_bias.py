"""Biases of an `experts` op: of the router's choice and of the experts' matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

from nbflow.program.records import Op
from nbflow.spec.model_spec import ModelSpec


class ExpertBiases(NamedTuple):
    """Biases of the experts of one op; None where the model has none."""

    choice: Any = None
    """float32 (experts of the whole model,): added to the router's scores for the choice."""
    gate: Any = None
    """float32 (n, F)."""
    up: Any = None
    """float32 (n, F)."""
    down: Any = None
    """float32 (n, E)."""


def expert_biases(op: Op, spec: ModelSpec, bias: Any) -> ExpertBiases:
    """Split the biases of an `experts` op, concatenated as in `WeightLoader.bias`."""
    moe = spec.moe
    assert moe is not None
    if not op.attrs.get("biased"):
        return ExpertBiases(bias)
    first, end = op.attrs["experts"]
    n, at = end - first, moe.n_experts if moe.router_bias else 0
    parts = []
    for width in (moe.expert_size, moe.expert_size, spec.hidden_size):
        parts.append(bias[at : at + n * width].reshape(n, width))
        at += n * width
    return ExpertBiases(bias[: moe.n_experts] if moe.router_bias else None, *parts)

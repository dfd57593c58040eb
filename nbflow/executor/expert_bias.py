"""Biases of an `experts` op, and the arguments of the kernel that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbflow.program.records import Op, expert_parts
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
    scale: Any = None
    """float32 (experts of the whole model,): factors of the router's weights."""


def moe_arguments(op: Op, matrices: Sequence[Any], bias: ExpertBiases) -> dict[str, Any]:
    """Return the arguments of `nbflow_kernels.fused_moe` that an op and its weights fix."""
    gated = op.attrs.get("gated", True)
    *first, downs = expert_parts(op, matrices)
    return {
        "gate_up": first[0],
        "up": first[1] if gated else None,
        "down": downs,
        "activation": op.attrs["activation"],
        "gated": gated,
        "weigh_inputs": op.attrs.get("weigh_inputs", False),
        "gate_up_bias": bias.gate,
        "up_bias": bias.up,
        "down_bias": bias.down,
    }


def expert_biases(op: Op, spec: ModelSpec, bias: Any) -> ExpertBiases:
    """Split the biases of an `experts` op, concatenated as in `WeightLoader.bias`."""
    moe = spec.moe
    assert moe is not None
    if op.attrs.get("scaled"):
        return ExpertBiases(scale=bias)
    if not op.attrs.get("biased"):
        return ExpertBiases(bias)
    first, end = op.attrs["experts"]
    n, at = end - first, moe.n_experts if moe.router_bias else 0
    parts = []
    for width in (moe.expert_size, moe.expert_size, moe.latent_size or spec.hidden_size):
        parts.append(bias[at : at + n * width].reshape(n, width))
        at += n * width
    return ExpertBiases(bias[: moe.n_experts] if moe.router_bias else None, *parts)

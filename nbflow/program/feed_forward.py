"""Ops of feed-forward networks: dense, mixtures of experts, and retrieved experts."""

from __future__ import annotations

import math
from typing import Any

from nbflow.program.layer_ops import add, ffn_name, linear, scale
from nbflow.program.records import Op, Operand
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.tensor_names import EXPERT_BIASES, XIELU


def feed_forward(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the feed-forward network or mixture of experts, including the residual sum."""
    if not spec.has_experts(i):
        ops = _dense(spec, i, source)
    elif spec.has_dense_network(i):
        ops = _experts_beside_dense(spec, i, source)
    else:
        ops = _experts(spec, i, source)
    factor = spec.moe.output_scale if spec.moe is not None and spec.has_experts(i) else 1.0
    return [*ops, add(spec, "x", "o", i, factor * spec.ffn_output_scale)]


def _dense(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the dense feed-forward network; it writes o."""
    attrs, size = {"activation": spec.activation_name}, spec.ffn_size(i)
    gate, up, f = (ffn_name(spec, name, size) for name in ("gate", "up", "f"))
    ops = [linear(spec, i, "ffn.up", source, up)]
    if spec.gated:
        ops.insert(0, linear(spec, i, "ffn.gate", source, gate))
        ops += scale(gate, gate, i, spec.ffn_gate_scale)
        ops += _sparsity(spec, i, gate, size)
        ops.append(Op("gate", f, (gate, up), layer=i, attrs=attrs))
    else:
        names = XIELU if spec.activation == "xielu" else ()
        numbers = tuple(Operand(f"layers.{i}.{name}.weight") for name in names)
        ops.append(Op("activation", f, (up,), numbers, layer=i, attrs=attrs))
    return [*ops, linear(spec, i, "ffn.down", f, "o"), *_retrieval(spec, i, source)]


def _retrieval(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return experts of one row each, whose weighted sum is added to o."""
    if not spec.retrieved_experts:
        return []
    tables = tuple(Operand(f"layers.{i}.retrieval.{name}.weight") for name in ("down", "up"))
    attrs = {
        "top_k": spec.retrieved_per_token,
        "activation": spec.activation_name,
        "experts": (0, spec.retrieved_experts),
    }
    return [
        linear(spec, i, "retrieval.router", source, "rk"),
        Op("retrieve", "ro", (source, "rk"), tables, layer=i, attrs=attrs),
        add(spec, "o", "ro", i),
    ]


def _sparsity(spec: ModelSpec, i: int, gate: str, size: int) -> list[Op]:
    """Return the cut of gates below a quantile of their distribution."""
    cut = spec.cut_of(i)
    if cut == -math.inf:
        return []
    attrs = {"width": size, "deviations": cut}
    return [
        Op("row_moments", "gm", (gate,), layer=i),
        Op("gaussian_topk", gate, (gate, "gm"), layer=i, attrs=attrs),
    ]


def _experts_beside_dense(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return a dense network and experts, each with its own norms; their sum is written to o."""
    attrs = {"norm": "rms", "eps": spec.norm_eps}

    def normed(name: str, source: str, out: str) -> Op:
        weight = (Operand(f"layers.{i}.{name}.weight"),)
        return Op("norm", out, (source,), weight, layer=i, attrs=attrs)

    return [
        *_dense(spec, i, source),
        normed("dense_post_norm", "o", "s"),
        normed("router_norm", "x", "h2"),
        *scale("h2", "h2", i, spec.hidden_size**-0.5),
        normed("experts_norm", "x", "h"),
        *_experts(spec, i, "h", "h2"),
        normed("experts_post_norm", "o", "o"),
        add(spec, "o", "s", i),
    ]


def _experts(spec: ModelSpec, i: int, source: str, routed: str = "") -> list[Op]:
    """Return a mixture of experts with its shared expert; it writes o.

    `routed` is the input of the router, by default that of the experts.
    """
    moe = spec.moe
    assert moe is not None
    prefix = f"layers.{i}"
    matrices = tuple(
        Operand(f"{prefix}.moe.{j}.{part}.weight")
        for part in (("gate", "up", "down") if spec.gated else ("up", "down"))
        for j in range(moe.n_experts)
    )
    bias: tuple[Operand, ...] = ()
    if moe.router_bias:
        bias = (Operand(f"{prefix}.router.bias"),)
    attrs: dict[str, Any] = {"activation": spec.activation_name, "experts": (0, moe.n_experts)}
    if "moe.down" in spec.biases:
        bias += tuple(Operand(f"{prefix}.{name}.bias") for name in EXPERT_BIASES)
        attrs["biased"] = True
    if moe.weighs_inputs:
        attrs["weigh_inputs"] = True
    if not spec.gated:
        attrs["gated"] = False
    if moe.beside_dense:
        bias += (Operand(f"{prefix}.expert_scale.weight"),)
        attrs["scaled"] = True
    ops = [linear(spec, i, "router", routed or source, "router")]
    if moe.latent_size:
        ops += [
            linear(spec, i, "experts.in", source, "ex"),
            Op("experts", "eo", ("ex", "router"), matrices, bias, i, attrs),
            linear(spec, i, "experts.out", "eo", "o"),
        ]
    else:
        ops.append(Op("experts", "o", (source, "router"), matrices, bias, i, attrs))
    return [*ops, *_shared_expert(spec, i, source)] if moe.shared_size else ops


def _shared_expert(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the expert of all tokens, whose result is added to o."""
    assert spec.moe is not None
    activation = {"activation": spec.activation_name}
    ops = [linear(spec, i, "shared.up", source, "sup")]
    if spec.gated:
        ops = [linear(spec, i, "shared.gate", source, "sgate"), *ops]
        ops.append(Op("gate", "sf", ("sgate", "sup"), layer=i, attrs=activation))
    else:
        ops.append(Op("activation", "sf", ("sup",), layer=i, attrs=activation))
    ops.append(linear(spec, i, "shared.down", "sf", "s"))
    if spec.moe.shared_gate:
        gate = (Operand(f"layers.{i}.shared_gate.weight"),)
        ops.append(Op("scale_rows", "s", (source,), gate, layer=i))
    return [*ops, add(spec, "o", "s", i)]

"""Op records that all kinds of sublayers use."""

from __future__ import annotations

from typing import Any

from nbflow.program.records import Op, Operand
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.plugin_ops import OPS


def norm(spec: ModelSpec, name: str, source: str, out: str, layer: int | None) -> Op:
    """Return a norm of the model's kind."""
    weights = []
    if spec.norm_weight:
        weights.append(Operand(f"{name}.weight"))
        if spec.norm == "layer" and spec.norm_bias:
            weights.append(Operand(f"{name}.bias"))
    attrs: dict[str, Any] = {"norm": spec.norm, "eps": spec.norm_eps}
    if spec.norm_offset:
        attrs["offset"] = spec.norm_offset
    return Op("norm", out, (source,), tuple(weights), layer=layer, attrs=attrs)


def linear(spec: ModelSpec, i: int, name: str, source: str, out: str) -> Op:
    """Return the product with a matrix of layer `i`, and its bias if it has one."""
    prefix = f"layers.{i}.{name}"
    bias = (Operand(f"{prefix}.bias"),) if name in spec.biases else ()
    return Op("linear", out, (source,), (Operand(f"{prefix}.weight"),), bias, i)


def add(spec: ModelSpec, out: str, source: str, layer: int | None, scale: float = 1.0) -> Op:
    """Return ``out += scale * source``; a layer's output also has `ModelSpec.residual_scale`."""
    scale *= spec.residual_scale if out == "x" and layer is not None else 1.0
    attrs = {} if scale == 1.0 else {"scale": scale}
    return Op("add", out, (source,), layer=layer, attrs=attrs)


def plugin_op(spec: ModelSpec, i: int, name: str, part: str, source: str) -> list[Op]:
    """Return an op of a plugin as a sublayer, including the residual sum."""
    op = OPS[name]
    weights = tuple(Operand(f"layers.{i}.{part}.{weight}.weight") for weight in op.weights)
    state = op.state_shape(spec)
    attrs = {"op": name} | ({} if state is None else {"state": state})
    return [Op("plugin", "o", (source,), weights, layer=i, attrs=attrs), add(spec, "x", "o", i)]


def scale(out: str, source: str, layer: int, factor: float) -> list[Op]:
    """Return ``out = factor * source``; no op if both are the same buffer and the factor is 1."""
    if out == source and factor == 1.0:
        return []
    return [Op("scale", out, (source,), layer=layer, attrs={"scale": factor})]


def clip(spec: ModelSpec, i: int, names: tuple[str, ...]) -> list[Op]:
    """Return the limit of queries, keys and values, if the model has one."""
    attrs = {"limit": spec.qkv_clip}
    return [] if not spec.qkv_clip else [Op("clip", names[0], names, layer=i, attrs=attrs)]


def gate(out: str, gate: str, up: str, layer: int, activation: str) -> Op:
    """Return ``out = activation(gate) * up``."""
    return Op("gate", out, (gate, up), layer=layer, attrs={"activation": activation})


def columns_of(out: str, source: str, name: str, layer: int | None) -> Op:
    """Return ``out = source * weight``, with a weight for each column or one for all."""
    return Op("scale_columns", out, (source,), (Operand(f"{name}.weight"),), layer=layer)


def qkv_names(spec: ModelSpec, i: int) -> tuple[str, str, str]:
    """Return the buffers of queries, keys and values of a layer."""
    wide = "w" if spec.is_local(i) else ""
    number = i if i in spec.kv_sources else ""  # later layers, and stages, read them
    return f"q{wide}{number}", f"k{wide}{number}", f"v{wide}{number}"


def ffn_name(spec: ModelSpec, name: str, size: int) -> str:
    """Return the buffer of a feed-forward network of this width."""
    return name if size == spec.intermediate_size else f"{name}{size}"

"""From a specification to the program of the whole model on one rank, nothing fused."""

from __future__ import annotations

from nbflow.program.records import Buffer, Op, Operand, Program
from nbflow.spec.model_spec import ModelSpec


def build(spec: ModelSpec) -> Program:
    """Return the unfused program of the whole model."""
    q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    buffers = {
        "x": Buffer(spec.hidden_size),
        "h": Buffer(spec.hidden_size),
        "q": Buffer(q_width),
        "k": Buffer(kv_width),
        "v": Buffer(kv_width),
        "a": Buffer(q_width),
        "o": Buffer(spec.hidden_size),
        "up": Buffer(spec.intermediate_size),
        "f": Buffer(spec.intermediate_size),
        "y": Buffer(spec.hidden_size, "logits"),
        "logits": Buffer(spec.vocab_size, "logits"),
    }
    if spec.gated:
        buffers["gate"] = Buffer(spec.intermediate_size)
    ops = [Op("embedding", "x", weights=(Operand("embed.weight"),))]
    for i in range(spec.n_layers):
        ops += _attention(spec, i) + _feed_forward(spec, i)
    head = "embed.weight" if spec.tied_head else "head.weight"
    ops += [
        Op("take_rows", "y", ("x",)),
        _norm(spec, "final_norm", "y", "y", None),
        Op("linear", "logits", ("y",), (Operand(head),)),
    ]
    return Program(
        spec, tuple(ops), buffers, spec.n_heads, spec.n_kv_heads, tuple(range(spec.n_layers))
    )


def _norm(spec: ModelSpec, name: str, source: str, out: str, layer: int | None) -> Op:
    weights = [Operand(f"{name}.weight")]
    if spec.norm == "layer":
        weights.append(Operand(f"{name}.bias"))
    attrs = {"norm": spec.norm, "eps": spec.norm_eps}
    return Op("norm", out, (source,), tuple(weights), layer=layer, attrs=attrs)


def _linear(spec: ModelSpec, i: int, name: str, source: str, out: str) -> Op:
    prefix = f"layers.{i}.{name}"
    bias = (Operand(f"{prefix}.bias"),) if name in spec.biases else ()
    return Op("linear", out, (source,), (Operand(f"{prefix}.weight"),), bias, i)


def _attention(spec: ModelSpec, i: int) -> list[Op]:
    ops = [_norm(spec, f"layers.{i}.attn_norm", "x", "h", i)]
    ops += [_linear(spec, i, f"attn.{name}", "h", name) for name in "qkv"]
    if spec.rope.dim:
        ops.append(Op("rope", "q", ("q", "k"), layer=i))
    return [
        *ops,
        Op("append_kv", "kv", ("k", "v"), layer=i),
        Op("attention", "a", ("q",), layer=i),
        _linear(spec, i, "attn.o", "a", "o"),
        Op("add", "x", ("o",), layer=i),
    ]


def _feed_forward(spec: ModelSpec, i: int) -> list[Op]:
    attrs = {"activation": spec.activation}
    ops = [
        _norm(spec, f"layers.{i}.ffn_norm", "x", "h", i),
        _linear(spec, i, "ffn.up", "h", "up"),
    ]
    if spec.gated:
        ops.insert(1, _linear(spec, i, "ffn.gate", "h", "gate"))
        ops.append(Op("gate", "f", ("gate", "up"), layer=i, attrs=attrs))
    else:
        ops.append(Op("activation", "f", ("up",), layer=i, attrs=attrs))
    ops += [_linear(spec, i, "ffn.down", "f", "o"), Op("add", "x", ("o",), layer=i)]
    return ops

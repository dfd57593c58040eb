"""Build the unfused program of a whole model from its specification."""

from __future__ import annotations

from collections.abc import Callable
from string import digits

from nbflow.program.attention import attention, cross_attention
from nbflow.program.feed_forward import feed_forward
from nbflow.program.layer_ops import (
    add,
    columns_of,
    ffn_name,
    linear,
    norm,
    plugin_op,
    qkv_names,
    scale,
)
from nbflow.program.records import Buffer, Op, Operand, Program
from nbflow.program.recurrent import (
    columns_of_one,
    gated_delta_rule,
    lightning_attention,
    mamba1,
    mamba2,
    short_conv,
)
from nbflow.program.recurrent import widths as recurrent_widths
from nbflow.program.streams import (
    after_laurel,
    correct,
    first_streams,
    join_streams,
    laurel,
    layer_embed,
    layer_embeddings,
    layer_end,
    predict,
)
from nbflow.program.streams import buffers as stream_buffers
from nbflow.spec.layer_specs import BIAS_COLUMNS
from nbflow.spec.model_spec import ModelSpec

Sublayer = Callable[[ModelSpec, int, str], list[Op]]
"""Function of model, layer and input buffer that returns a sublayer."""


def build(spec: ModelSpec) -> Program:
    """Return the unfused program of a whole model."""
    ops = _embedding(spec)
    for i in range(spec.n_layers):
        ops += _layer(spec, i)
    ops += _head(spec)
    return Program(
        spec,
        tuple(ops),
        _buffers(spec, ops),
        spec.n_heads,
        spec.n_kv_heads,
        tuple(range(spec.n_layers)),
    )


def build_cross_kv(spec: ModelSpec) -> Program:
    """Return the program that computes cross-attention keys and values from encoder states."""
    assert spec.encoder is not None
    ops = [Op("input", "m")]
    for i in range(spec.n_layers):
        ops += [
            linear(spec, i, "cross.k", "m", "k"),
            linear(spec, i, "cross.v", "m", "v"),
            Op("append_kv", "kv", ("k", "v"), layer=i),
        ]
    width = spec.n_kv_heads * spec.head_dim
    buffers = {"m": Buffer(spec.encoder.hidden_size), "k": Buffer(width), "v": Buffer(width)}
    layers = tuple(range(spec.n_layers))
    return Program(spec, tuple(ops), buffers, spec.n_heads, spec.n_kv_heads, layers)


def _buffers(spec: ModelSpec, ops: list[Op]) -> dict[str, Buffer]:
    q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    E, FF = spec.hidden_size, spec.intermediate_size
    widths = {
        "x": E, "h": E, "h2": E, "e": spec.embed_width, "p": E, "q": q_width, "k": kv_width,
        "v": kv_width, "a": q_width, "as": E, "o": E, "gate": FF, "up": FF, "f": FF,
    }  # fmt: skip
    if spec.latent is not None:
        C, H = spec.latent.kv_rank, spec.n_heads
        widths |= {"qa": spec.latent.q_rank, "latent": spec.cached_dim, "ql": H * spec.cached_dim}
        widths |= {"al": H * C, "a": H * spec.value_dim}
    if spec.indexer is not None:
        H, D = spec.indexer.heads, spec.indexer.dim
        widths |= {"iq": H * D, "ik": D, "iw": H, "sel": spec.indexer.top_k}
    if spec.latent is None:
        widths |= {"v": spec.n_kv_heads * spec.value_dim, "a": spec.n_heads * spec.value_dim}
    if spec.local_heads is not None:
        H, heads = spec.n_heads, spec.local_heads
        D, Dv, G = heads.key_dim, heads.value_dim, heads.n_kv_heads
        widths |= {"qw": H * D, "kw": G * D, "vw": G * Dv, "aw": H * Dv, "agw": H * Dv}
    if spec.output_gate:
        widths["ag"] = spec.n_heads * spec.value_dim
    widths |= recurrent_widths(spec)
    if spec.moe is not None:
        S = spec.moe.shared_size
        widths |= {"router": spec.moe.n_experts, "sgate": S, "sup": S, "sf": S, "s": E}
        widths |= dict.fromkeys(("ex", "eo"), spec.moe.latent_size)
    outputs = {"z": spec.embed_width, "m": E, "logits": spec.vocab_size}
    buffers = {name: Buffer(width) for name, width in widths.items()}
    buffers |= {name: Buffer(width, "logits") for name, width in outputs.items()}
    buffers["y"] = Buffer(E, "states")
    buffers |= columns_of_one(spec) | stream_buffers(spec)
    if spec.dynamic_mask_keys:
        width = spec.head_dim + BIAS_COLUMNS
        of_keys = Buffer(spec.n_kv_heads * width)
        buffers |= {"qe": Buffer(spec.n_heads * width), "ke": of_keys}
        buffers["kb"] = Buffer(spec.n_kv_heads)
    for i in spec.kv_sources:
        buffers |= {name: buffers[name.rstrip(digits)] for name in qkv_names(spec, i)}
    for size in {spec.ffn_size(i) for i in range(spec.n_layers)}:
        buffers |= {ffn_name(spec, name, size): Buffer(size) for name in ("gate", "up", "f")}
    if spec.retrieved_experts:
        buffers |= {"rk": Buffer(2 * spec.retrieval_keys), "ro": Buffer(E)}
    if spec.activation_sparsity or spec.activation_cuts:
        buffers["gm"] = Buffer(2)
    used = {name for op in ops for name in (op.out, *op.inputs)}
    return {name: buffer for name, buffer in buffers.items() if name in used}


# ---- embedding ------------------------------------------------------------------------------


def _embedding(spec: ModelSpec) -> list[Op]:
    """Return the ops that compute x from token ids, token types and positions."""
    inner = "x" if spec.embed_width == spec.hidden_size else "e"
    attrs = {} if spec.embed_scale == 1.0 else {"scale": spec.embed_scale}
    ops = [Op("embedding", inner, weights=(Operand("embed.weight"),), attrs=attrs)]
    if inner == "e":
        ops.append(Op("linear", "x", ("e",), (Operand("embed.in.weight"),)))
    if spec.type_vocab_size:
        table = (Operand("types.weight"),)
        ops.append(Op("embedding", "p", weights=table, attrs={"index": "types"}))
        ops.append(add(spec, "x", "p", None))
    if spec.position in ("learned", "sinusoidal"):
        first = spec.position_offset
        rows = (first, first + spec.max_context)
        learned = (Operand("positions.weight", rows=rows),)
        weights = learned if spec.position == "learned" else ()
        ops.append(Op("embedding", "p", weights=weights, attrs={"index": "positions"}))
        ops.append(add(spec, "x", "p", None))
    if spec.embed_norm:
        ops.append(norm(spec, "embed_norm", "x", "x", None))
    return [*ops, *layer_embeddings(spec), *first_streams(spec)]


# ---- layers ---------------------------------------------------------------------------------


def _layer(spec: ModelSpec, i: int) -> list[Op]:
    """Return one layer: attention and feed-forward network with norms and residuals."""
    if spec.residual == "parallel":
        before = norm(spec, f"layers.{i}.attn_norm", "x", "h", i)
        return [before, *attention(spec, i, "h"), *feed_forward(spec, i, "h")]
    if spec.residual == "parallel_two_norms":
        norms = [
            norm(spec, f"layers.{i}.attn_norm", "x", "h", i),
            norm(spec, f"layers.{i}.ffn_norm", "x", "h2", i),
        ]
        return [*norms, *attention(spec, i, "h"), *feed_forward(spec, i, "h2")]
    ops = predict(spec, i)
    kind, place = spec.kind_of(i), spec.norm_place_of(i)
    sublayers: dict[str, Sublayer] = {} if kind.mixer == ("none",) else {"attn": _mix}
    if kind.op is not None:
        sublayers["attn"] = _plugin_op(kind.op, "op")
    if spec.encoder is not None:
        sublayers["cross"] = cross_attention
    if kind.feed_forward:
        sublayers["ffn"] = feed_forward
    if kind.feed_forward_op is not None:
        sublayers["ffn"] = _plugin_op(kind.feed_forward_op, "ffn_op")
    for name, sublayer in sublayers.items():
        source = "x"
        if place in ("pre", "sandwich", "stream"):
            source = "x" if place == "stream" else "h"
            ops.append(norm(spec, f"layers.{i}.{name}_norm", "x", source, i))
        inner = sublayer(spec, i, source)
        inner[-1:-1] = scale("x", "x", i, _residual_scale(spec, i, name))
        if spec.residual_weights:
            inner.insert(-1, columns_of("x", "x", f"layers.{i}.{name}_residual", i))
        if place in ("sandwich", "output"):
            inner.insert(-1, norm(spec, f"layers.{i}.{name}_post_norm", "o", "o", i))
        if name == "attn":
            inner = [*laurel(spec, i, source), *inner, *after_laurel(spec, i)]
        ops += inner
        if place == "post":
            ops.append(norm(spec, f"layers.{i}.{name}_norm", "x", "x", i))
    return [*ops, *correct(spec, i), *layer_embed(spec, i), *layer_end(spec, i)]


def _plugin_op(name: str, part: str) -> Sublayer:
    """Return the function that makes a sublayer of a plugin's op."""
    return lambda spec, i, source: plugin_op(spec, i, name, part, source)


def _residual_scale(spec: ModelSpec, i: int, sublayer: str) -> float:
    """Return the factor of x when the output of a sublayer is added."""
    if sublayer == "ffn":
        return spec.ffn_residual_scale
    if sublayer == "attn" and spec.kind_of(i).mixer == ("lightning_attention",):
        return spec.lightning_residual_scale
    return spec.attn_residual_scale if sublayer == "attn" else 1.0


def _mix(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the mixers of a layer, each with its residual sum."""
    return [op for mixer in spec.kind_of(i).mixer for op in _MIXERS[mixer](spec, i, source)]


_MIXERS = {
    "attention": attention,
    "short_conv": short_conv,
    "gated_delta_rule": gated_delta_rule,
    "lightning_attention": lightning_attention,
    "mamba1": mamba1,
    "mamba2": mamba2,
}


# ---- head -----------------------------------------------------------------------------------


def _head(spec: ModelSpec) -> list[Op]:
    """Return the ops from the last x to the logits."""
    ops = join_streams(spec)
    if spec.final_norm:
        ops.append(norm(spec, "final_norm", "y", "y", None))
    if not spec.head:
        return ops
    source = "y"
    if spec.head_transform:
        source, weight, bias = "m", Operand("transform.weight"), Operand("transform.bias")
        ops += [
            Op("linear", "m", ("y",), (weight,), (bias,)),
            Op("activation", "m", ("m",), attrs={"activation": spec.activation_name}),
            norm(spec, "transform_norm", "m", "m", None),
        ]
    if spec.embed_width != spec.hidden_size:
        ops.append(Op("linear", "z", (source,), (Operand("embed.out.weight"),)))
        source = "z"
    name = "embed.weight" if spec.tied_head else "head.weight"
    bias_of_head = (Operand("head.bias"),) if spec.head_bias else ()
    attrs = {"normalize_rows": True} if spec.normalize_head else {}
    ops.append(Op("linear", "logits", (source,), (Operand(name),), bias_of_head, attrs=attrs))
    if spec.logits_scale != 1.0:
        ops.append(Op("scale", "logits", ("logits",), attrs={"scale": spec.logits_scale}))
    if spec.head_soft_cap is not None:
        ops.append(Op("soft_cap", "logits", ("logits",), attrs={"cap": spec.head_soft_cap}))
    return ops

"""Build the unfused program of a whole model from its specification."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from string import digits
from typing import Any

from nbflow.program.layer_ops import (
    add,
    clip,
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
from nbflow.spec.architecture import BIAS_COLUMNS, CacheSide, LatentSpec
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.tensor_names import EXPERT_BIASES, XIELU

Sublayer = Callable[[ModelSpec, int, str], list[Op]]
"""Function of model, layer and input buffer that returns a sublayer."""
INDEX_NORM_EPS = 1e-6
"""Epsilon of the norm of index keys in all published models."""


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
        return [before, *_attention(spec, i, "h"), *_feed_forward(spec, i, "h")]
    if spec.residual == "parallel_two_norms":
        norms = [
            norm(spec, f"layers.{i}.attn_norm", "x", "h", i),
            norm(spec, f"layers.{i}.ffn_norm", "x", "h2", i),
        ]
        return [*norms, *_attention(spec, i, "h"), *_feed_forward(spec, i, "h2")]
    ops = predict(spec, i)
    kind, place = spec.kind_of(i), spec.norm_place_of(i)
    sublayers: dict[str, Sublayer] = {} if kind.mixer == ("none",) else {"attn": _mix}
    if kind.op is not None:
        sublayers["attn"] = _plugin_op(kind.op, "op")
    if spec.encoder is not None:
        sublayers["cross"] = _cross_attention
    if kind.feed_forward:
        sublayers["ffn"] = _feed_forward
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


def _attention(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return attention, including the residual sum."""
    if spec.latent is not None:
        return _latent_attention(spec, spec.latent, i, source)
    ops: list[Op] = []
    q, k, v = qkv_names(spec, i)
    a, ag = (f"{name}{'w' * spec.is_local(i)}" for name in ("a", "ag"))
    source_layer = spec.kv_source(i)
    has_kv = source_layer == i
    if spec.attn_input_scale != 1.0:
        ops, source = scale("as", source, i, spec.attn_input_scale), "as"
    copied = has_kv and spec.takes_values_from_keys(i)
    names = (q, *([k] * has_kv), *([v] * (has_kv and not copied)))
    ops += (linear(spec, i, f"attn.{name[0]}", source, name) for name in names)
    ops += clip(spec, i, names)
    if copied:
        ops += scale(v, k, i, 1.0)
    pre_rope = spec.caches_pre_rope(i)
    key_bias: tuple[Operand, ...] = ()
    if pre_rope and ops[-2].out == k and spec.qk_norm == "none":  # attention adds keys' bias
        ops[-2], key_bias = replace(ops[-2], bias=()), ops[-2].bias
    gate: list[Op] = []
    if spec.output_gate:
        ops.append(linear(spec, i, "attn.gate", source, ag))
        gate = [Op("gate", a, (ag, a), layer=i, attrs={"activation": "sigmoid"})]
    rotated = (q, k) if has_kv else (q,)
    norms = [] if spec.qk_norm == "none" else [_qk_norm(spec, i, name) for name in rotated]
    rope = spec.rope_of(i)
    if spec.qk_norm_layers == "rotated" and not rope.dim:
        norms = []
    own = {"head": spec.heads_of(i).key_dim} if spec.is_local(i) else {}
    turned = (q,) if pre_rope else rotated
    turn = [Op("rope", q, turned, layer=i, attrs={"rope": rope, **own})] if rope.dim else []
    ops += [*turn, *norms] if spec.qk_norm_after_rope else [*norms, *turn]
    if spec.dynamic_mask_keys:
        ops += _dynamic_mask(spec, i)
        q, k = rotated = ("qe", "ke")
    ops += _rotation(spec, i, "keys", *rotated)
    if has_kv:
        ops += _value_norm(spec, i, v)
        ops += [*_rotation(spec, i, "values", v), Op("append_kv", "kv", (k, v), layer=i)]
    table = (Operand("position_bias.weight"),) if spec.position == "relative" else ()
    sinks = (Operand(f"layers.{i}.attn.sinks.weight"),) if spec.has_sinks(i) else ()
    attrs = _mask(spec, i)
    if pre_rope:
        attrs |= {"key_rope": rope, "key_bias": bool(key_bias)}
    if not has_kv:
        attrs |= {"kv_layer": source_layer}
    return [
        *ops,
        *_temperature(spec, i, q),
        Op("attention", a, (q,), table + key_bias, sinks, i, attrs),
        *_rotation(spec, i, "values", a),  # back: the transform is its own inverse
        *gate,
        linear(spec, i, "attn.o", a, "o"),
        add(spec, "x", "o", i, spec.attn_output_scale),
    ]


def _rotation(spec: ModelSpec, i: int, side: CacheSide, *buffers: str) -> list[Op]:
    """Return the rotation of buffers for a side of the cache, if it holds rotated vectors."""
    if (side, spec.kv_source(i)) not in spec.rotated_cache:
        return []
    attrs = {"block": spec.rotation_block(side, i)}
    return [Op("hadamard", buffers[0], buffers, layer=i, attrs=attrs)]


def _dynamic_mask(spec: ModelSpec, i: int) -> list[Op]:
    """Return the biases of the keys as a column of keys and queries, whose product adds them."""
    columns = {"columns": BIAS_COLUMNS}
    numbers = (Operand(f"layers.{i}.attn.mask_rate.weight"),)
    return [
        linear(spec, i, "attn.mask", "v", "kb"),
        Op("extend_keys", "ke", ("k", "kb"), numbers, layer=i, attrs={**columns, "first": 0}),
        Op("extend_queries", "qe", ("q",), layer=i, attrs=columns | {"number": 1 / spec.sm_scale}),
    ]


def _value_norm(spec: ModelSpec, i: int, name: str) -> list[Op]:
    """Return the norm of each head's values, without weights, if the model has it."""
    if not spec.value_norm:
        return []
    head = spec.heads_of(i).value_dim
    attrs = {"norm": "rms", "eps": spec.norm_eps, "per_head": True, "head": head}
    return [Op("norm", name, (name,), layer=i, attrs=attrs)]


def _mask(spec: ModelSpec, i: int) -> dict[str, Any]:
    """Return the attributes of attention that narrow its causal mask."""
    found = {"window": spec.window_of(i), "chunk": spec.chunk_of(i)}
    return {name: size for name, size in found.items() if size is not None}


def _temperature(spec: ModelSpec, i: int, queries: str) -> list[Op]:
    """Return the factors of the queries, behind what may be fused with the product."""
    ops = scale(queries, queries, i, 1 / (i + 1)) if spec.sm_scale_by_layer else []
    found = spec.temperature_of(i)
    if found is not None:
        attrs = {"scale": found.scale, "floor": found.floor, "offset": found.offset}
        ops.append(Op("temperature", queries, (queries,), layer=i, attrs=attrs))
    return ops


def _qk_norm(spec: ModelSpec, i: int, name: str) -> Op:
    """Return the norm of queries (q) or keys (k)."""
    prefix = f"layers.{i}.attn.{name[0]}_norm"
    attrs: dict[str, Any] = {"norm": spec.qk_norm_kind, "eps": spec.norm_eps}
    if spec.norm_offset:
        attrs["offset"] = spec.norm_offset
    if spec.qk_norm != "all":
        attrs["per_head"] = True
    if spec.is_local(i):
        attrs["head"] = spec.heads_of(i).key_dim
    weights: tuple[Operand, ...] = (Operand(f"{prefix}.weight"),)
    if not spec.qk_norm_weight:
        weights = ()
    if spec.qk_norm == "each_head":
        n = spec.n_heads if name[0] == "q" else spec.heads_of(i).n_kv_heads
        weights = tuple(Operand(f"{prefix}.{j}.weight") for j in range(n))
        attrs["own_weights"] = True
    return Op("norm", name, (name,), weights, layer=i, attrs=attrs)


def _latent_attention(spec: ModelSpec, latent: LatentSpec, i: int, source: str) -> list[Op]:
    """Return multi-head latent attention (MLA) in its absorbed form.

    Queries are projected into the latent space, so that the latent vectors are keys and values of
    all heads and the only cached state: 576 instead of 5120 numbers per token in DeepSeek-V2-Lite.
    Dot products get longer (576 + 512 multiply-adds instead of 192 + 128).
    """
    prefix, D = f"layers.{i}.attn", spec.head_dim
    C, Dr, Dv = latent.kv_rank, spec.rope.dim, latent.value_dim

    def norm(name: str, buffer: str, **more: Any) -> Op:
        attrs = {"norm": "rms", "eps": latent.norm_eps, **more}
        return Op("norm", buffer, (buffer,), (Operand(f"{prefix}.{name}.weight"),), (), i, attrs)

    def each_head(name: str, rows: int, head: int, source: str, out: str) -> Op:
        cuts = [(h * rows, (h + 1) * rows) for h in range(spec.n_heads)]
        weights = tuple(Operand(f"{prefix}.{name}.weight", rows=cut) for cut in cuts)
        return Op("heads_linear", out, (source,), weights, layer=i, attrs={"head": head})

    rope = spec.rope_of(i)
    attrs = {"rope": rope, "first": C}
    turn = Op("rope", "ql", ("ql", "latent"), layer=i, attrs=attrs)
    if latent.q_rank:
        ops = [
            linear(spec, i, "attn.q_a", source, "qa"),
            linear(spec, i, "attn.kv_a", source, "latent"),
            norm("q_a_norm", "qa"),
            linear(spec, i, "attn.q", "qa", "q"),
        ]
    else:
        ops = [
            linear(spec, i, "attn.q", source, "q"),
            linear(spec, i, "attn.kv_a", source, "latent"),
        ]
    return [
        *ops,
        norm("kv_a_norm", "latent", columns=C),
        Op("copy_heads", "ql", ("q",), layer=i, attrs={"head": D, "columns": Dr}),
        *[turn] * (rope.dim > 0),
        Op("append_kv", "kv", ("latent",), layer=i),
        *_select_keys(spec, i, source),
        each_head("k_b", C, D, "q", "ql"),
        *_temperature(spec, i, "ql"),
        Op("attention", "al", ("ql",), layer=i, attrs=_mask(spec, i))
        if spec.indexer is None
        else Op("sparse_attention", "al", ("ql", "sel"), layer=i),
        each_head("v_b", Dv, C, "al", "a"),
        linear(spec, i, "attn.o", "a", "o"),
        add(spec, "x", "o", i),
    ]


def _select_keys(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the selection of the keys of sparse attention; it writes sel."""
    indexer = spec.indexer
    if indexer is None or i not in indexer.layers:
        return []
    norm = f"layers.{i}.attn.index_norm"
    rope = replace(spec.rope_of(i), style=indexer.rope_style)
    return [
        linear(spec, i, "attn.index_k", source, "ik"),
        Op(
            "norm", "ik", ("ik",), (Operand(f"{norm}.weight"), Operand(f"{norm}.bias")), layer=i,
            attrs={"norm": "layer", "eps": INDEX_NORM_EPS},
        ),
        linear(spec, i, "attn.index_q", "qa", "iq"),
        Op("rope", "iq", ("iq", "ik"), layer=i, attrs={"rope": rope, "head": indexer.dim}),
        Op("append_index", "kv", ("ik",), layer=i),
        linear(spec, i, "attn.index_weights", source, "iw"),
        Op("select_keys", "sel", ("iq", "iw"), layer=i),
    ]  # fmt: skip


def _cross_attention(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return cross-attention to the cached keys and values of the encoder's hidden states."""
    return [
        linear(spec, i, "cross.q", source, "q"),
        Op("cross_attention", "a", ("q",), layer=i),
        linear(spec, i, "cross.o", "a", "o"),
        add(spec, "x", "o", i),
    ]


def _feed_forward(spec: ModelSpec, i: int, source: str) -> list[Op]:
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
    if not moe.shared_size:
        return ops
    activation = {"activation": spec.activation_name}
    up = linear(spec, i, "shared.up", source, "sup")
    if spec.gated:
        ops += [linear(spec, i, "shared.gate", source, "sgate"), up]
        ops.append(Op("gate", "sf", ("sgate", "sup"), layer=i, attrs=activation))
    else:
        ops += [up, Op("activation", "sf", ("sup",), layer=i, attrs=activation)]
    ops.append(linear(spec, i, "shared.down", "sf", "s"))
    if moe.shared_gate:
        gate = (Operand(f"{prefix}.shared_gate.weight"),)
        ops.append(Op("scale_rows", "s", (source,), gate, layer=i))
    return [*ops, add(spec, "o", "s", i)]


_MIXERS = {
    "attention": _attention,
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

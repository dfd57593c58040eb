"""Names and shapes of the tensors of a `ModelSpec`.

"Tensors" in docs/family_files.md lists all names and shapes.  Abbreviations: E
hidden_size, W embed_width, FF width of a feed-forward network, H heads of D columns, Dr rotated
columns.
"""

from __future__ import annotations

from nbflow.spec.architecture import Architecture
from nbflow.spec.layer_specs import LatentSpec, LayerKind
from nbflow.spec.plugin_ops import OPS, PLACES
from nbflow.spec.tensor_names import EXPERT_BIASES, XIELU

Shapes = dict[str, tuple[int, ...]]


def layer_norms(spec: Architecture, layer: int) -> tuple[str, ...]:
    """Return the names of the norms around a layer's sublayers."""
    kind, place = spec.kind_of(layer), spec.norm_place_of(layer)
    has_mixer = kind.mixer != ("none",) or kind.op is not None
    has_feed_forward = kind.feed_forward or kind.feed_forward_op is not None
    sublayers = (*["attn"] * has_mixer, *["ffn"] * has_feed_forward)
    first = ("attn_norm",) if spec.residual == "parallel" else tuple(f"{s}_norm" for s in sublayers)
    after = tuple(f"{s}_post_norm" for s in sublayers)
    if place == "output":
        return after
    return (*first, *after) if place == "sandwich" else first


def _norm(spec: Architecture, name: str, width: int) -> Shapes:
    shapes: Shapes = {}
    if spec.norm_weight:
        shapes[f"{name}.weight"] = (width,)
        if spec.norm == "layer" and spec.norm_bias:
            shapes[f"{name}.bias"] = (width,)
    return shapes


def _network(spec: Architecture, prefix: str, E: int, FF: int) -> Shapes:
    """Return the matrices of a feed-forward network of width FF on rows of width E."""
    gate: Shapes = {f"{prefix}.gate.weight": (FF, E)} if spec.gated else {}
    return {**gate, f"{prefix}.up.weight": (FF, E), f"{prefix}.down.weight": (E, FF)}


def layer_shapes(spec: Architecture, layer: int) -> Shapes:
    """Return the tensors of one layer, names without the ``layers.{i}.`` prefix."""
    E, kind = spec.hidden_size, spec.kind_of(layer)
    shapes: Shapes = {}
    for norm in layer_norms(spec, layer):
        shapes |= _norm(spec, norm, E)
    for mixer in kind.mixer:
        shapes |= MIXER_SHAPES[mixer](spec, layer)
    for key, part in PLACES.items():
        if (op := getattr(kind, key)) is not None:
            of_op = OPS[op].shapes(spec)
            shapes |= {f"{part}.{name}.weight": shape for name, shape in of_op.items()}
    if spec.indexer is not None and layer in spec.indexer.layers:
        shapes |= _indexer_shapes(spec)
    if kind.feed_forward and spec.has_experts(layer):
        shapes |= _expert_shapes(spec)
    if kind.feed_forward and spec.has_dense_network(layer):
        shapes |= _network(spec, "ffn", E, spec.ffn_size(layer))
        if spec.activation == "xielu":
            shapes |= {f"{name}.weight": (1,) for name in XIELU}
        if spec.retrieved_experts:
            n = spec.retrieved_experts
            tables = {"down": n, "up": n, "router": 2 * spec.retrieval_keys}
            shapes |= {f"retrieval.{name}.weight": (rows, E) for name, rows in tables.items()}
    shapes |= _around_shapes(spec, kind)
    for name in sorted(spec.biases):
        if f"{name}.weight" in shapes:
            shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    return shapes


def _around_shapes(spec: Architecture, kind: LayerKind) -> Shapes:
    """Return the tensors around the sublayers: streams, learned residuals, per-layer embeddings."""
    E, S, R, P = spec.hidden_size, spec.streams, spec.laurel_rank, spec.layer_embed_size
    shapes: Shapes = {}
    if S > 1:
        shapes |= {
            "streams.router_norm.weight": (E,),
            "streams.router.weight": (S, E),
            "streams.predict.weight": (S * S, S),
            "streams.correct.weight": (S, S),
        }
        if spec.stream_output_scale:
            shapes["streams.output_scale.weight"] = (E,)
    if R:
        shapes |= {"laurel.down.weight": (R, E), "laurel.up.weight": (E, R)}
        shapes |= _norm(spec, "laurel_norm", E)
    if P:
        shapes |= {"layer_embed.gate.weight": (P, E), "layer_embed.out.weight": (E, P)}
        shapes |= _norm(spec, "layer_embed_norm", E)
    if spec.layer_scale:
        shapes["layer_scale.weight"] = (1,)
    if spec.residual_weights:
        sublayers = ["attn"] * (kind.mixer != ("none",)) + ["ffn"] * kind.feed_forward
        shapes |= {f"{name}_residual.weight": (E,) for name in sublayers}
    return shapes


def _attention_shapes(spec: Architecture, layer: int) -> Shapes:
    """Return the tensors of attention, and of cross-attention if the model has an encoder."""
    E = spec.hidden_size
    shapes: Shapes = {}
    heads, H = spec.heads_of(layer), spec.n_heads
    D, Dv, G = heads.key_dim, heads.value_dim, heads.n_kv_heads
    if spec.latent is not None or spec.dynamic_mask_keys:
        D, Dv = spec.head_dim, spec.value_dim
    q_rows, kv_rows, out = H * D, G * D, H * Dv
    if spec.latent is not None:
        shapes |= _latent_shapes(spec, spec.latent)
    else:
        shapes |= {"attn.q.weight": (q_rows, E)}
        if spec.kv_source(layer) == layer:
            shapes["attn.k.weight"] = (kv_rows, E)
            if not spec.takes_values_from_keys(layer):
                shapes["attn.v.weight"] = (G * Dv, E)
        shapes["attn.o.weight"] = (E, out)
    if spec.dynamic_mask_keys:
        shapes |= {"attn.mask.weight": (G, G * Dv), "attn.mask_rate.weight": (G,)}
    if spec.output_gate:
        shapes["attn.gate.weight"] = (out, E)
    if spec.has_sinks(layer):
        shapes["attn.sinks.weight"] = (spec.n_heads,)
    if spec.encoder is not None:
        inner = spec.encoder.hidden_size
        shapes |= _norm(spec, "cross_norm", E)
        shapes |= {
            "cross.q.weight": (q_rows, E),
            "cross.k.weight": (kv_rows, inner),
            "cross.v.weight": (kv_rows, inner),
            "cross.o.weight": (E, q_rows),
        }
    if not spec.qk_norm_weight:
        return shapes
    if spec.qk_norm == "each_head":
        for name, n in (("q", H), ("k", G)):
            shapes |= {f"attn.{name}_norm.{j}.weight": (D,) for j in range(n)}
    elif spec.qk_norm != "none":
        widths = (q_rows, kv_rows) if spec.qk_norm == "all" else (D,) * 2
        for name, width in zip(("attn.q_norm", "attn.k_norm"), widths, strict=True):
            shapes[f"{name}.weight"] = (width,)
        if spec.kv_source(layer) != layer:
            del shapes["attn.k_norm.weight"]
    return shapes


def _short_conv_shapes(spec: Architecture, layer: int) -> Shapes:
    E = spec.hidden_size
    shapes = {f"short.{name}.weight": (E, E) for name in ("b", "c", "x", "out")}
    return {**shapes, "short.conv.weight": (E, spec.conv_kernel)}


def _delta_shapes(spec: Architecture, layer: int) -> Shapes:
    delta, E = spec.delta, spec.hidden_size
    assert delta is not None
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    widths = {"q": keys, "k": keys, "v": values}
    rows = {**widths, "z": values, "b": delta.value_heads, "a": delta.decays}
    shapes: Shapes = {f"delta.{name}.weight": (n, E) for name, n in rows.items()}
    for name in ("a", "z") if delta.rank else ():
        shapes[f"delta.{name}_low.weight"] = (delta.rank, E)
        shapes[f"delta.{name}.weight"] = (rows[name], delta.rank)
    for name, n in widths.items():
        shapes[f"delta.{name}_conv.weight"] = (n, spec.conv_kernel)
    return shapes | {
        "delta.a_log.weight": (delta.value_heads,),
        "delta.dt_bias.weight": (delta.decays,),
        "delta.norm.weight": (delta.value_dim,),
        "delta.out.weight": (E, values),
    }


def _latent_shapes(spec: Architecture, latent: LatentSpec) -> Shapes:
    E, H, D, Dr = spec.hidden_size, spec.n_heads, spec.head_dim, spec.rope.dim
    shapes: Shapes = {"attn.q.weight": (H * D, latent.q_rank or E)}
    if latent.q_rank:
        shapes |= {"attn.q_a.weight": (latent.q_rank, E), "attn.q_a_norm.weight": (latent.q_rank,)}
    return shapes | {
        "attn.kv_a.weight": (latent.kv_rank + Dr, E),
        "attn.kv_a_norm.weight": (latent.kv_rank,),
        "attn.k_b.weight": (H * latent.kv_rank, D - Dr),
        "attn.v_b.weight": (H * latent.value_dim, latent.kv_rank),
        "attn.o.weight": (E, H * latent.value_dim),
    }


def _indexer_shapes(spec: Architecture) -> Shapes:
    assert spec.indexer is not None
    assert spec.latent is not None
    heads, dim, E = spec.indexer.heads, spec.indexer.dim, spec.hidden_size
    return {
        "attn.index_q.weight": (heads * dim, spec.latent.q_rank),
        "attn.index_k.weight": (dim, E),
        "attn.index_norm.weight": (dim,),
        "attn.index_norm.bias": (dim,),
        "attn.index_weights.weight": (heads, E),
    }


def _state_space_shapes(spec: Architecture, layer: int) -> Shapes:
    ssm, E = spec.ssm, spec.hidden_size
    assert ssm is not None
    vectors = ssm.groups * ssm.state_dim
    rows = {"z": ssm.width, "x": ssm.width, "b": vectors, "c": vectors, "dt": ssm.heads}
    shapes: Shapes = {f"ssm.{name}.weight": (n, E) for name, n in rows.items()}
    for name in ("x", "b", "c"):
        shapes[f"ssm.{name}_conv.weight"] = (rows[name], spec.conv_kernel)
    for name in ("a_log", "dt_bias", "d"):
        shapes[f"ssm.{name}.weight"] = (ssm.heads,)
    if ssm.norm != "none":
        shapes["ssm.norm.weight"] = (ssm.width,)
    return shapes | {"ssm.out.weight": (E, ssm.width)}


def _selective_shapes(spec: Architecture, layer: int) -> Shapes:
    mamba, E = spec.selective, spec.hidden_size
    assert mamba is not None
    C, N, R = mamba.width, mamba.state_dim, mamba.dt_rank
    low = {"dt": R, "b": N, "c": N}
    norms = {f"mamba1.{name}_norm.weight": (n,) for name, n in low.items()}
    return {
        "mamba1.x.weight": (C, E),
        "mamba1.z.weight": (C, E),
        "mamba1.conv.weight": (C, spec.conv_kernel),
        "mamba1.dt_a.weight": (R, C),
        "mamba1.b.weight": (N, C),
        "mamba1.c.weight": (N, C),
        **(norms if mamba.norm == "weighted" else {}),
        "mamba1.dt.weight": (C, R),
        "mamba1.a_log.weight": (C, N),
        "mamba1.dt_bias.weight": (C,),
        "mamba1.d.weight": (C,),
        "mamba1.out.weight": (E, C),
    }


def _lightning_shapes(spec: Architecture, layer: int) -> Shapes:
    E, rows = spec.hidden_size, spec.n_heads * spec.head_dim
    shapes: Shapes = {f"lightning.{name}.weight": (rows, E) for name in ("q", "k", "v", "gate")}
    return {**shapes, "lightning.norm.weight": (rows,), "lightning.out.weight": (E, rows)}


def _no_shapes(spec: Architecture, layer: int) -> Shapes:
    return {}


MIXER_SHAPES = {
    "attention": _attention_shapes,
    "short_conv": _short_conv_shapes,
    "gated_delta_rule": _delta_shapes,
    "mamba1": _selective_shapes,
    "mamba2": _state_space_shapes,
    "lightning_attention": _lightning_shapes,
    "none": _no_shapes,
}


def _expert_shapes(spec: Architecture) -> Shapes:
    moe = spec.moe
    assert moe is not None
    E = spec.hidden_size
    shapes: Shapes = {"router.weight": (moe.n_experts, E)}
    if moe.router_bias:
        shapes["router.bias"] = (moe.n_experts,)
    for j in range(moe.n_experts):
        shapes |= _network(spec, f"moe.{j}", moe.latent_size or E, moe.expert_size)
    if moe.beside_dense:
        norms = ("dense_post_norm", "experts_norm", "experts_post_norm", "router_norm")
        shapes |= {f"{name}.weight": (E,) for name in norms}
        shapes["expert_scale.weight"] = (moe.n_experts,)
    if moe.latent_size:
        shapes |= {
            "experts.in.weight": (moe.latent_size, E),
            "experts.out.weight": (E, moe.latent_size),
        }
    for name in filter(spec.biases.__contains__, EXPERT_BIASES):
        shapes[f"{name}.bias"] = (
            moe.n_experts,
            moe.latent_size or E if name == "moe.down" else moe.expert_size,
        )
    if moe.shared_size:
        shapes |= _network(spec, "shared", E, moe.shared_size)
        if moe.shared_gate:
            shapes["shared_gate.weight"] = (1, E)
    return shapes


def tensor_shapes(spec: Architecture) -> Shapes:
    """Return name -> shape of every tensor of the model."""
    E, W = spec.hidden_size, spec.embed_width
    shapes: Shapes = {"embed.weight": (spec.vocab_size, W)}
    if W != E:
        shapes |= {"embed.in.weight": (E, W), "embed.out.weight": (W, E)}
    if spec.position == "learned":
        shapes["positions.weight"] = (spec.max_context + spec.position_offset, E)
    if spec.position == "relative":
        shapes["position_bias.weight"] = (spec.bias_buckets, spec.n_heads)
    if spec.type_vocab_size:
        shapes["types.weight"] = (spec.type_vocab_size, E)
    if spec.embed_norm:
        shapes |= _norm(spec, "embed_norm", E)
    for j in range(spec.streams - 1):
        shapes |= {f"streams.{name}.{j}.weight": (E, E) for name in ("in", "out")}
    if spec.layer_embed_size:
        width = spec.n_layers * spec.layer_embed_size
        shapes["layer_embed.weight"] = (spec.layer_embed_vocab_size or spec.vocab_size, width)
        shapes["layer_embed.in.weight"] = (width, E)
        shapes |= _norm(spec, "layer_embed_norm", spec.layer_embed_size)
    for i in range(spec.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(spec, i).items()}
    if spec.final_norm:
        shapes |= _norm(spec, "final_norm", E)
    if spec.classifier is not None:
        n = len(spec.classifier.labels)
        shapes |= {"pooler.weight": (E, E), "pooler.bias": (E,)}
        shapes |= {"classifier.weight": (n, E), "classifier.bias": (n,)}
    if not spec.head:
        return shapes
    if spec.head_transform:
        shapes |= {"transform.weight": (E, E), "transform.bias": (E,)}
        shapes |= _norm(spec, "transform_norm", E)
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, W)
    if spec.head_bias:
        shapes["head.bias"] = (spec.vocab_size,)
    return shapes

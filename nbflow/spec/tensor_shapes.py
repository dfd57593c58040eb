"""Names and shapes of the tensors a `ModelSpec` asks for.

Our names, with `E` hidden_size, `W` embed_width, `I` intermediate_size (`F` of an expert, `S` of
the shared one), `H` and `G` query and key/value heads of `D` columns::

    embed.weight                        (V, W)
    embed.in.weight, embed.out.weight   (E, W), (W, E)   only if W is not E
    positions.weight                    (P, E)    only if learned
    position_bias.weight                (buckets, H)  only if relative
    types.weight                        (types, E)
    embed_norm.weight                   (E,)
    layers.{i}.attn_norm.weight         (E,)      every norm: .bias too for a LayerNorm with bias
    layers.{i}.attn.q.weight            (H*D, E)  attn.k, attn.v: (G*D, E)
    layers.{i}.attn.q_norm.weight       (D,)      or (H*D,); attn.k_norm alike
    layers.{i}.attn.q_norm.{j}.weight   (D,)      instead, if each head j has weights of its own
    layers.{i}.attn.o.weight            (E, H*D)
    layers.{i}.attn.sinks.weight        (H,)      only if there are sinks
    layers.{i}.attn.q_a.weight          (Rq, E)   latent attention, see below
    layers.{i}.attn.kv_a.weight         (C+Dr, E) and attn.q_a_norm (Rq,), attn.kv_a_norm (C,)
    layers.{i}.attn.k_b.weight          (H*C, D-Dr)  of each head: from its query to the latent one
    layers.{i}.attn.v_b.weight          (H*Dv, C)    of each head: from the latent to its values
    layers.{i}.cross.q.weight           (H*D, E)  and k, v, o: attention to an encoder
    layers.{i}.cross_norm.weight        (E,)
    layers.{i}.attn_post_norm.weight    (E,)      norms of what a sublayer gives
    layers.{i}.ffn_norm.weight          (E,)
    layers.{i}.ffn.gate.weight          (I, E)    only if gated
    layers.{i}.ffn.up.weight            (I, E)
    layers.{i}.ffn.down.weight          (E, I)
    layers.{i}.router.weight            (experts, E)     instead of ffn in layers with experts
    layers.{i}.moe.{j}.gate.weight      (F, E)    and up, down
    layers.{i}.moe.gate.bias            (experts, F)  and up, down (experts, E), if they have biases
    layers.{i}.shared.gate.weight       (S, E)    and up, down
    layers.{i}.shared_gate.weight       (1, E)
    layers.{i}.ffn_post_norm.weight     (E,)
    final_norm.weight                   (E,)
    transform.weight, transform_norm.weight  (E, E), (E,)
    head.weight, head.bias              (V, W), (V,)     weight absent if tied

Latent attention has, with C `kv_rank`, Rq `q_rank`, Dr the rotated columns and Dv `value_dim`, no
attn.k and attn.v; attn.q is (H*D, Rq) if there is an attn.q_a, and attn.o (E, H*Dv).
"""

from __future__ import annotations

from nbflow.spec.architecture import Architecture, LatentSpec
from nbflow.spec.fields import EXPERT_BIASES

Shapes = dict[str, tuple[int, ...]]


def layer_norms(spec: Architecture) -> tuple[str, ...]:
    """Return the norms of a layer's two sublayers."""
    first = ("attn_norm",) if spec.residual == "parallel" else ("attn_norm", "ffn_norm")
    after = ("attn_post_norm", "ffn_post_norm")
    if spec.norm_place == "output":
        return after
    return (*first, *after) if spec.norm_place == "sandwich" else first


def _norm(spec: Architecture, name: str, width: int) -> Shapes:
    shapes: Shapes = {}
    if spec.norm_weight:
        shapes[f"{name}.weight"] = (width,)
        if spec.norm == "layer" and spec.norm_bias:
            shapes[f"{name}.bias"] = (width,)
    return shapes


def _gated(prefix: str, E: int, FF: int) -> Shapes:
    return {
        f"{prefix}.gate.weight": (FF, E),
        f"{prefix}.up.weight": (FF, E),
        f"{prefix}.down.weight": (E, FF),
    }


def layer_shapes(spec: Architecture, layer: int) -> Shapes:
    """Return the tensors of one layer, names without the ``layers.{i}.`` prefix."""
    E, FF = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes: Shapes = {}
    for norm in layer_norms(spec):
        shapes |= _norm(spec, norm, E)
    if spec.latent is not None:
        shapes |= _latent_shapes(spec, spec.latent)
    else:
        shapes |= {
            "attn.q.weight": (q_rows, E),
            "attn.k.weight": (kv_rows, E),
            "attn.v.weight": (kv_rows, E),
            "attn.o.weight": (E, q_rows),
        }
    if spec.attention_sinks:
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
    if spec.qk_norm == "each_head":
        for name, n in (("q", spec.n_heads), ("k", spec.n_kv_heads)):
            shapes |= {f"attn.{name}_norm.{j}.weight": (spec.head_dim,) for j in range(n)}
    elif spec.qk_norm != "none":
        widths = (q_rows, kv_rows) if spec.qk_norm == "all" else (spec.head_dim,) * 2
        for name, width in zip(("attn.q_norm", "attn.k_norm"), widths, strict=True):
            shapes[f"{name}.weight"] = (width,)
    if spec.has_experts(layer):
        shapes |= _expert_shapes(spec)
    else:
        shapes |= _gated("ffn", E, FF)
        if not spec.gated:
            del shapes["ffn.gate.weight"]
    for name in sorted(spec.biases):
        if f"{name}.weight" in shapes:
            shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    return shapes


def _latent_shapes(spec: Architecture, latent: LatentSpec) -> Shapes:
    """Return the tensors of latent attention."""
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


def _expert_shapes(spec: Architecture) -> Shapes:
    """Return the tensors of a mixture of experts."""
    moe = spec.moe
    assert moe is not None
    E = spec.hidden_size
    shapes: Shapes = {"router.weight": (moe.n_experts, E)}
    if moe.router_bias:
        shapes["router.bias"] = (moe.n_experts,)
    for j in range(moe.n_experts):
        shapes |= _gated(f"moe.{j}", E, moe.expert_size)
    for name in filter(spec.biases.__contains__, EXPERT_BIASES):
        shapes[f"{name}.bias"] = (moe.n_experts, E if name == "moe.down" else moe.expert_size)
    if moe.shared_size:
        shapes |= _gated("shared", E, moe.shared_size)
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
    for i in range(spec.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(spec, i).items()}
    if spec.final_norm:
        shapes |= _norm(spec, "final_norm", E)
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

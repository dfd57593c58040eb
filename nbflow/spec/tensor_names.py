"""Our names of the tensors of a model."""

from __future__ import annotations

CROSS = ("cross.q", "cross.k", "cross.v", "cross.o")
SHORT_CONV = ("short.b", "short.c", "short.x", "short.conv", "short.out")
"""Gated short convolution: out(c * conv(b * x))."""
DELTA = tuple(f"delta.{name}" for name in ("q", "k", "v", "z", "b", "a", "out"))
"""Gated delta rule: queries, keys, values, output gate, write strength, decay, output."""
DELTA_CONVS = ("delta.q_conv", "delta.k_conv", "delta.v_conv")
DELTA_VECTORS = ("delta.a_log", "delta.dt_bias")
"""Logarithm of the decay rates of the value heads, and what is added to their decays."""
_SSM_CONVS = ("ssm.x_conv", "ssm.b_conv", "ssm.c_conv")
SSM = (*(f"ssm.{name}" for name in ("z", "x", "b", "c", "dt", "out")), *_SSM_CONVS)
"""Mamba-2: output gate, values, input and output vectors, time steps, output, convolutions."""
SSM_VECTORS = ("ssm.a_log", "ssm.dt_bias", "ssm.d")
"""Logarithm of the decay rates, what is added to the time steps, weight of the skip connection."""
XIELU = tuple(f"ffn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
"""Numbers of a layer's xIELU."""
STACKED_NUMBERS = frozenset(f"layers.{{i}}.{name}.weight" for name in XIELU)
"""Numbers of each layer, which a checkpoint may store as one vector."""
DELTA_RANKS = ("delta.a_low", "delta.z_low")
"""Compressed decays and output gates."""
LIGHTNING = tuple(f"lightning.{name}" for name in ("q", "k", "v", "gate", "out"))
"""Lightning attention: queries, keys, values, output gate, output."""
MAMBA1 = tuple(f"mamba1.{name}" for name in ("x", "z", "conv", "dt_a", "b", "c", "dt", "out"))
"""Mamba-1: values, output gate, convolution, compressed time steps, input and output vectors, time
steps, output."""
MAMBA1_VECTORS = ("mamba1.a_log", "mamba1.dt_bias", "mamba1.d")
"""Mamba-1: logarithm of the decay rates, a row per channel; what is added to the time steps; weight
of the skip connection."""
EXPERT_PROJECTIONS = ("experts.in", "experts.out")
"""Projections before and behind all experts of a layer (expert_latent_size)."""
SHARED_MATRICES = tuple(f"shared.{part}" for part in ("gate", "up", "down"))
LINEARS = (
    "attn.q", "attn.k", "attn.v", "attn.o", "attn.gate", "attn.mask", "attn.q_a", "attn.kv_a",
    *CROSS,
    *SHORT_CONV, *DELTA, *DELTA_RANKS, *SSM, *MAMBA1, *LIGHTNING,
    "ffn.gate", "ffn.up", "ffn.down", "router", "moe.gate", "moe.up", "moe.down",
    *SHARED_MATRICES, *EXPERT_PROJECTIONS,
)  # fmt: skip
"""Matrices of a layer that may have a bias; moe.gate, .up and .down have one tensor of biases
(experts, width) for all experts."""
EXPERT_BIASES = ("moe.gate", "moe.up", "moe.down")
FUSED = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn.kv_b": ("attn.k_b", "attn.v_b"),
    "attn.q_gate": ("attn.q", "attn.gate"),
    "short.in": ("short.b", "short.c", "short.x"),
    "delta.qkv": ("delta.q", "delta.k", "delta.v"),
    "delta.qkvz": ("delta.q", "delta.k", "delta.v", "delta.z"),
    "delta.ba": ("delta.b", "delta.a"),
    "delta.in": ("delta.q", "delta.k", "delta.v", "delta.z", "delta.b", "delta.a"),
    "delta.conv": DELTA_CONVS,
    "ssm.in": ("ssm.z", "ssm.x", "ssm.b", "ssm.c", "ssm.dt"),
    "ssm.conv": _SSM_CONVS,
    "lightning.qkv": ("lightning.q", "lightning.k", "lightning.v"),
    "mamba1.in": ("mamba1.x", "mamba1.z"),
    "mamba1.dt_bc": ("mamba1.dt_a", "mamba1.b", "mamba1.c"),
    "shared.gate_up": ("shared.gate", "shared.up"),
    "ffn.gate_up": ("ffn.gate", "ffn.up"),
    "moe.{j}.gate_up": ("moe.{j}.gate", "moe.{j}.up"),
}
"""Matrices that a checkpoint may store fused: name -> members."""
LAYER_NORMS = (
    "attn_norm", "attn_post_norm", "cross_norm", "ffn_norm", "ffn_post_norm", "attn.q_norm",
    "attn.k_norm", "attn.q_a_norm", "attn.kv_a_norm", "attn.index_norm", "delta.norm",
    "ssm.norm", "mamba1.dt_norm", "mamba1.b_norm", "mamba1.c_norm",
    "lightning.norm",
)  # fmt: skip
DIVISORS = ("rope_divisors", "rope_short_divisors", "rope_long_divisors")
"""Divisors of the rotary frequencies; the latter two are LongRoPE's."""
EXPERT_MATRICES = tuple(f"moe.{{j}}.{part}" for part in ("gate", "up", "down"))
"""Matrices of expert j; a checkpoint's name without {j} is a fused tensor of all experts."""
HEAD_NORMS = ("attn.q_norm.{j}", "attn.k_norm.{j}")
"""Norms of the queries or keys of head j; a checkpoint's name without {j} is a fused tensor
(heads, columns)."""
RETRIEVAL = ("retrieval.router", "retrieval.down", "retrieval.up")
"""Keys of both halves, and the two rows of every expert of retrieved_experts; without bias."""

INDEXER = ("attn.index_q", "attn.index_k", "attn.index_weights")
"""Matrices of an indexer: queries, keys, weights of the heads; without bias."""
LATENT_MATRICES = ("attn.k_b", "attn.v_b")
"""Up projections of latent attention, stacked by head, without bias."""

BESIDE_DENSE = ("dense_post_norm", "router_norm", "experts_norm", "experts_post_norm")
"""Norms of experts next to a dense network: of the latter's output, of the router's input, of the
experts' input and output."""
STREAMS = ("streams.router", "streams.predict", "streams.correct")
"""Matrices of a layer with several residual streams: weights of a token, and the coefficients of
prediction and correction from them."""
LAUREL = ("laurel.down", "laurel.up")
"""Learned residual of low rank."""
LAYER_EMBED = ("layer_embed.gate", "layer_embed.out")
"""Gate that a layer's embedding multiplies, and the projection behind it."""
LAYER_VECTORS = (
    "streams.router_norm", "streams.output_scale", "laurel_norm", "layer_embed_norm",
    "layer_scale", "attn_residual", "ffn_residual", "expert_scale", "attn.mask_rate",
)  # fmt: skip
"""Norms and factors by column of these parts, and the factors of experts."""
STREAM_MATRICES = ("streams.in.{j}", "streams.out.{j}")
"""Projections of the token embedding to further stream j, from 0, and of it before the head; a
checkpoint's name without {j} is a fused tensor (streams - 1, E, E)."""

_IN_LAYERS = (
    *LAYER_NORMS, *BESIDE_DENSE, *STREAMS, *LAUREL, *LAYER_EMBED, *LAYER_VECTORS,
    *HEAD_NORMS, "attn.sinks", *LINEARS, *DELTA_CONVS, *DELTA_VECTORS,
    *SSM_VECTORS, *MAMBA1_VECTORS, *XIELU, *LATENT_MATRICES, *INDEXER, *FUSED, *EXPERT_MATRICES,
    "moe.gate_up", *RETRIEVAL, "shared_gate",
)  # fmt: skip
_ONE_KIND = {
    "bias": ("embed", "positions", "position_bias", "types", "attn.k_b", "attn.v_b", "attn.kv_b",
             "attn.sinks", *INDEXER, *HEAD_NORMS, *DELTA_VECTORS, *SSM_VECTORS, *MAMBA1_VECTORS,
             *XIELU, *RETRIEVAL, *STREAMS, *LAUREL, *LAYER_EMBED,
             *LAYER_VECTORS, *STREAM_MATRICES, "layer_embed", "layer_embed.in",
             "layer_embed_norm", "router_norm"),
    "weight": (*EXPERT_BIASES, "moe.gate_up"),
}  # fmt: skip
"""Tensors that have only a weight, or only a bias."""
_OUTSIDE = (
    "embed", "positions", "position_bias", "types", "embed_norm", "embed.in", "embed.out",
    "final_norm", "transform", "transform_norm", "head", "pooler", "classifier",
    "layer_embed", "layer_embed.in", "layer_embed_norm", *STREAM_MATRICES,
)  # fmt: skip
TENSOR_NAMES = (
    *(
        f"{part}.{kind}"
        for part in (*_OUTSIDE, *(f"layers.{{i}}.{part}" for part in _IN_LAYERS))
        for kind in ("weight", "bias")
        if part.removeprefix("layers.{i}.") not in _ONE_KIND[kind]
    ),
    *DIVISORS,
)
"""Our names of tensors, ``{i}`` for the layer and ``{j}`` for the expert or the head."""

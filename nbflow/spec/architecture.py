"""Fields of `ModelSpec`, and properties derived from them alone.

`nbflow.spec.fields.FIELDS` describes those of the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Literal

from nbflow.spec.layer_specs import (
    BIAS_COLUMNS,
    LAYER_KINDS,
    CacheSide,
    ClassifierSpec,
    DeltaSpec,
    HeadShape,
    IndexerSpec,
    LatentSpec,
    LayerKind,
    Mixer,
    MoeSpec,
    NormPlace,
    RopeSpec,
    SelectiveSpec,
    StateSpaceSpec,
    TemperatureSpec,
)
from nbflow.spec.plugin_ops import OPS
from nbflow_kernels.activation.swigluoai import swigluoai_name
from nbflow_kernels.position import LongRopeScaling

Activation = Literal[
    "silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swigluoai", "xielu"
]


@dataclass(frozen=True)
class Architecture:
    """Fields of a model spec, and properties derived from them alone."""

    name: str
    """Name of the released model, or of the checkpoint's folder or file."""
    family: str
    """Name of the family file."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_context: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Activation
    gated: bool
    rope: RopeSpec
    """Rotary position embedding; dim 0 without one."""
    sm_scale: float
    window: int | None
    logits_soft_cap: float | None
    tied_head: bool
    tensors: dict[str, str] = field(repr=False)
    """Our tensor name -> the checkpoint's; {i} is the layer, {j} the expert or head."""
    ignored_tensors: tuple[str, ...] = ()
    """Shell patterns of checkpoint tensors that are not weights."""
    biases: frozenset[str] = frozenset()
    """Our names (without ``.bias``) of the layers' matrices that have a bias, e.g. ``attn.q``."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None
    indexer: IndexerSpec | None = None
    """Selection of keys (sparse attention); None if all contexts are too short for it."""
    attention_sinks: bool = False
    sink_layers: Literal["all", "window"] = "all"
    """Layers that have the sinks."""
    local_rope: RopeSpec | None = None
    """Rotary embedding of the layers with the window, if it differs."""
    heads_value_dim: int = 0
    """Columns of a head's values, without latent attention; 0 for `head_dim`."""
    local_heads: HeadShape | None = None
    """Heads of the layers with the window, if they differ."""
    layer_kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer; empty if all are attention and feed-forward network."""
    kv_shared_layers: int = 0
    values_from_keys: Literal["none", "full", "all"] = "none"
    value_norm: bool = False
    dynamic_mask_keys: int = 0
    ffn_sizes: tuple[int, ...] = ()
    kv_shared_ffn_factor: int = 1
    activation_sparsity: tuple[float, ...] = ()
    activation_cuts: tuple[float, ...] = ()
    layer_embed_size: int = 0
    layer_embed_vocab_size: int = 0
    layer_scale: bool = False
    residual_weights: bool = False
    retrieved_experts: int = 0
    retrieved_per_token: int = 0
    streams: int = 1
    active_stream: int = 0
    stream_output_scale: bool = False
    laurel_rank: int = 0
    conv_kernel: int = 0
    """Taps of short convolutions; 0 without them."""
    delta: DeltaSpec | None = None
    ssm: StateSpaceSpec | None = None
    selective: SelectiveSpec | None = None
    stored_rates: bool = False
    """a_log holds the negative rates of recurrent layers, not logarithms of their magnitudes."""
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    attention: str | None = None
    """Name of the attention variant of a plugin."""
    rotated_cache: frozenset[tuple[CacheSide, int]] = frozenset()
    """Sides and layers of the KV cache that hold rotated vectors (`nbflow.kv_cache.rotation`)."""
    pre_rope_keys: bool = False
    """Keys are cached before RoPE, without their bias (`nbflow.kv_cache.key_form`)."""
    state_format: str = "f32"
    """Storage format of recurrent states (`nbflow_kernels.state_format`)."""
    output_gate: bool = False
    output_gate_by_head: bool = False
    temperature: TemperatureSpec | None = None
    """Factor of the queries by position."""
    attn_input_scale: float = 1.0
    attn_output_scale: float = 1.0
    attn_residual_scale: float = 1.0
    lightning_output_scale: float = 1.0
    lightning_residual_scale: float = 1.0
    ffn_residual_scale: float = 1.0
    linear_norm_eps: float | None = None
    ffn_gate_scale: float = 1.0
    ffn_output_scale: float = 1.0
    full_layers: frozenset[int] = frozenset()
    """Layers with full attention in a model with a window."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers without rotation of queries and keys."""
    attention_chunk: int | None = None
    causal: bool = True
    embed_size: int = 0
    """Width of the token embedding; 0 for `hidden_size`."""
    type_vocab_size: int = 0
    norm_offset: float = 0.0
    norm_weight: bool = True
    norm_bias: bool = True
    norm_place: NormPlace = "pre"
    embed_norm: bool = False
    final_norm: bool = True
    qk_norm: Literal["none", "head", "each_head", "all"] = "none"
    qk_norm_kind: Literal["rms", "layer"] = "rms"
    qk_norm_after_rope: bool = False
    qk_norm_weight: bool = True
    qk_norm_layers: Literal["all", "rotated"] = "all"
    qkv_clip: float = 0.0
    sm_scale_by_layer: bool = False
    qkv_layout: Literal["blocks", "groups"] = "blocks"
    qkv_groups: int = 0
    qkv_order: Literal["qkv", "qvk"] = "qkv"
    gate_up_layout: Literal["blocks", "neighbours"] = "blocks"
    experts_transposed: bool = False
    experts_down_transposed: bool = False
    position: Literal["rope", "alibi", "relative", "learned", "sinusoidal", "none"] = "rope"
    position_offset: int = 0
    sinusoids: Literal["none", "fairseq", "paper", "alternating"] = "none"
    bias_buckets: int = 32
    bias_max_distance: int = 128
    alibi_scaled: bool = False
    residual: Literal["sequential", "parallel", "parallel_two_norms"] = "sequential"
    transposed: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    head_soft_cap: float | None = None
    head_bias: bool = False
    normalize_head: bool = False
    head_transform: bool = False
    head: bool = True
    classifier: ClassifierSpec | None = None
    """Classification head, besides or instead of `head`."""
    encoder: Architecture | None = None
    """Encoder whose hidden states the layers attend to, or None."""
    decoder_start_id: int | None = None
    forced_bos_id: int | None = None
    forced_eos_ids: tuple[int, ...] = ()

    @property
    def activation_name(self) -> str:
        """Name of the activation for kernels, with its numbers if they differ from gpt-oss."""
        if self.activation != "swigluoai":
            return self.activation
        return swigluoai_name(self.swiglu_limit, self.swiglu_alpha)

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else LAYER_KINDS["full_attention"]

    def norm_place_of(self, layer: int) -> NormPlace:
        """Return the place of a layer's norms."""
        return self.kind_of(layer).norm_place or self.norm_place

    def rotation_block(self, side: CacheSide, layer: int = 0) -> int:
        """Return the columns of a block of the rotation of a layer's keys or values.

        The largest power of two that divides a head, for values at most 64: llama.cpp's choice.
        """
        heads = self.heads_of(layer)
        size = heads.key_dim if side == "keys" else heads.value_dim
        block = size & -size
        return block if side == "keys" else min(block, 64)

    @property
    def mixers(self) -> frozenset[Mixer]:
        """Mixers of the layers."""
        found = (mixer for kind in self.layer_kinds for mixer in kind.mixer)
        return frozenset(found) or frozenset({"attention"})

    @property
    def is_recurrent(self) -> bool:
        """True if some layers have a recurrent state."""
        stateful = (OPS.get(kind.op) for kind in self.layer_kinds if kind.op)
        has_state = any(op is not None and op.state is not None for op in stateful)
        return has_state or not self.mixers <= {"attention", "none"}

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: itself, or an earlier one."""
        first = self.n_layers - self.kv_shared_layers
        if layer < first:
            return layer
        mask = self.window_of(layer), self.chunk_of(layer)
        same = (i for i in range(first) if (self.window_of(i), self.chunk_of(i)) == mask)
        return max((i for i in same if "attention" in self.kind_of(i).mixer), default=layer)

    @cached_property
    def kv_sources(self) -> frozenset[int]:
        """Layers whose keys and values later ones attend to."""
        shared = range(self.n_layers - self.kv_shared_layers, self.n_layers)
        return frozenset(map(self.kv_source, shared))

    def takes_values_from_keys(self, layer: int) -> bool:
        """Return whether the values of a layer are its keys before their norm and rotation."""
        is_full = self.window is None or layer in self.full_layers
        return self.values_from_keys == "all" or (self.values_from_keys == "full" and is_full)

    def ffn_size(self, layer: int) -> int:
        """Return the width of the dense feed-forward network of a layer."""
        if self.ffn_sizes:
            return self.ffn_sizes[layer if len(self.ffn_sizes) > 1 else 0]
        is_shared = layer >= self.n_layers - self.kv_shared_layers
        return self.intermediate_size * (self.kv_shared_ffn_factor if is_shared else 1)

    def cut_of(self, layer: int) -> float:
        """Return deviations above the mean: smaller columns of ffn.gate become 0; -inf for none."""
        shares, cuts = self.activation_sparsity, self.activation_cuts
        share = shares[0] if len(shares) == 1 else (*shares, *[0.0] * self.n_layers)[layer]
        if share:
            return NormalDist().inv_cdf(share)
        return cuts[layer] if layer < len(cuts) else -math.inf

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer."""
        return None if layer in self.full_layers else self.window

    def chunk_of(self, layer: int) -> int | None:
        """Return the size of a layer's chunks of attention."""
        chunked = self.kind_of(layer).chunk if self.layer_kinds else self.rope_of(layer).dim > 0
        return self.attention_chunk if chunked else None

    def rope_of(self, layer: int) -> RopeSpec:
        """Return the rotary embedding of a layer; dim 0 if it has none."""
        if layer in self.unrotated_layers:
            return replace(self.rope, dim=0, scaling=None)
        local = self.local_rope is not None and self.window_of(layer) is not None
        return self.local_rope if local and self.local_rope is not None else self.rope

    def caches_pre_rope(self, layer: int) -> bool:
        """Return whether the keys of a layer are cached before RoPE."""
        return self.pre_rope_keys and self.rope_of(layer).dim > 0

    def is_local(self, layer: int) -> bool:
        """Return whether a layer has the heads of the layers with the window."""
        return self.local_heads is not None and self.window_of(layer) is not None

    def heads_of(self, layer: int) -> HeadShape:
        """Return the heads of a layer's attention."""
        if self.latent is not None:
            return HeadShape(self.n_kv_heads, self.cached_dim, self.latent.kv_rank)
        if self.local_heads is not None and self.is_local(layer):
            return self.local_heads
        width = self.head_dim + (BIAS_COLUMNS if self.dynamic_mask_keys else 0)
        return HeadShape(self.n_kv_heads, width, self.value_dim)

    def has_sinks(self, layer: int) -> bool:
        """Return whether the heads of a layer have attention sinks."""
        of_all = self.sink_layers == "all" or self.window_of(layer) is not None
        return self.attention_sinks and of_all

    def temperature_of(self, layer: int) -> TemperatureSpec | None:
        """Return the factor by position of a layer's queries."""
        found = self.temperature
        everywhere = found is None or found.layers == "all"
        return found if everywhere or layer in self.unrotated_layers else None

    @cached_property
    def short_context(self) -> int | None:
        """Original context of LongRoPE, up to which sequences use the short divisors.

        None if all sequences use the same rotary angles.
        """
        scalings = (rope.scaling for rope in (self.rope, self.local_rope) if rope is not None)
        lengths = (
            s.original_max_position
            for s in scalings
            if isinstance(s, LongRopeScaling) and s.depends_on_length
        )
        return min((n for n in lengths if n < self.max_context), default=None)

    @property
    def rope_lengths(self) -> tuple[int, ...]:
        """Maximum sequence length of each part of a rotary table."""
        short = self.short_context
        return (self.max_context,) if short is None else (short, self.max_context)

    def is_long(self, length: int) -> bool:
        """Return whether a sequence of this length uses LongRoPE's long divisors."""
        return self.short_context is not None and length > self.short_context

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.moe is not None and layer in self.moe.layers

    @property
    def retrieval_keys(self) -> int:
        """Return the keys of one half of the retrieved experts: their pairs name experts."""
        return math.isqrt(self.retrieved_experts)

    def has_dense_network(self, layer: int) -> bool:
        """Return whether a layer has a dense feed-forward network, alone or with experts."""
        beside = self.moe is not None and self.moe.beside_dense
        return beside or not self.has_experts(layer)

    @property
    def value_dim(self) -> int:
        """Columns of a head's output in the layers without the window."""
        if self.latent is not None:
            return self.latent.value_dim
        return self.heads_value_dim or self.head_dim

    @property
    def cached_dim(self) -> int:
        """Columns of a cached key vector; that of latent attention begins with the values."""
        return self.head_dim if self.latent is None else self.latent.kv_rank + self.rope.dim

    @property
    def embed_width(self) -> int:
        """Columns of the token embedding and of the head."""
        return self.embed_size or self.hidden_size

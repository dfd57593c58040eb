"""Sizes, kinds and options of a model and its parts: the fields of `ModelSpec`.

The fields mean what `nbflow.spec.fields` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from nbflow_kernels.position import LongRopeScaling, RopeScaling

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swigluoai"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding."""

    style: Literal["half", "interleaved"]
    """Which columns form a pair: (j, j + d/2) or (2j, 2j + 1)."""
    theta: float
    """Base of the frequencies."""
    dim: int
    """Rotated columns of each head; the rest pass through."""
    scaling: RopeScaling | None = None
    """How the frequencies are stretched to a longer context."""


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts."""

    n_experts: int
    """Experts of a layer."""
    top_k: int
    """Experts that a token goes to."""
    expert_size: int
    """Width of an expert."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts."""
    renormalize: bool = True
    """Whether a token's weights are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Groups of neighbouring experts."""
    groups_used: int = 1
    """Groups that a token may use."""
    group_score: Literal["max", "top2_sum"] = "max"
    """What makes a group good."""
    router_bias: bool = False
    """Whether a bias is added to the scores for the choice."""
    shared_size: int = 0
    """Width of the expert of all tokens; 0 for none."""
    shared_gate: bool = False
    """Whether the shared expert is multiplied by a sigmoid gate."""
    layers: frozenset[int] = frozenset()
    """Layers that have experts."""

    @property
    def routing(self) -> dict[str, Any]:
        """The arguments of `nbflow_kernels.moe_routing` that it means."""
        return {
            "top_k": self.top_k,
            "scoring": self.scoring,
            "renormalize": self.renormalize,
            "n_groups": self.groups,
            "top_k_groups": self.groups_used,
            "group_score": self.group_score,
            "routed_scaling_factor": self.scale,
        }


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads from one short vector.

    The queries and keys of a head are those of `ModelSpec.head_dim` columns, of which the last
    ``rope.dim`` are rotated; the rotated part of the keys is the same for all heads.  The cache
    holds the short vector and that part, one behind the other.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    """Width of the short vector (C)."""
    q_rank: int
    """Width of the vector that the queries are made of; 0 if they are made of the input."""
    value_dim: int
    """Width of a head's values."""
    norm_eps: float
    """Added to the mean square in the norms of these vectors."""


@dataclass(frozen=True)
class Architecture:
    """Fields of a model spec, and what follows from them alone."""

    name: str
    """Name of the released model, or of the checkpoint's folder or file."""
    family: str
    """Name of the family file."""
    vocab_size: int
    """Rows of the token embedding and of the head."""
    hidden_size: int
    """Width of the residual stream (E)."""
    intermediate_size: int
    """Width of the feed-forward network (I)."""
    n_layers: int
    """Number of layers (L)."""
    n_heads: int
    """Query heads (H)."""
    n_kv_heads: int
    """Key/value heads (G); `n_heads` is a multiple of it.  Latent attention has one."""
    head_dim: int
    """Width of one head (D)."""
    max_context: int
    """Longest sequence, in tokens."""
    norm: Literal["rms", "layer"]
    """Kind of the norms."""
    norm_eps: float
    """Added to the mean square (or the variance)."""
    activation: Activation
    """Activation of the feed-forward network."""
    gated: bool
    """Whether the feed-forward network is act(gate) * up, or act(up)."""
    rope: RopeSpec
    """Rotary position embedding; dim 0 without one."""
    sm_scale: float
    """Factor of the attention scores, usually 1 / sqrt(head_dim)."""
    window: int | None
    """Sliding window in tokens, or None."""
    logits_soft_cap: float | None
    """cap * tanh(score / cap) on attention scores, or None."""
    tied_head: bool
    """Whether the head is the token embedding."""
    tensors: dict[str, str] = field(repr=False)
    """Our tensor name -> the checkpoint's; {i} is the layer, {j} the expert or head."""
    ignored_tensors: tuple[str, ...] = ()
    """Shell patterns of checkpoint tensors that are not weights."""
    biases: frozenset[str] = frozenset()
    """Our names (without ``.bias``) of the layers' matrices that have a bias, e.g. ``attn.q``."""
    bos_token_id: int | None = None
    """Beginning of sequence."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a sequence."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids that are never generated."""
    moe: MoeSpec | None = None
    """Mixture of experts, or None."""
    latent: LatentSpec | None = None
    """Latent attention, or None."""
    attention_sinks: bool = False
    """Whether each head has one more score in the softmax, that of no key."""
    local_rope: RopeSpec | None = None
    """Rotary embedding of the layers with the window, if another one."""
    full_layers: frozenset[int] = frozenset()
    """Layers that see everything although there is a window."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers whose queries and keys are not rotated."""
    causal: bool = True
    """Whether a token sees only those before it."""
    embed_size: int = 0
    """Width of the token embedding, 0 if `hidden_size`."""
    type_vocab_size: int = 0
    """Rows of the token type embedding, 0 for none."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    norm_weight: bool = True
    """Whether the norms have weights."""
    norm_bias: bool = True
    """Whether norms of kind layer have a bias."""
    norm_place: Literal["pre", "post", "sandwich", "output"] = "pre"
    """Where the norms of a layer are; see `nbflow.spec.fields`."""
    embed_norm: bool = False
    """Whether the embeddings go through a norm."""
    final_norm: bool = True
    """Whether there is a norm before the head."""
    qk_norm: Literal["none", "head", "each_head", "all"] = "none"
    """Norm of queries and keys."""
    qk_norm_kind: Literal["rms", "layer"] = "rms"
    """Kind of that norm."""
    qkv_layout: Literal["blocks", "groups"] = "blocks"
    """Rows of a fused attn.qkv."""
    gate_up_layout: Literal["blocks", "neighbours"] = "blocks"
    """Rows of the experts' gate and up in one tensor."""
    experts_transposed: bool = False
    """Whether the matrices of all experts in one tensor are stored (in, out)."""
    position: Literal["rope", "alibi", "relative", "learned", "sinusoidal", "none"] = "rope"
    """How positions come in."""
    position_offset: int = 0
    """Position 0 is this row of the table."""
    sinusoids: Literal["fairseq", "paper"] = "fairseq"
    """Frequencies of the sinusoidal embedding."""
    bias_buckets: int = 32
    """Buckets of distances of the relative bias."""
    bias_max_distance: int = 128
    """Distance from which on the last bucket holds."""
    alibi_scaled: bool = False
    """Whether ALiBi's bias is multiplied by `sm_scale` too."""
    residual: Literal["sequential", "parallel", "parallel_two_norms"] = "sequential"
    """Whether attention and feed-forward network follow each other."""
    transposed: bool = False
    """Whether the layers' matrices are stored (in, out)."""
    embed_scale: float = 1.0
    """Factor of the token embeddings."""
    residual_scale: float = 1.0
    """Factor of what a sublayer adds."""
    logits_scale: float = 1.0
    """Factor of the logits."""
    head_soft_cap: float | None = None
    """cap * tanh(logit / cap), or None."""
    head_bias: bool = False
    """Whether the head has a bias."""
    normalize_head: bool = False
    """Whether the head's rows are divided by their lengths."""
    head_transform: bool = False
    """Whether a linear, the activation and a norm come before the head."""
    head: bool = True
    """Whether there is a head."""
    encoder: Architecture | None = None
    """The encoder whose hidden states the layers attend to, or None."""
    decoder_start_id: int | None = None
    """First token of a decoder that has an encoder."""

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer."""
        return None if layer in self.full_layers else self.window

    def rope_of(self, layer: int) -> RopeSpec:
        """Return the rotary embedding of a layer; dim 0 if it has none."""
        if layer in self.unrotated_layers:
            return replace(self.rope, dim=0, scaling=None)
        local = self.local_rope is not None and self.window_of(layer) is not None
        return self.local_rope if local and self.local_rope is not None else self.rope

    @cached_property
    def short_context(self) -> int | None:
        """LongRoPE's original context, up to which sequences have the short divisors.

        None if all sequences have the same rotary angles.
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
        """Rows of the parts of a rotary table: for sequences up to this length."""
        short = self.short_context
        return (self.max_context,) if short is None else (short, self.max_context)

    def is_long(self, length: int) -> bool:
        """Return whether a sequence of so many tokens has LongRoPE's long divisors."""
        return self.short_context is not None and length > self.short_context

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        return self.moe is not None and layer in self.moe.layers

    @property
    def value_dim(self) -> int:
        """Columns of what a head gives to attn.o."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def cached_dim(self) -> int:
        """Columns of a cached key vector; latent attention's begins with the values."""
        return self.head_dim if self.latent is None else self.latent.kv_rank + self.rope.dim

    @property
    def embed_width(self) -> int:
        """Columns of the token embedding and of the head."""
        return self.embed_size or self.hidden_size

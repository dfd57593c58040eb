"""Records of the parts of a `ModelSpec`: positions, heads, experts, mixers, kinds of layers.

`nbflow.spec.fields.FIELDS` describes the fields of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nbflow_kernels.position import RopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding."""

    style: Literal["half", "interleaved"]
    """Columns that form a pair: (j, j + d/2) or (2j, 2j + 1)."""
    theta: float
    dim: int
    """Rotated columns of each head; the rest pass through."""
    scaling: RopeScaling | None = None
    """Scaling of the frequencies to a longer context."""


@dataclass(frozen=True)
class HeadShape:
    """Heads of attention of one layer, as the KV cache holds them."""

    n_kv_heads: int
    key_dim: int
    """Columns of a head's queries and keys; of MLA, those of the latent vector and its rotation."""
    value_dim: int


BIAS_COLUMNS = 16
"""Columns of cached keys for a bias: one, and zeros that keep vectors aligned."""


@dataclass(frozen=True)
class TemperatureSpec:
    """Factor of queries that grows with their position p.

    It is ``1 + scale * ln(1 + (p + offset) // floor)``.
    """

    scale: float
    floor: int
    """Positions per step of the factor."""
    offset: int = 0
    layers: Literal["all", "unrotated"] = "all"
    """All layers, or those without rotation."""


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts."""

    n_experts: int
    top_k: int
    expert_size: int
    latent_size: int = 0
    """Width of the experts' inputs and outputs, between two projections; 0 for none."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """Divide a token's weights by their sum."""
    margin: float = 0.0
    """`mixer_margin` of `nbflow_kernels.moe_routing`."""
    scale: float = 1.0
    groups: int = 1
    """Groups of neighbouring experts."""
    groups_used: int = 1
    """Groups per token."""
    group_score: Literal["max", "top2_sum"] = "max"
    router_bias: bool = False
    weighs_inputs: bool = False
    """A token's weights multiply the inputs of its experts, not their outputs."""
    shared_size: int = 0
    shared_gate: bool = False
    layers: frozenset[int] = frozenset()
    output_scale: float = 1.0
    beside_dense: bool = False
    """The experts are added to a dense network; router and experts have norms of their own."""

    @property
    def routing(self) -> dict[str, Any]:
        """Arguments of `nbflow_kernels.moe_routing`."""
        return {
            "top_k": self.top_k,
            "scoring": self.scoring,
            "renormalize": self.renormalize,
            "n_groups": self.groups,
            "top_k_groups": self.groups_used,
            "group_score": self.group_score,
            "routed_scaling_factor": self.scale,
            "mixer_margin": self.margin,
        }


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads from one latent vector.

    Queries and keys of a head have `ModelSpec.head_dim` columns, of which the last ``rope.dim`` are
    rotated; the rotated part of the keys is shared by all heads.  The cache holds the latent vector
    followed by that part.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    q_rank: int
    value_dim: int
    norm_eps: float
    """Epsilon of the norms of the latent vectors."""


@dataclass(frozen=True)
class IndexerSpec:
    """Selection of the keys of latent attention by a small attention of its own.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, section 2.1.
    """

    heads: int
    dim: int
    """Columns of an index query and of the index key, which all heads share."""
    top_k: int
    """Keys that a token attends to."""
    rope_style: Literal["half", "interleaved"]
    layers: frozenset[int]
    """Layers that select keys; each other one uses the selection of the layer before it."""


Mixer = Literal[
    "attention", "short_conv", "gated_delta_rule", "mamba1", "mamba2", "lightning_attention", "none"
]  # fmt: skip
"""Sublayer that mixes the tokens of a sequence."""
CacheSide = Literal["keys", "values"]
NormPlace = Literal["pre", "post", "sandwich", "output", "stream"]


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer: its two sublayers and the place of their norms."""

    mixer: tuple[Mixer, ...] = ("attention",)
    """Mixers that read the same input and whose outputs are added."""
    feed_forward: bool = True
    """False for a layer that is a mixer alone."""
    op: str | None = None
    """Op of a plugin in the place of the mixer, which is then "none"."""
    feed_forward_op: str | None = None
    """Op of a plugin in the place of the feed-forward network, and `feed_forward` is False."""
    window: bool = False
    """Attention with the sliding window, if the model has one."""
    chunk: bool = False
    """Attention within chunks of positions, if the model has them."""
    norm_place: NormPlace | None = None
    """None for `ModelSpec.norm_place`."""


LAYER_KINDS = {
    "full_attention": LayerKind(),
    "sliding_attention": LayerKind(window=True),
    "chunked_attention": LayerKind(chunk=True),
}
"""Kinds of layers that every family knows."""


@dataclass(frozen=True)
class DeltaSpec:
    """Gated delta rule: a matrix per value head as state, and short convolutions of q, k and v.

    Value heads form groups of ``value_heads / key_heads`` that share a key head.

    References
    ----------
    .. [1] S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    norm_eps: float
    """Epsilon of the norm of the output."""
    beta_scale: float = 1.0
    """Factor of the write strength."""
    decay: Literal["head", "channel"] = "head"
    rank: int = 0
    """Width of the compressed decays and output gates; 0 for none."""
    gate: Literal["silu", "sigmoid"] = "silu"
    key_copies: int = 1
    """Times that all key heads of the checkpoint come in turn."""

    @property
    def decays(self) -> int:
        """Decays per token: one for each value head, or for each column of the keys."""
        return self.value_heads * (self.key_dim if self.decay == "channel" else 1)

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class StateSpaceSpec:
    """Mamba-2: a state of `head_dim` by `state_dim` numbers per head.

    Heads form groups that share input and output vectors.

    References
    ----------
    .. [1] T. Dao, A. Gu, "Transformers are SSMs", arXiv:2405.21060, section 7.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    norm_groups: int
    """Groups of columns that the norm of the output normalizes."""
    dt_min: float = 0.0
    dt_max: float | None = None
    """Least and largest time step."""
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    input_scale: float = 1.0
    scales: tuple[float, ...] = ()
    """Factors of the projections z, x, b, c and dt; empty for 1."""
    output_scale: float = 1.0

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class SelectiveSpec:
    """Mamba-1: a state of `state_dim` numbers per channel, and time steps of low rank.

    References
    ----------
    .. [1] A. Gu, T. Dao, "Mamba", arXiv:2312.00752, section 3.
    """

    width: int
    """Channels."""
    state_dim: int
    dt_rank: int
    norm: Literal["none", "plain", "weighted"]
    norm_eps: float
    """Epsilon of the norms of time steps, input and output vectors."""


@dataclass(frozen=True)
class ClassifierSpec:
    """Classification head on the first token: a linear layer, an activation, a linear layer."""

    activation: Literal["tanh", "relu"]
    labels: tuple[str, ...]
    problem_type: Literal["regression", "single_label", "multi_label"]
    """Scores are the logits; their softmax; or the sigmoid of each."""

"""What a model is made of: the one description that the program, the planner and the readers share.

A `ModelSpec` is resolved: every number is known.  It comes from a family (`families/*.toml`, how an
architecture is composed and how its tensors and config keys are called) and a checkpoint's own
configuration; see `nbflow.spec.resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding."""

    style: Literal["half", "interleaved"]
    """Which columns form a pair: (j, j + d/2) or (2j, 2j + 1)."""
    theta: float
    """Base of the frequencies."""
    dim: int
    """Rotated columns of each head; the rest pass through."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, fully resolved."""

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
    """Number of decoder layers (L)."""
    n_heads: int
    """Query heads (H)."""
    n_kv_heads: int
    """Key/value heads (G); `n_heads` is a multiple of it."""
    head_dim: int
    """Width of one head (D)."""
    max_context: int
    """Longest sequence, in tokens."""
    norm: Literal["rms", "layer"]
    """Kind of the norms."""
    norm_eps: float
    """Added to the mean square (or the variance)."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"]
    """Activation of the feed-forward network."""
    gated: bool
    """Whether the feed-forward network is act(gate) * up, or act(up)."""
    rope: RopeSpec
    """Rotary position embedding."""
    sm_scale: float
    """Factor of the attention scores, usually 1 / sqrt(head_dim)."""
    window: int | None
    """Sliding window in tokens, or None."""
    logits_soft_cap: float | None
    """cap * tanh(score / cap) on attention scores, or None."""
    tied_head: bool
    """Whether the head is the token embedding."""
    tensors: dict[str, str] = field(repr=False)
    """Our tensor name -> the checkpoint's; ``{i}`` stands for the layer."""
    ignored_tensors: tuple[str, ...] = ()
    """Shell patterns of checkpoint tensors that are not weights."""
    biases: frozenset[str] = frozenset()
    """Our names (without ``.bias``) of the layers' tensors that have a bias, e.g. ``attn.q``."""
    bos_token_id: int | None = None
    """Beginning of sequence."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a sequence."""

    def __post_init__(self) -> None:
        from nbflow.spec.shapes import check_numbers

        check_numbers(self)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return our name -> shape of every tensor of the model, layers written out."""
        from nbflow.spec.shapes import tensor_shapes

        return tensor_shapes(self)

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name for one of ours (``layers.3.attn.q.weight``)."""
        parts = name.split(".")
        if parts[0] != "layers":
            return self.tensors[name]
        pattern = self.tensors[".".join(["layers", "{i}", *parts[2:]])]
        return pattern.replace("{i}", parts[1])

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as plain data (for JSON and for hashing)."""
        from dataclasses import asdict

        data = asdict(self)
        data["biases"] = sorted(self.biases)
        return data

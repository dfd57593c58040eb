"""Names and shapes of the tensors a `ModelSpec` asks for, and the checks of its numbers.

Our names::

    embed.weight                        (V, E)
    layers.{i}.attn_norm.weight         (E,)      .bias too for a LayerNorm
    layers.{i}.attn.q.weight            (H*D, E)  attn.k, attn.v: (G*D, E)
    layers.{i}.attn.o.weight            (E, H*D)
    layers.{i}.ffn_norm.weight          (E,)
    layers.{i}.ffn.gate.weight          (I, E)    only if gated
    layers.{i}.ffn.up.weight            (I, E)
    layers.{i}.ffn.down.weight          (E, I)
    final_norm.weight                   (E,)
    head.weight                         (V, E)    absent if tied
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.spec.model_spec import ModelSpec


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer, names without the ``layers.{i}.`` prefix."""
    E, FF = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    matrices = {
        "attn.q": (q_rows, E),
        "attn.k": (kv_rows, E),
        "attn.v": (kv_rows, E),
        "attn.o": (E, q_rows),
        "ffn.gate": (FF, E),
        "ffn.up": (FF, E),
        "ffn.down": (E, FF),
    }
    if not spec.gated:
        del matrices["ffn.gate"]
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in ("attn_norm", "ffn_norm"):
        shapes[f"{norm}.weight"] = (E,)
        if spec.norm == "layer":
            shapes[f"{norm}.bias"] = (E,)
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        if name in spec.biases:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the model."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, spec.hidden_size)}
    for i in range(spec.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(spec).items()}
    shapes["final_norm.weight"] = (spec.hidden_size,)
    if spec.norm == "layer":
        shapes["final_norm.bias"] = (spec.hidden_size,)
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def check_numbers(spec: ModelSpec) -> None:
    """Raise `UsageError` if the numbers of `spec` cannot belong to one model."""
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "max_context",
    ):
        value = getattr(spec, name)
        if not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
            raise UsageError(f"{spec.name}: {name} must be a positive integer, got {value!r}")
    if spec.n_heads % spec.n_kv_heads:
        raise UsageError(
            f"{spec.name}: n_heads must be a multiple of n_kv_heads, "
            f"got {spec.n_heads} and {spec.n_kv_heads}"
        )
    if spec.rope.dim > spec.head_dim or spec.rope.dim % 2 or spec.rope.dim < 0:
        raise UsageError(
            f"{spec.name}: rope.dim must be even and at most head_dim = {spec.head_dim}, "
            f"got {spec.rope.dim}"
        )

"""Matrices that read the output of each norm, where factors and rotations can be absorbed."""

from __future__ import annotations

from nbflow.spec.model_spec import ModelSpec

_ATTENTION = ("attn.q", "attn.k", "attn.v")
_LATENT = ("attn.q", "attn.q_a", "attn.kv_a")
_INDEXER = ("attn.index_k", "attn.index_weights")


def experts_can_transform(spec: ModelSpec) -> bool:
    """Return True if experts can absorb factors and rotations.

    They have no biases, contiguous rows and no projections into another width.
    """
    if spec.moe is not None and spec.moe.latent_size:
        return False
    turned = spec.experts_transposed or spec.experts_down_transposed
    in_rows = spec.gate_up_layout == "blocks" and not turned
    return in_rows and "moe.down" not in spec.biases


def has_plain_mixers(spec: ModelSpec) -> bool:
    """Return True if all layers are attention whose output is linear in the values."""
    return not (spec.is_recurrent or spec.output_gate or spec.qkv_clip)


def has_plain_residuals(spec: ModelSpec) -> bool:
    """Return True if sublayers add to one residual stream, and nothing else reads it or a norm."""
    around = spec.layer_embed_size or spec.laurel_rank or spec.layer_scale or spec.residual_weights
    shared = spec.kv_shared_layers or spec.values_from_keys != "none" or spec.value_norm
    beside = bool(spec.retrieved_experts) or (spec.moe is not None and spec.moe.beside_dense)
    return not (around or shared or beside or spec.streams > 1)


def norm_readers(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return our names of the norms before sublayers and head -> the matrices that read them.

    The readers are complete, so that a norm may change together with them.  A tied head is left
    out, as it is the embedding.  Empty for models with norms after the sublayers, whose outputs are
    added to the residual stream.
    """
    shapes = spec.tensor_shapes()
    readers: dict[str, tuple[str, ...]] = {}
    if spec.norm_place not in ("pre", "sandwich"):
        return readers
    for i in range(spec.n_layers):
        prefix = f"layers.{i}."
        attention = [f"{prefix}{name}.weight" for name in _attention(spec, i)]
        forward = _forward(spec, i)
        if spec.residual == "parallel":
            readers[f"{prefix}attn_norm"] = (*attention, *forward)
        else:
            readers[f"{prefix}attn_norm"] = tuple(attention)
            readers[f"{prefix}ffn_norm"] = tuple(forward)
        if spec.encoder is not None:
            readers[f"{prefix}cross_norm"] = (f"{prefix}cross.q.weight",)
    if spec.head and spec.final_norm and not spec.tied_head and not spec.head_transform:
        readers["final_norm"] = ("embed.out.weight",) if "embed.out.weight" in shapes else (
            "head.weight",
        )  # fmt: skip
    return readers


def _attention(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    if spec.latent is None:
        return _ATTENTION
    indexes = spec.indexer is not None and layer in spec.indexer.layers
    names = _LATENT[1:] if spec.latent.q_rank else (_LATENT[0], _LATENT[2])
    return (*names, *_INDEXER) if indexes else names


def _forward(spec: ModelSpec, layer: int) -> list[str]:
    """Return the matrices that read the input of the feed-forward network, including the router."""
    prefix = f"layers.{layer}."
    if not spec.has_experts(layer):
        return [f"{prefix}ffn.{part}.weight" for part in _first_products(spec)]
    assert spec.moe is not None
    names = ["router.weight"]
    for j in range(spec.moe.n_experts):
        names += [f"moe.{j}.{part}.weight" for part in _first_products(spec)]
    if spec.moe.shared_size:
        names += [f"shared.{part}.weight" for part in _first_products(spec)]
        names += ["shared_gate.weight"] if spec.moe.shared_gate else []
    return [prefix + name for name in names]


def _first_products(spec: ModelSpec) -> tuple[str, ...]:
    """Return the matrices of a feed-forward network that read its input."""
    return ("gate", "up") if spec.gated else ("up",)

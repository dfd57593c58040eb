r"""Hadamard rotation (QuaRot) of the residual stream and of the values of each head.

With a rotation R of the residual stream and the weights g of the norm before a matrix,

.. math:: \mathrm{rms}(x R) = \mathrm{rms}(x) R, \qquad
          W (g \odot \mathrm{rms}(x)) = (W \, \mathrm{diag}(g) R) \, \mathrm{rms}(x R)

so norm weights move into the matrices that read the stream, which become W diag(g) R; those that
write to it become :math:`R^T W`, the embedding E R.  A tied head becomes the separate matrix
E diag(g) R.  Values are rotated per head: attention is linear in them, so that attn.v becomes
:math:`R_D^T W` and attn.o :math:`W R_D` in every head of D columns.

Not rotated: the inputs of ffn.down, which follow an activation and would need an online Hadamard
transform, and queries and keys, because of the rotary embedding.

Source: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024,
arXiv:2404.00456, section 4, stages 1a and 1c (without the online transforms).
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint import WeightFile
from nbflow.program.read_operand import read_operand
from nbflow.program.records import Operand
from nbflow.quantization.transforms.norm_consumers import (
    experts_can_transform,
    has_plain_mixers,
    has_plain_residuals,
    norm_readers,
)
from nbflow.quantization.transforms.transform import (
    ChannelScale,
    HadamardRotation,
    LinearMap,
    WeightTransform,
)
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers.hadamard import Rotation


def rotated_spec(spec: ModelSpec) -> ModelSpec:
    """Return the specification with a rotated residual stream, or raise if that is not exact."""
    wrong = {
        "its norms are LayerNorms, which subtract the mean": spec.norm != "rms",
        "its norms are not before the sublayers": spec.norm_place != "pre",
        "its embeddings go through a norm": spec.embed_norm,
        "it is an encoder-decoder model": spec.encoder is not None,
        "its embedding is narrower than the residual stream": spec.embed_width != spec.hidden_size,
        "positions or token types are added to the residual stream": (
            spec.position in ("learned", "sinusoidal") or spec.type_vocab_size > 0
        ),
        "the rows of its head are normalized": spec.normalize_head,
        "it has no norm before the head": not spec.final_norm or not spec.head,
        "its head has a transform layer": spec.head_transform,
        "it has recurrent layers or gated attention": not has_plain_mixers(spec),
        "other parts than sublayers read its residual stream, or layers share keys and values": (
            not has_plain_residuals(spec)
        ),
        "its experts have biases, non-contiguous rows or a latent width": not experts_can_transform(
            spec
        ),
    }
    found = [reason for reason, holds in wrong.items() if holds]
    if found:
        raise UsageError(
            f"{spec.name} cannot be rotated exactly: {'; '.join(found)}; use another "
            "quantizer, e.g. 'awq' or 'gptq'"
        )
    return dataclasses.replace(spec, tied_head=False)


def rotate(spec: ModelSpec, file: WeightFile, seed: int = 0) -> WeightTransform:
    """Rotate the residual stream and the values of each head.

    Raises
    ------
    UsageError
        If the model cannot be rotated exactly, or a width has no Hadamard matrix.
    """
    after = rotated_spec(spec)
    stream = HadamardRotation(Rotation(spec.hidden_size, seed))
    columns: dict[str, tuple[LinearMap, ...]] = {}
    rows: dict[str, tuple[LinearMap, ...]] = {}
    vectors: dict[str, NDArray[np.float32]] = {}
    for norm, readers in norm_readers(after).items():
        scale: tuple[LinearMap, ...] = ()
        if spec.norm_weight:
            scale = (ChannelScale(_norm_weight(spec, file, norm)),)
            ones = np.full(spec.hidden_size, 1.0 - spec.norm_offset, np.float32)
            vectors[f"{norm}.weight"] = ones
        for name in readers:
            columns[name] = (*scale, stream)
    columns["embed.weight"] = (stream,)
    for name in spec.tensor_shapes():
        if name.endswith(("attn.o.weight", "attn.o.bias", "down.weight", "down.bias")):
            rows[name] = (stream,)
    if spec.latent is None:
        head = HadamardRotation(Rotation(spec.head_dim, seed + 1))
        for i in range(spec.n_layers):
            columns[f"layers.{i}.attn.o.weight"] = (head,)
            for kind in ("weight", "bias"):
                if f"layers.{i}.attn.v.{kind}" in spec.tensor_shapes():
                    rows[f"layers.{i}.attn.v.{kind}"] = (head,)
    notes: tuple[str, ...] = ()
    if spec.tied_head:
        n = spec.vocab_size * spec.hidden_size
        notes = (f"the head is no longer tied to the embedding: {n:,} more weights",)
    return WeightTransform(after, columns, rows, vectors, notes)


def _norm_weight(spec: ModelSpec, file: WeightFile, norm: str) -> NDArray[np.float64]:
    stored = read_operand(spec, file, Operand(f"{norm}.weight")).reshape(-1)
    return stored.astype(np.float64) + spec.norm_offset

"""Hadamard-rotated KV caches: keys and values without outlier channels, for block formats.

A block format spends its range on the largest number of a block, and a few channels of the keys are
much larger than the others.  With H the orthogonal, symmetric matrix of
`nbflow_kernels.hadamard_transform`, the cache holds H k and H v.  Queries are rotated too, so that
scores stay (H q) . (H k) = q . k, and the output of attention is rotated back, H H = 1.  The
rotation comes after the norms and the rotary embedding of queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from nbflow.spec.kv_formats import parse_kv
from nbflow.spec.layer_specs import CacheSide
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError, unknown_name

Rotation = Literal["none", "hadamard"]
ROTATIONS = ("none", "hadamard")


def with_rotation(spec: ModelSpec, rotation: str, kv: str) -> ModelSpec:
    """Return the specification of a model with rotated caches.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    rotation : {"none", "hadamard"}
        "hadamard" rotates keys and values whose format has blocks; floats (f8 included) have an
        exponent for each number and gain nothing.
    kv : str
        Formats of the cache; see `nbflow.spec.kv_formats`.

    Raises
    ------
    UsageError
        If the rotation or the format is unknown, or the model's cache cannot be rotated.
    """
    formats = parse_kv(kv)
    if rotation not in ROTATIONS:
        raise unknown_name("kv_rotation", rotation, ROTATIONS)
    names: tuple[CacheSide, CacheSide] = ("keys", "values")
    rotated = {
        (name, layer)
        for layer in range(spec.n_layers)
        for name, format in zip(names, formats.of(layer, spec.n_layers), strict=True)
        if format.block_size > 1
    }
    if rotation == "none" or not rotated:
        return spec
    wrong = ""
    if spec.latent is not None:
        wrong = "caches latent vectors, which are keys and values at once"
    elif spec.attention is not None:
        wrong = f"has the attention variant {spec.attention}, which sees single channels"
    else:
        odd = {size for i in range(spec.n_layers) for size in _head_sizes(spec, i) if size % 2}
        if odd:
            wrong = f"has heads of {min(odd)} numbers, which no power of two but 1 divides"
    if wrong:
        raise UsageError(f"kv_rotation='hadamard': {spec.name} {wrong}; use kv_rotation='none'")
    return replace(spec, rotated_cache=frozenset(rotated))


def _head_sizes(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Return the numbers of a key and of a value of a layer's heads."""
    heads = spec.heads_of(layer)
    return heads.key_dim, heads.value_dim

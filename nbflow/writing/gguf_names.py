"""How a model that is no GGUF file becomes one: names, order of rows, and what it says of itself.

The family of the GGUF file (``families/*_gguf.toml``) gives the names.  Rows of rotary pairs are
made neighbours where that family turns neighbours and the checkpoint's does not, as llama.cpp's
converter does.  What the file will say is then read as `nbflow.spec.resolve` reads it, and compared
with the model: what GGUF cannot say is refused, not lost.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.spec.build import build_spec
from nbflow.spec.family import Family, families, get_family
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.stored import stored
from nbflow.weights import WeightFile, gguf
from nbflow.weights.dtypes import ITEM_BYTES
from nbflow.writing.gguf_file import F32, U32, Metadata
from nbflow.writing.plan import Choice, NewTensor
from nbflow.writing.rows import ModelRows
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import LinearRopeScaling

ARCHITECTURES = {
    "llama": "llama", "internlm": "llama", "llama2c": "llama", "llama_ggml": "llama",
    "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
}  # fmt: skip
"""Families that can be written -> what llama.cpp calls the architecture."""
_MAY_DIFFER = (
    "name", "family", "tensors", "ignored_tensors", "biases", "eos_token_ids", "norm_eps", "rope",
    "qkv_layout", "sm_scale",
)  # fmt: skip
"""Fields that are compared by themselves, or not at all because they say how tensors are stored."""
_F32_ERROR = 2.0**-23  # GGUF says numbers as float32


def target_family(spec: ModelSpec) -> tuple[str, Family]:
    """Return the architecture and the family of the GGUF file of a model."""
    if spec.family not in ARCHITECTURES:
        raise UsageError(
            f"models of family {spec.family!r} cannot be written as GGUF, only those of "
            f"{', '.join(ARCHITECTURES)}, and GGUF files of any family; "
            "safetensors (a folder as OUT) takes all"
        )
    arch = ARCHITECTURES[spec.family]
    named = {kind: f.name for f in families().values() for kind in f.model_types}
    return arch, get_family(named[f"gguf-{arch}"], spec.name)


def model_metadata(spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return the metadata that says the model's numbers."""
    numbers = {
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_context,
        "embedding_length": spec.hidden_size,
        "block_count": spec.n_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.n_heads,
        "attention.head_count_kv": spec.n_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.dimension_count": spec.rope.dim,
    }
    floats = {
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.freq_base": spec.rope.theta,
    }
    if spec.moe is not None:
        numbers["expert_count"] = spec.moe.n_experts
        numbers["expert_used_count"] = spec.moe.top_k
        if spec.moe.expert_size != spec.intermediate_size:
            numbers["expert_feed_forward_length"] = spec.moe.expert_size
    metadata: dict[str, Any] = {
        "general.architecture": ((gguf.STRING,), arch),
        "general.type": ((gguf.STRING,), "model"),
        "general.name": ((gguf.STRING,), spec.name),
    }
    if isinstance(spec.rope.scaling, LinearRopeScaling):
        metadata[f"{arch}.rope.scaling.type"] = ((gguf.STRING,), "linear")
        floats["rope.scaling.factor"] = spec.rope.scaling.factor
    metadata |= {f"{arch}.{key}": ((U32,), value) for key, value in numbers.items()}
    metadata |= {f"{arch}.{key}": ((F32,), float(np.float32(x))) for key, x in floats.items()}
    ends = ("eos", "eot")  # two ids that end a sequence have a place
    special = {"bos": spec.bos_token_id, **dict(zip(ends, spec.eos_token_ids, strict=False))}
    for name, value in special.items():
        if value is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = ((U32,), value)
    return metadata


def plan_renamed(
    spec: ModelSpec, file: WeightFile, family: Family, choice: Choice
) -> list[NewTensor]:
    """Return the tensors under the names of a GGUF family; experts lie in one tensor each."""
    neighbours = spec.rope.style == "half" and family.structure["rope_style"] == "interleaved"
    if spec.rope.style == "interleaved" and family.structure["rope_style"] == "half":
        raise UsageError(f"{spec.name}: the rotary pairs of {family.name} lie apart")
    if neighbours and spec.rope.dim != spec.head_dim:
        raise UsageError(f"{spec.name}: only part of each head turns; {family.name} cannot say it")
    held: dict[str, list[str]] = {}
    for ours in spec.tensor_shapes():
        held.setdefault(_name(ours, family), []).append(ours)
    tensors = []
    for name, members in held.items():
        shape = spec.shape_of(members[0])
        turns = ".attn.q." in members[0] or ".attn.k." in members[0]
        group = spec.head_dim if neighbours and turns else 1
        rows = tuple(ModelRows(spec, file, ours, group) for ours in members)
        whole = (len(members), *shape) if ".moe." in members[0] else shape
        chosen = choice.of(name, [(ours, spec.shape_of(ours)) for ours in members])
        dtype = rows[0].dtype
        tensors.append(NewTensor(name, whole, dtype, chosen or _kept(dtype, shape), rows))
    choice.check_rules()
    return tensors


def _kept(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the type of a tensor that is not converted: vectors are float32, as GGML wants."""
    if len(shape) < 2:
        return "f32"
    is_plain = dtype in ITEM_BYTES
    return dtype if dtype in ("f32", "f16", "bf16") or not is_plain else "f32"


def _name(ours: str, family: Family) -> str:
    """Return what a family calls one of our tensors; an expert's name is that of all of them."""
    parts = ours.split(".")
    layer = parts[1] if parts[0] == "layers" else ""
    if layer:
        parts[1] = "{i}"
    if parts[2:3] == ["moe"]:
        parts[3] = "{j}"
    kind = parts[-1]
    names = family.tensors.get(".".join([*parts[:-1], "weight"]))
    if names is None:
        raise UsageError(f"family {family.name!r} has no name for {ours}")
    return names[0].replace("{i}", layer).removesuffix("weight") + kind


def divisors_of(spec: ModelSpec) -> np.ndarray[Any, Any] | None:
    """Return the divisors of the rotary frequencies of Llama 3.1, float32 (D/2,), or None."""
    scaling = spec.rope.scaling
    if not isinstance(scaling, nk.Llama3RopeScaling):
        return None
    plain = spec.rope.theta ** (-np.arange(0, spec.rope.dim, 2) / spec.rope.dim)
    stretched, _ = scaling.frequencies(spec.rope.dim, spec.rope.theta, spec.max_context)
    return (plain / stretched).astype(np.float32)


def check_reading(
    spec: ModelSpec, family: Family, metadata: Metadata, names: list[str], where: str
) -> None:
    """Raise unless the new file will be read as the model that it was made of."""
    divisors = divisors_of(spec)
    read = build_spec(
        family,
        gguf.config_of({key: value for key, (_, value) in metadata.items()}),
        name=spec.name,
        where=where,
        checkpoint_tensors=names,
        rope_divisors=None if divisors is None else [float(d) for d in divisors],
    )
    for ours in spec.tensor_shapes():
        if stored(read, ours).name not in names:
            raise UsageError(f"{where}: {ours} would not be found as {stored(read, ours).name}")
    wanted, found = _comparable(spec, divisors), _comparable(read, divisors)
    for key, value in wanted.items():
        if not _is_close(value, found[key]):
            raise UsageError(
                f"{where}: GGUF files of {family.name} cannot say {key} = {value!r}: it would be "
                f"read as {found[key]!r}; write safetensors (a folder as OUT)"
            )


def _comparable(spec: ModelSpec, divisors: Any) -> dict[str, Any]:
    """Return what must be the same, one level deep."""
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    facts = {key: value for key, value in fields.items() if key not in _MAY_DIFFER}
    facts |= {"norm_eps": spec.norm_eps, "sm_scale": spec.sm_scale}
    facts |= {"rope.theta": spec.rope.theta, "rope.dim": spec.rope.dim}
    facts["rope.scaling"] = spec.rope.scaling if divisors is None else "divisors"
    facts["biases"] = sorted(spec.biases)
    return facts


def _is_close(wanted: Any, found: Any) -> bool:
    """Return whether two values are the same but for the rounding to float32."""
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=_F32_ERROR)
    if isinstance(wanted, LinearRopeScaling) and isinstance(found, LinearRopeScaling):
        return _is_close(wanted.factor, found.factor)
    return bool(wanted == found)

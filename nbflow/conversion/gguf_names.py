"""Conversion to GGUF tensors: names, order of rows, fused tensors.

The GGUF family (``families/*_gguf.toml``) gives the names.  As llama.cpp's converter does, rows of
rotary pairs are interleaved where only the GGUF family has interleaved pairs, norm offsets of the
family are added, and some matrices are fused.  The new metadata is then read back as
`nbflow.spec.resolve` reads it and compared with the model; values that differ raise an error.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.checkpoint.readers import gguf
from nbflow.checkpoint.writers.gguf import Metadata
from nbflow.conversion.format_rules import FormatRules
from nbflow.conversion.gguf_recurrent import ARCHITECTURES as RECURRENT
from nbflow.conversion.gguf_recurrent import (
    BY_HEAD,
    as_read,
    factor_of,
    is_always_float32,
    is_recurrent,
    order_of,
    shape_in_file,
)
from nbflow.conversion.plan import TensorConversion
from nbflow.conversion.tensor_rows import ModelRows, Rows, StoredRows
from nbflow.spec.family import Family, family_of
from nbflow.spec.from_config import build_spec
from nbflow.spec.layer_specs import RopeSpec
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.tensor_names import FUSED
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import Llama3RopeScaling, LongRopeScaling

ARCHITECTURES = {
    "llama": "llama", "internlm": "llama", "internlm2": "internlm2",
    "llama2c": "llama", "llama_ggml": "llama",
    "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3",
    "phi": "phi2", "phi3": "phi3", "gpt2": "gpt2", "gpt_neox": "gptneox", "falcon": "falcon",
    "bloom": "bloom", "stablelm": "stablelm", "granite": "granite", "minicpm": "minicpm",
    "orion": "orion", "olmo2": "olmo2", "olmoe": "olmoe", "cohere": "command-r",
    "cohere2": "cohere2", "starcoder2": "starcoder2", "nemotron": "nemotron", "glm4": "glm4",
    "smollm3": "smollm3", "granitemoe": "granitemoe", "mpt": "mpt",
    "deepseek": "deepseek", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss", "seed_oss": "seed_oss", "arcee": "arcee", "ernie4_5": "ernie4_5",
    "hunyuan": "hunyuan-dense", "exaone4": "exaone4", "exaone": "exaone", "dots1": "dots1",
    "glm4_moe": "glm4moe", "solar_open": "glm4moe", "bailing_moe_v2": "bailingmoe2",
    "afmoe": "afmoe", "exaone_moe": "exaone-moe", "mistral4": "mistral4",
    "glm_moe_dsa": "glm-dsa", "ministral3": "mistral3", "olmo3": "olmo2",
    "hunyuan_moe": "hunyuan-moe", "ernie4_5_moe": "ernie4_5-moe", "jais2": "jais2",
    "minimax_m2": "minimax-m2", "gpt_bigcode": "starcoder", "qwen3_vl_moe": "qwen3moe",
    "chatglm": "chatglm", "baichuan": "baichuan",
    "mistral": "llama", "qwen2_vl": "qwen2", "qwen3_vl": "qwen3", "sarvam_moe": "bailingmoe2",
    **RECURRENT,
}  # fmt: skip
"""Families that can be written -> llama.cpp's name of the architecture."""
QKV_IN_ONE = (
    "gpt2", "gptneox", "bloom", "falcon", "phi3", "mpt", "bailingmoe2", "starcoder", "chatglm",
)  # fmt: skip
"""Architectures with q, k and v concatenated in one tensor."""
_MAY_DIFFER = (
    "name", "family", "tensors", "ignored_tensors", "eos_token_ids", "rope", "qkv_layout",
    "transposed", "norm_offset", "gate_up_layout", "experts_transposed",
    "experts_down_transposed", "stored_rates",
)  # fmt: skip
"""Fields compared separately, or not at all because they describe storage."""
# GGUF stores float32; a field may be computed from two of them
_TOLERANCE = 4 * 2.0**-23


def target_family(spec: ModelSpec) -> tuple[str, Family]:
    """Return the architecture and the family of the GGUF file of a model."""
    if spec.family not in ARCHITECTURES:
        raise UsageError(
            f"models of family {spec.family!r} cannot be written as GGUF, only those of "
            f"{', '.join(ARCHITECTURES)}, and GGUF files of any family; "
            "safetensors (a folder as OUT) takes all"
        )
    arch = ARCHITECTURES[spec.family]
    if arch == "nemotron_h" and spec.moe is not None:
        arch = "nemotron_h_moe"
    return arch, family_of(f"gguf-{arch}", spec.name)


def plan_renamed(
    spec: ModelSpec, file: WeightFile, family: Family, arch: str, rules: FormatRules
) -> list[TensorConversion]:
    """Return the tensors under the names of a GGUF family; experts share a tensor."""
    interleaved = _must_interleave(spec, family)
    offset = spec.norm_offset - family.structure.get("norm_offset", 0.0)
    held: dict[str, list[str]] = {}
    for ours in spec.tensor_shapes():
        held.setdefault(_name(ours, spec, family, arch), []).append(ours)
    tensors = []
    for name, unordered in held.items():
        members = sorted(unordered, key=_position_in_tensor)
        first = members[0]
        rows = _rows(spec, file, members, interleaved, offset, arch)
        parts = [(ours, spec.shape_of(ours)) for ours in members]
        shape = shape_in_file(spec, first, _shape(spec, members))
        dtype, fixed = rows[0].dtype, is_recurrent(arch) and is_always_float32(first)
        format = (
            "f32" if fixed else rules.of(name, parts) or _kept(dtype, _shape(spec, members), name)
        )
        tensors.append(TensorConversion(name, shape, format, dtype, rows, tuple(members)))
    rules.check_rules()
    return tensors


def _rows(
    spec: ModelSpec,
    file: WeightFile,
    members: list[str],
    interleaved: bool,
    offset: float,
    arch: str,
) -> tuple[Rows, ...]:
    """Return the sources of a tensor made of some of ours."""
    first = members[0]
    role = ".".join(first.split(".")[2:-1])
    stored = {spec.tensor_layout(ours).name for ours in members}
    if role in BY_HEAD and arch.startswith("qwen3") and len(members) > 1 and len(stored) == 1:
        return (StoredRows(file, stored.pop()),)
    interleaves = interleaved and role in ("attn.q", "attn.k")
    group = spec.head_dim if interleaves else 1
    if role == "attn.k_b":  # read head by head
        group = spec.shape_of(first)[0] // spec.n_heads
    rates = is_recurrent(arch) and role.endswith("a_log") and not spec.stored_rates
    return tuple(
        ModelRows(
            spec, file, ours, group, interleaves, offset if _is_norm_weight(ours) else 0.0,
            factor_of(spec, ours), rates, order_of(spec, ours),
        )
        for ours in members
    )  # fmt: skip


def _is_norm_weight(ours: str) -> bool:
    if ours.endswith("delta.norm.weight"):
        return False
    return ours.endswith("norm.weight") or _is_of_head(ours.split("."))


def _position_in_tensor(ours: str) -> int:
    """Return the position of one of our tensors in a fused one: q, k, v; gate, up; experts."""
    parts = ours.split(".")
    if _is_of_expert(parts):
        return int(parts[3])
    if _is_of_head(parts):
        return int(parts[4])
    role = ".".join(parts[2:-1])
    return next((members.index(role) for members in FUSED.values() if role in members), 0)


def _must_interleave(spec: ModelSpec, family: Family) -> bool:
    """Return True if the rows of rotary pairs must be interleaved."""
    styles = spec.rope.style, family.structure.get("rope_style", "half")
    if not spec.rope.dim or styles[0] == styles[1]:
        return False
    if styles[0] == "interleaved":
        raise UsageError(f"{spec.name}: {family.name} cannot store interleaved rotary pairs")
    if spec.rope.dim != spec.head_dim:
        raise UsageError(f"{spec.name}: {family.name} cannot store partial rotary embeddings")
    return True


def _shape(spec: ModelSpec, members: list[str]) -> tuple[int, ...]:
    """Return the shape of a tensor made of some of ours: experts, heads, or fused matrices."""
    shapes = [spec.shape_of(ours) for ours in members]
    parts = members[0].split(".")
    if _is_of_expert(parts) or _is_of_head(parts):
        return len(members), *shapes[0]
    if members[0].endswith(("attn.k_b.weight", "attn.v_b.weight")):
        return spec.n_heads, shapes[0][0] // spec.n_heads, shapes[0][1]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _is_of_expert(parts: list[str]) -> bool:
    """Return True for the matrix of one expert; biases of experts share a tensor."""
    return parts[2:3] == ["moe"] and parts[-1] != "bias"


def _is_of_head(parts: list[str]) -> bool:
    """Return True for the norm of one head's queries or keys."""
    return parts[3:4] in (["q_norm"], ["k_norm"]) and len(parts) == 6


def _kept(dtype: str, shape: tuple[int, ...], name: str) -> str:
    """Return the type of a tensor that is not converted: float32 for vectors, as GGML requires."""
    if len(shape) < 2 or name.endswith((".bias", "_norm.weight")):
        return "f32"
    is_plain = dtype in ITEM_BYTES
    return dtype if dtype in ("f32", "f16", "bf16") or not is_plain else "f32"


def _name(ours: str, spec: ModelSpec, family: Family, arch: str) -> str:
    """Return a family's name of one of our tensors, or of the fused tensor it is part of."""
    parts = ours.split(".")
    layer = parts[1] if parts[0] == "layers" else ""
    if layer:
        parts[1] = "{i}"
    if _is_of_expert(parts):
        parts[3] = "{j}"
    if _is_of_head(parts):
        parts[4] = "{j}"
    kind = parts[-1]
    role = ".".join(parts[2:-1])
    if role in FUSED["attn.qkv"] and arch in QKV_IN_ONE:
        parts[3] = "qkv"
    pattern = ".".join([*parts[:-1], "weight"])
    names = family.tensors.get(pattern) or _fused(role, family)
    own = family.tensors.get(".".join(parts))
    if own and kind == "bias":  # a bias with its own name
        return own[0].replace("{i}", layer)
    if not names:
        raise UsageError(f"family {family.name!r} has no name for {ours}")
    # of several names the first; falcon's only norm and queries from a short vector have the last
    last = (arch == "falcon" and spec.residual == "parallel") or (
        role == "attn.q" and spec.latent is not None and spec.latent.q_rank > 0
    )
    name = names[-1 if last else 0].replace("{i}", layer)
    return name.removesuffix("weight") + kind if name.endswith(".weight") else name


def _fused(role: str, family: Family) -> tuple[str, ...] | None:
    """Return a family's name of the fused tensor with one of our matrices."""
    for fused, members in FUSED.items():
        names = family.tensors.get(f"layers.{{i}}.{fused}.weight")
        if role in members and names:
            return names
    return None


def divisors_of(spec: ModelSpec) -> dict[str, np.ndarray[Any, Any]]:
    """Return the divisors of rotary frequencies stored as GGUF tensors, float32 (D/2,).

    Llama 3.1 has one for all lengths, LongRoPE one for short and one for long sequences.
    """
    scaling, dim, theta = spec.rope.scaling, spec.rope.dim, spec.rope.theta
    if isinstance(scaling, LongRopeScaling):
        return {
            "rope_long_divisors": np.array(scaling.long_factor, np.float32),
            "rope_short_divisors": np.array(scaling.short_factor, np.float32),
        }
    if not isinstance(scaling, Llama3RopeScaling):
        return {}
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    stretched, _ = scaling.frequencies(dim, theta, spec.max_context)
    return {"rope_divisors": (plain / stretched).astype(np.float32)}


def check_reading(
    spec: ModelSpec, family: Family, metadata: Metadata, names: list[str], where: str
) -> list[str]:
    """Raise unless the new file will be read as the same model; return notes on what is lost."""
    read = build_spec(
        family,
        gguf.config_of({key: value for key, (_, value) in metadata.items()}),
        name=spec.name,
        where=where,
        checkpoint_tensors=names,
        rope_divisors={key: vector.tolist() for key, vector in divisors_of(spec).items()},
    )
    found_as = {ours: read.tensor_layout(ours).name for ours in read.tensor_shapes()}
    for ours in spec.tensor_shapes():
        if found_as.get(ours, names[0]) not in names:
            raise UsageError(f"{where}: {ours} would not be found as {found_as[ours]}")
    expected, notes = as_read(spec)
    wanted, found = _comparable(expected), _comparable(read)
    for key, value in wanted.items():
        if not _is_close(value, found.get(key)):
            raise UsageError(
                f"{where}: GGUF files of {family.name} cannot store {key} = {value!r}: it would be "
                f"read as {found.get(key)!r}; write safetensors (a folder as OUT)"
            )
    unread = spec.tensor_shapes().keys() - found_as.keys()
    if unread:
        raise UsageError(f"{where}: GGUF files of {family.name} have no {min(unread)}")
    return notes


def _comparable(spec: ModelSpec) -> dict[str, Any]:
    """Return the values that must be equal."""
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    facts = {key: value for key, value in fields.items() if key not in _MAY_DIFFER}
    if spec.moe is not None and spec.moe.groups == 1:
        facts["moe"] = dataclasses.replace(spec.moe, group_score="max")
    facts |= {"rope.theta": spec.rope.theta, "rope.dim": spec.rope.dim}
    facts["rope.scaling"] = _angles(spec.rope, spec.max_context)
    if spec.rope.scaling is not None and spec.latent is not None:
        facts["rope.softmax_factor"] = spec.rope.scaling.softmax_factor
    facts["biases"] = sorted(spec.biases)
    kinds = map(spec.kind_of, range(spec.n_layers))  # `full_layers` says which have windows
    facts["layer_kinds"] = [dataclasses.replace(kind, window=False) for kind in kinds]
    layers = range(spec.n_layers)
    if spec.moe is not None and all(
        i in spec.moe.layers or not spec.kind_of(i).feed_forward for i in layers
    ):
        del facts["intermediate_size"]  # no layer has a dense network
    if spec.position != "alibi":
        del facts["alibi_scaled"]
    if spec.local_rope is not None:
        facts["local_rope"] = _angles(spec.local_rope, spec.max_context)
    return facts


def _angles(rope: RopeSpec, max_context: int) -> list[float]:
    """Return rotary frequencies and cosine factors, for short and long sequences."""
    if rope.scaling is None or not rope.dim:
        return [rope.theta]
    short, factor = rope.scaling.frequencies(rope.dim, rope.theta, 1)
    longest, long_factor = rope.scaling.frequencies(rope.dim, rope.theta, max_context)
    plain = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    factors = factor, long_factor
    if factors == (1.0, 1.0) and all(np.array_equal(f, plain) for f in (short, longest)):
        return [rope.theta]  # dynamic scaling within the trained context
    return [rope.theta, *factors, *short.tolist(), *longest.tolist()]


def _is_close(wanted: Any, found: Any) -> bool:
    """Return True if two values are equal up to float32 rounding."""
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=_TOLERANCE)
    if isinstance(wanted, list) and isinstance(found, list):
        pairs = zip(wanted, found, strict=False)
        return len(wanted) == len(found) and all(_is_close(a, b) for a, b in pairs)
    if dataclasses.is_dataclass(wanted) and type(wanted) is type(found):
        names = [f.name for f in dataclasses.fields(wanted)]
        return all(_is_close(getattr(wanted, n), getattr(found, n)) for n in names)
    return bool(wanted == found)

"""GGUF of models with recurrent layers: metadata, shapes and values as llama.cpp has them.

Files hold the negative rates themselves, small tensors of recurrent layers in float32, and a list
of key/value heads by layer whose zeros tell llama.cpp which layers are recurrent.  Factors of
Falcon-H1 multiply its matrices.  Value heads of Qwen 3.5 are in another order: the first of all key
heads, then the second.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError

ARCHITECTURES = {
    "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2", "jamba": "jamba",
    "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h",
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "kimi_linear": "kimi-linear",
    "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe",
}  # fmt: skip
"""Families with recurrent layers -> llama.cpp's name of the architecture."""
BY_HEAD = ("attn.q", "attn.gate", "delta.b", "delta.a")
"""Matrices whose rows alternate head by head in files as in checkpoints."""
_FLOAT32 = (
    "_conv.weight", "mamba1.conv.weight", "short.conv.weight", "a_log.weight", "router.weight",
    "shared_gate.weight",
)  # fmt: skip
_TURNED = "qwen35", "qwen35moe"
"""Architectures with value heads in another order than checkpoints."""
_ROWS_TURNED = ("v", "z", "v_conv", "b", "a", "a_log", "dt_bias")
_FACTORS = (
    "embed_scale", "logits_scale", "attn_input_scale", "attn_output_scale", "ffn_gate_scale",
    "ffn_output_scale",
)  # fmt: skip


def is_recurrent(arch: str) -> bool:
    """Return whether an architecture has recurrent layers."""
    return arch in ARCHITECTURES.values() or arch == "nemotron_h_moe"


def is_always_float32(ours: str) -> bool:
    """Return whether a matrix of a recurrent model is float32 whatever the format."""
    return ours.endswith(_FLOAT32)


def shape_in_file(spec: ModelSpec, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a file declares one of our tensors."""
    if ours.endswith(("ssm.a_log.weight", "ssm.d.weight")):
        return (*shape, 1)
    if spec.ssm is not None and ours.endswith("ssm.norm.weight"):
        return spec.ssm.norm_groups, shape[0] // spec.ssm.norm_groups
    if spec.family == "kimi_linear" and "_conv." in ours:
        return shape[0], 1, shape[1]
    if spec.family == "kimi_linear" and ours.endswith("delta.a_log.weight"):
        return (*shape, 1)
    return shape


def recurrent_metadata(spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return what recurrent layers add to an architecture's metadata, or replace of it."""
    kinds = [spec.kind_of(i) for i in range(spec.n_layers)]
    attends = ["attention" in kind.mixer for kind in kinds]
    kernel = "shortconv.l_cache" if arch.startswith("lfm2") else "ssm.conv_kernel"
    values: dict[str, Any] = {kernel: spec.conv_kernel} | _sizes(spec, arch)
    if not any(attends):
        values |= {"attention.head_count": 0, "feed_forward_length": 0}
    elif arch in ("qwen3next", *_TURNED):
        values["full_attention_interval"] = 1 + attends.index(True)
        values["attention.recurrent_layers"] = [not attention for attention in attends]
    elif not all(attends):
        values["attention.head_count_kv"] = [spec.n_kv_heads * attention for attention in attends]
    if arch in _TURNED:  # positions of a text are the same in all three sections
        pairs = spec.rope.dim // 2
        values["rope.dimension_sections"] = [*(len(range(j, pairs, 3)) for j in range(3)), 0]
    if arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        values["rope.scaling.finetuned"] = bool(spec.rope.dim)
    if arch == "granitehybrid" and spec.moe is not None:
        values["feed_forward_length"] = spec.moe.expert_size
    if arch.startswith("nemotron_h"):
        has_network = [kind.feed_forward for kind in kinds]
        values["feed_forward_length"] = [spec.intermediate_size * has for has in has_network]
        values["attention.layer_norm_epsilon"] = float(spec.norm_eps)
    if arch == "nemotron_h_moe" and spec.moe is not None and spec.moe.latent_size:
        values["moe_latent_size"] = spec.moe.latent_size
    return values


def _sizes(spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return the sizes of states."""
    if spec.ssm is not None:
        return {
            "ssm.inner_size": spec.ssm.width, "ssm.state_size": spec.ssm.state_dim,
            "ssm.time_step_rank": spec.ssm.heads, "ssm.group_count": spec.ssm.groups,
        }  # fmt: skip
    if spec.selective is not None:
        own = {"ssm.dt_b_c_rms": spec.selective.norm == "plain"} if arch == "mamba" else {}
        return own | {
            "ssm.inner_size": spec.selective.width, "ssm.state_size": spec.selective.state_dim,
            "ssm.time_step_rank": spec.selective.dt_rank,
        }  # fmt: skip
    delta = spec.delta
    if delta is None:
        return {}
    if delta.decay == "channel":
        return {"kda.head_dim": delta.key_dim}
    return {
        "ssm.state_size": delta.key_dim, "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.value_heads * delta.value_dim,
    }  # fmt: skip


def as_read(spec: ModelSpec) -> tuple[ModelSpec, list[str]]:
    """Return the model that a file is read as, by llama.cpp too, and notes on what it loses.

    Matrices of Falcon-H1 have its factors.
    """
    notes = []
    ssm, selective = spec.ssm, spec.selective
    if ssm is not None and ssm.dt_min > 0.0:
        notes.append(f"GGUF has no least time step: those below {ssm.dt_min:g} stay as they are")
        spec = dataclasses.replace(spec, ssm=dataclasses.replace(ssm, dt_min=0.0))
    if selective is not None and selective.norm == "plain" and selective.norm_eps != spec.norm_eps:
        notes.append(
            f"GGUF has one epsilon: norms within the layers get {spec.norm_eps:g} "
            f"instead of {selective.norm_eps:g}"
        )
    if selective is not None:
        selective = dataclasses.replace(selective, norm_eps=spec.norm_eps)
        spec = dataclasses.replace(spec, selective=selective)
    if spec.delta is not None and ARCHITECTURES.get(spec.family) in _TURNED:
        delta = dataclasses.replace(
            spec.delta, key_heads=spec.delta.value_heads, key_copies=spec.delta.group
        )
        spec = dataclasses.replace(spec, delta=delta)
    if spec.family != "falcon_h1":
        return spec, notes
    if spec.tied_head and spec.embed_scale != spec.logits_scale:
        raise UsageError(
            f"{spec.name}: GGUF files of Falcon-H1 hold the factors in the matrices, but embedding "
            "and head, which have different factors, are one matrix; write safetensors"
        )
    assert spec.ssm is not None
    plain: dict[str, Any] = dict.fromkeys(_FACTORS, 1.0)
    plain["ssm"] = dataclasses.replace(spec.ssm, input_scale=1.0, scales=(), output_scale=1.0)
    return dataclasses.replace(spec, sm_scale=spec.head_dim**-0.5, **plain), notes


def factor_of(spec: ModelSpec, ours: str) -> float:
    """Return the factor that one of our tensors of Falcon-H1 has in a file; 1 for others."""
    if spec.family != "falcon_h1" or spec.ssm is None:
        return 1.0
    scales = dict(zip(("z", "x", "b", "c", "dt"), spec.ssm.scales or (1.0,) * 5, strict=True))
    role = ours.split(".", 2)[-1].rsplit(".", 1)[0] if ours.startswith("layers.") else ours
    is_bias = ours.endswith(".bias")
    scaled = 1.0 if is_bias else spec.attn_input_scale  # the input has it, not the bias
    factors = {
        "embed.weight": spec.embed_scale, "head.weight": spec.logits_scale,
        "attn.q": scaled, "attn.v": scaled,
        "attn.k": scaled * spec.sm_scale * math.sqrt(spec.head_dim),
        "attn.o": spec.attn_output_scale, "ffn.gate": spec.ffn_gate_scale,
        "ffn.down": spec.ffn_output_scale, "ssm.out": spec.ssm.output_scale,
    }  # fmt: skip
    for part, scale in scales.items():
        factors[f"ssm.{part}"] = scale * (1.0 if is_bias else spec.ssm.input_scale)
    return factors.get(role, 1.0)


def order_of(spec: ModelSpec, ours: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the order of rows and columns of one of our tensors in a file; None as they are."""
    delta, parts = spec.delta, ours.split(".")
    turned = ARCHITECTURES.get(spec.family) in _TURNED
    if delta is None or delta.group == 1 or not turned or parts[2:3] != ["delta"]:
        return None, None
    is_out = parts[3] == "out"
    if not is_out and parts[3] not in _ROWS_TURNED:
        return None, None
    size = spec.shape_of(ours)[1 if is_out else 0]
    heads = np.arange(size).reshape(delta.key_heads, delta.group, -1)
    order = heads.swapaxes(0, 1).reshape(-1)
    return (None, order) if is_out else (order, None)

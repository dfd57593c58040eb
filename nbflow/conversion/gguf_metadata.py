"""GGUF metadata of a model's hyperparameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow.checkpoint.readers import gguf
from nbflow.checkpoint.writers.gguf import BOOL, F32, I32, U32
from nbflow.conversion.gguf_recurrent import is_recurrent, recurrent_metadata
from nbflow.spec.layer_specs import LatentSpec, MoeSpec
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.position import LinearRopeScaling, LongRopeScaling, YarnRopeScaling

_GATING = {"softmax": 1, "sigmoid": 2}
_SCALED = ("granite", "granitemoe", "granitehybrid", "minicpm")
"""Architectures with factors on embeddings, sublayers and logits."""
_PATTERN = {"exaone-moe": 4, "olmo2": 4, "exaone4": 4, "cohere2": 4}
"""Architectures whose files may say which layers have the window, and every how many have none."""
_SCORED = (
    "deepseek2", "dots1", "glm4moe", "bailingmoe2", "afmoe", "exaone-moe", "mistral4", "glm-dsa",
    "minimax-m2", "kimi-linear", "lfm2moe", "nemotron_h_moe",
)  # fmt: skip
"""Architectures whose files state how the router scores."""
_ROUTED = ("ernie4_5-moe", "deepseek", *_SCORED)
"""Architectures whose files state shared experts, and dense layers before those with experts."""
_OWN_SIZE = ("gpt-oss", "hunyuan-moe", "qwen35moe", "qwen3next", *_ROUTED)
"""Architectures whose experts' size is there even if it is that of dense networks."""
_SHARED_SIZE = ("hunyuan-moe", "ernie4_5-moe", "granitehybrid", "nemotron_h_moe")
"""Architectures whose files state the size of shared experts without a gate."""


def model_metadata(spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return the metadata of an architecture, key -> type and value."""
    values: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_context,
        "embedding_length": spec.hidden_size,
        "block_count": spec.n_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.n_heads,
        "attention.head_count_kv": spec.n_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        _eps_key(spec): float(spec.norm_eps),
    }
    values |= _positions(spec, arch) | _factors(spec, arch)
    if spec.moe is not None:
        values |= _experts(spec, spec.moe, arch)
    if spec.latent is not None:
        values |= _latent(spec, spec.latent)
    if is_recurrent(arch):
        values |= recurrent_metadata(spec, arch)
    metadata = {
        "general.architecture": ((gguf.STRING,), arch),
        "general.type": ((gguf.STRING,), "model"),
        "general.name": ((gguf.STRING,), spec.name),
        **{f"{arch}.{key}": _typed(value) for key, value in values.items()},
    }
    ends = ("eos", "eot")  # GGUF has keys for two EOS ids
    special = {"bos": spec.bos_token_id, **dict(zip(ends, spec.eos_token_ids, strict=False))}
    for name, value in special.items():
        if value is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = ((U32,), value)
    return metadata


def _positions(spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return the values of rotary embeddings, windows and the temperature of long contexts."""
    values: dict[str, Any] = {}
    if spec.rope.dim:
        values["rope.dimension_count"] = spec.rope.dim
        values["rope.freq_base"] = float(spec.rope.theta)
        values |= _scaling(spec)
    if spec.local_rope is not None:
        values["rope.freq_base_swa"] = float(spec.local_rope.theta)
    if spec.window is not None:
        values["attention.sliding_window"] = spec.window
        if arch in _PATTERN and spec.full_layers != _usual_full_layers(spec, arch):
            pattern = [i not in spec.full_layers for i in range(spec.n_layers)]
            values["attention.sliding_window_pattern"] = pattern
    if spec.temperature is not None:
        values["attention.temperature_scale"] = spec.temperature.scale
        values["attention.temperature_length"] = spec.temperature.floor
    return values


def _factors(spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return soft caps and factors of embeddings, residuals, scores and logits."""
    values: dict[str, Any] = {}
    if spec.logits_soft_cap is not None:
        values["attn_logit_softcapping"] = spec.logits_soft_cap
    if spec.head_soft_cap is not None:
        values["final_logit_softcapping"] = spec.head_soft_cap
    if arch in ("gptneox", "stablelm"):
        values["use_parallel_residual"] = spec.residual != "sequential"
    if arch in _SCALED:
        values["embedding_scale"] = float(spec.embed_scale)
        values["residual_scale"] = float(spec.residual_scale)
        values["logit_scale"] = 1.0 / spec.logits_scale
        values["attention.scale"] = float(spec.sm_scale)
    if arch in ("command-r", "cohere2"):
        values["logit_scale"] = float(spec.logits_scale)
    if arch == "mpt":
        values["attention.max_alibi_bias"] = 8.0
        values["attention.clamp_kqv"] = spec.qkv_clip
    return values


def _usual_full_layers(spec: ModelSpec, arch: str) -> frozenset[int]:
    """Return the layers without a window in files that do not state them."""
    every = _PATTERN[arch]
    return frozenset(i for i in range(spec.n_layers) if (i + 1) % every == 0)


def _typed(value: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(value, str):
        return (gguf.STRING,), value
    if isinstance(value, list):
        return (gguf.ARRAY, BOOL if isinstance(value[0], bool) else I32), value
    if isinstance(value, bool):
        return (BOOL,), value
    return ((U32,), value) if isinstance(value, int) else ((F32,), float(np.float32(value)))


def _eps_key(spec: ModelSpec) -> str:
    kind = "layer_norm_rms" if spec.norm == "rms" else "layer_norm"
    return f"attention.{kind}_epsilon"


def _scaling(spec: ModelSpec) -> dict[str, Any]:
    """Return the metadata of RoPE scaling (its divisors are tensors)."""
    scaling = spec.rope.scaling
    if isinstance(scaling, LinearRopeScaling):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    if isinstance(scaling, LongRopeScaling):
        _, factor = scaling.frequencies(spec.rope.dim, spec.rope.theta, spec.max_context)
        return {
            "rope.scaling.original_context_length": scaling.original_max_position,
            "rope.scaling.attn_factor": factor,
        }
    if isinstance(scaling, YarnRopeScaling):
        values = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling.factor,
            "rope.scaling.original_context_length": scaling.original_max_position,
        }
        if spec.latent is not None or spec.temperature is not None:
            unit = 0.1 if spec.latent is not None else 1.0
            values["rope.scaling.yarn_log_multiplier"] = unit * (scaling.mscale_all_dim or 0.0)
        return values
    return {}


def _experts(spec: ModelSpec, moe: MoeSpec, arch: str) -> dict[str, Any]:
    values: dict[str, Any] = {"expert_count": moe.n_experts, "expert_used_count": moe.top_k}
    if moe.expert_size != spec.intermediate_size or arch in _OWN_SIZE:
        values["expert_feed_forward_length"] = moe.expert_size
    if moe.shared_gate or (moe.shared_size and arch in _SHARED_SIZE):
        values["expert_shared_feed_forward_length"] = moe.shared_size
    if arch in _ROUTED:
        values["expert_shared_count"] = -(-moe.shared_size // moe.expert_size)
        values["expert_weights_scale"] = float(moe.scale)
        if arch != "nemotron_h_moe":
            values["leading_dense_block_count"] = spec.n_layers - len(moe.layers)
    if arch == "ernie4_5-moe":
        values["interleave_moe_layer_step"] = 1
    if arch in _SCORED:
        values["expert_weights_norm"] = moe.renormalize
        values["expert_gating_func"] = _GATING[moe.scoring]
        if moe.groups > 1:
            values["expert_group_count"] = moe.groups
            values["expert_group_used_count"] = moe.groups_used
    return values


def _latent(spec: ModelSpec, latent: LatentSpec) -> dict[str, Any]:
    """Return the metadata of latent attention: head sizes of the cache and of the queries."""
    values: dict[str, Any] = {
        "attention.key_length": spec.cached_dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": spec.head_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.kv_rank,
    }
    if spec.indexer is not None:
        kinds = [i in spec.indexer.layers for i in range(spec.n_layers)]
        values |= {
            "attention.indexer.head_count": spec.indexer.heads,
            "attention.indexer.key_length": spec.indexer.dim,
            "attention.indexer.top_k": spec.indexer.top_k,
            "attention.indexer.types": kinds,
        }
    return values | ({"attention.q_lora_rank": latent.q_rank} if latent.q_rank else {})

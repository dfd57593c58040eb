"""Models of 2025 and 2026 for `tools/golden/families.py`: class and configuration of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from random_models import Convert, Tensors

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""Grouped heads whose width is not hidden_size / heads."""
EVEN = {**TINY, "head_dim": 8}
SPARSE = {
    **TINY, "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 20,
    "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "index_n_heads": 8, "index_head_dim": 12, "index_topk": 7,
}  # fmt: skip
"""Latent attention to seven selected keys; with eight heads, hardly any score is a sum of zeros."""
del SPARSE["head_dim"]


def rope(kind: str = "default", theta: float = 10000.0, **numbers: Any) -> dict[str, Any]:
    """Return a configuration's rotary table."""
    return {"rope_theta": theta, "rope_type": kind, **numbers}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3": ("Ministral3", {**TINY, "sliding_window": None, "rope_parameters": rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, max_position_embeddings=64,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)}),
    "deepseek_v32": ("DeepseekV32", {**SPARSE, "rope_parameters": rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
        mscale=0.707, mscale_all_dim=0.707)}),
    "glm_moe_dsa": ("GlmMoeDsa", {
        **SPARSE, "n_group": 1, "topk_group": 1, "attention_bias": True,
        "indexer_types": ["full", "shared", "full"]}),
    "llama4": ("Llama4", {
        **EVEN, "num_hidden_layers": 4, "intermediate_size": 12, "intermediate_size_mlp": 40,
        "num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3, "attention_chunk_size": 12, "floor_scale": 8,
        "attn_scale": 0.4, "use_qk_norm": True, "rope_parameters": rope(
            "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0,
            original_max_position_embeddings=16)}),
    "llama4_text": ("Llama4", {
        **EVEN, "num_hidden_layers": 3, "intermediate_size": 12, "intermediate_size_mlp": 40,
        "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0, 1],
        "no_rope_layers": [1, 0, 1], "attention_bias": True, "attention_chunk_size": 7,
        "attn_temperature_tuning": False, "use_qk_norm": False}),
}  # fmt: skip
"""Name -> class and configuration."""


def within(
    model_type: str,
    model: str = "model.language_model.",
    head: str = "lm_head.",
    vision: str = "vision_tower.patch_conv.weight",
) -> Callable[[Any], Convert]:
    """Return what makes the conversion to a text model within a multimodal one."""

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        renamed = {
            name.replace("model.", model, 1).replace("lm_head.", head, 1): tensor
            for name, tensor in tensors.items()
        }
        renamed[vision] = torch.zeros(2, 3).half()
        return renamed, {"model_type": model_type, "text_config": config}

    return lambda _: convert


def llama4(model: Any) -> Convert | None:
    """Return the conversion of the model with temperatures; the other stays a text model."""
    names = "language_model.model.", "language_model.lm_head."
    convert = within("llama4", *names, "vision_model.patch_embedding.linear.weight")
    return convert(model) if model.config.attn_temperature_tuning else None


AS_RELEASED: dict[str, Callable[[Any], Convert | None]] = {
    "Llama4": llama4,
    "Ministral3": within("mistral3", "language_model.model.", "language_model.lm_head."),
}
"""Class -> conversion to the layout of released checkpoints."""

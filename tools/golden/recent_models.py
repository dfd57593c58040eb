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


WINDOWS = {**EVEN, "num_hidden_layers": 4, "sliding_window": 9}
"""Windows in some of the layers."""
GEMMA = {
    **TINY, "num_hidden_layers": 6, "sliding_window": 9, "hidden_size_per_layer_input": 10,
    "tie_word_embeddings": True, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention"],
}  # fmt: skip
"""Layers of two kinds, the last two of which may share the caches of earlier ones."""
EXPERTS = {**EVEN, "num_hidden_layers": 3, "moe_intermediate_size": 12, "num_experts_per_tok": 3}
SIGMOID = {
    **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
    "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
"""Experts scored and chosen as in DeepSeek V3."""
LATENT = {
    **TINY, "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
LATENT.pop("head_dim")
SECTIONS = {**rope(theta=1e4), "mrope_section": [2, 1, 1]}
IMAGES = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2,
    "out_hidden_size": 32, "fullatt_block_indexes": [0],
}  # fmt: skip
NEMOTRON = {
    **EVEN, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 18,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 1.5,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
}  # fmt: skip
del NEMOTRON["num_hidden_layers"]
BIG_CODE = {
    "vocab_size": 97, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WITH_IMAGES = "ForConditionalGeneration"
"""End of the names of multimodal classes, of which the text is computed."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3": ("Ministral3", {**TINY, "sliding_window": None, "rope_parameters": rope(
        "yarn", factor=8.0, original_max_position_embeddings=8, max_position_embeddings=64,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)}),
    "olmo3": ("Olmo3", {**WINDOWS, "rope_parameters": {
        "sliding_attention": rope(theta=5e3),
        "full_attention": rope(
            "yarn", 5e3, factor=4.0, original_max_position_embeddings=16)}}),
    "vaultgemma": ("VaultGemma", {**WINDOWS, "query_pre_attn_scalar": 24,
                                  "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
                                  "tie_word_embeddings": True}),
    "seed_oss": ("SeedOss", {**TINY, "attention_bias": True, "attention_out_bias": False}),
    "arcee": ("Arcee", {**TINY, "mlp_bias": True}),
    "apertus": ("Apertus", {**EVEN, "rope_parameters": rope(
        "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)}),
    "ernie4_5": ("Ernie4_5", {**TINY, "tie_word_embeddings": True, "use_bias": True}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        **EVEN, "num_hidden_layers": 4, "moe_intermediate_size": 12, "moe_num_experts": 8,
        "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": 2}),
    "hunyuan": ("HunYuanDenseV1", {**TINY, "attention_bias": True, "rope_parameters": {
        **rope("dynamic"), "alpha": 50.0, "factor": 1.0}}),
    "hunyuan_moe": ("HunYuanMoEV1", {**EVEN, "num_experts": 5, "moe_topk": [2, 2],
                                     "intermediate_size": 12}),
    "dots1": ("Dots1", {**SIGMOID, "n_group": 1, "topk_group": 1, "sliding_window": 9,
                        "max_window_layers": 2, "attention_bias": True}),
    "exaone4": ("Exaone4", {**WINDOWS, "sliding_window_pattern": 3}),
    "exaone4_full": ("Exaone4", {**EVEN, "sliding_window": None, "layer_types": [
        "full_attention", "full_attention"]}),
    "exaone_moe": ("ExaoneMoe", {
        **EXPERTS, "num_experts": 8, "num_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "sliding_window": 9, "sliding_window_pattern": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "afmoe": ("Afmoe", {**EXPERTS, "num_experts": 6, "num_shared_experts": 2, "route_scale": 1.5,
                        "mup_enabled": True, "sliding_window": 9,
                        "global_attn_every_n_layers": 2}),
    "flex_olmo": ("FlexOlmo", {**EVEN, "intermediate_size": 12, "num_experts": 5,
                               "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "gpt_oss_limit": ("GptOss", {
        **EVEN, "intermediate_size": 12, "num_local_experts": 5, "num_experts_per_tok": 2,
        "sliding_window": 9, "swiglu_limit": 0.7, "rope_parameters": rope()}),
    "internlm3": ("InternLM3", {**TINY, "attention_bias": True, "mlp_bias": True,
                                "rope_parameters": {**rope("dynamic"), "factor": 6.0}}),
    "granitemoeshared": ("GraniteMoeShared", {
        **EVEN, "intermediate_size": 12, "num_local_experts": 4, "shared_intermediate_size": 20,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 2.0}),
    "solar_open": ("SolarOpen", {**SIGMOID, "num_hidden_layers": 2}),
    "minicpm3": ("MiniCPM3", {**LATENT, "scale_emb": 3.0, "scale_depth": 1.4,
                              "dim_model_base": 16}),
    "glm4_moe_lite": ("Glm4MoeLite", {
        **LATENT, "num_hidden_layers": 3, "moe_intermediate_size": 12, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "routed_scaling_factor": 1.8, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "mistral4": ("Mistral4", {
        **LATENT, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "rope_parameters": rope(
            "yarn", factor=8.0, original_max_position_embeddings=8, mscale=1.0,
            mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0, llama_4_scaling_beta=0.4)}),
    "hy_v3": ("HYV3", {
        **EXPERTS, "num_experts": 6, "router_scaling_factor": 1.5, "num_shared_experts": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "hy_v3_bias": ("HYV3", {
        **EXPERTS, "num_experts": 4, "router_scaling_factor": 1.5, "num_shared_experts": 1,
        "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "mlp_bias": True}),
    "youtu": ("Youtu", LATENT),
    "hyperclovax": ("HyperCLOVAX", {
        **EVEN, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
        "attention_multiplier": 0.2, "logits_scaling": 0.5}),
    "ministral": ("Ministral", {**WINDOWS, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
    "cwm": ("Cwm", {**WINDOWS, "num_hidden_layers": 3, "bos_token_id": 1,
                    "eos_token_id": [], "rope_parameters": rope(
        "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)}),
    "phi4_mini": ("Phi3", {**EVEN, "tie_word_embeddings": True, "rope_parameters": {
        **rope(), "partial_rotary_factor": 0.75}}),
    "bailing_moe_v2": ("Glm4Moe", {**SIGMOID, "num_hidden_layers": 2, "use_qk_norm": True,
                                   "rope_parameters": {
                                       **rope(), "partial_rotary_factor": 0.5}}),
    "gemma3_images": ("Gemma3ForConditionalGeneration", {
        "text_config": {**WINDOWS, "query_pre_attn_scalar": 24, "rope_parameters": {
            "sliding_attention": rope(theta=5e3),
            "full_attention": rope("linear", 1e6, factor=8.0)},
            "layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                          "num_attention_heads": 1, "image_size": 4, "patch_size": 2},
        "mm_tokens_per_image": 1}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {
        "text_config": {**EVEN, "rope_parameters": SECTIONS}, "vision_config": IMAGES}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {
        "text_config": {**EVEN, "rope_parameters": SECTIONS},
        "vision_config": {**IMAGES, "deepstack_visual_indexes": [0],
                          "num_position_embeddings": 4}}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {
        "text_config": {**EXPERTS, "num_experts": 5, "num_hidden_layers": 2,
                        "rope_parameters": SECTIONS},
        "vision_config": {**IMAGES, "deepstack_visual_indexes": [0],
                          "num_position_embeddings": 4}}),
    "deepseek_v32": ("DeepseekV32", {**SPARSE, "rope_parameters": rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
        mscale=0.707, mscale_all_dim=0.707)}),
    "mimo_v2_flash": ("MiMoV2Flash", {
        **EXPERTS, "num_hidden_layers": 4, "head_dim": 12, "v_head_dim": 8, "n_routed_experts": 8,
        "n_group": 1, "topk_group": 1, "sliding_window": 9, "layer_types": [
            "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": rope(theta=5e3, partial_rotary_factor=0.334),
            "sliding_attention": rope(theta=1e2, partial_rotary_factor=0.334)}}),
    "doge": ("Doge", {**TINY, "attention_bias": True, "mlp_bias": True, "sliding_window": 20,
                      "keep_window_size": 64}),
    "doge_moe": ("Doge", {**TINY, "is_moe": True, "num_experts": 37, "num_experts_per_tok": 5,
                          "keep_window_size": 64, "mlp_bias": True}),
    "gemma3n": ("Gemma3n", {
        **GEMMA, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 6,
        "vocab_size_per_layer_input": 90, "altup_num_inputs": 3,
        "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.7],
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {
            "sliding_attention": rope(theta=5e3), "full_attention": rope(theta=1e5)}}),
    "gemma4": ("Gemma4", {
        **GEMMA, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97, "head_dim": 8,
        "global_head_dim": 16, "use_double_wide_mlp": True}),
    "gemma4_moe": ("Gemma4", {
        **GEMMA, "num_hidden_layers": 3, "hidden_size_per_layer_input": 0, "head_dim": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
        "moe_intermediate_size": 12, "final_logit_softcapping": 3.0}),
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
    "nemotron_3": ("NemotronH", {**NEMOTRON, "moe_latent_size": 20, "n_group": 4, "topk_group": 2}),
    "nemotron_3_bias": ("NemotronH", {**NEMOTRON, "moe_latent_size": 20, "mlp_bias": True}),
    "nemotron_3_nano": ("NemotronH", NEMOTRON),
    "minimax_m2": ("MiniMaxM2", {
        **TINY, "intermediate_size": 12, "num_local_experts": 6, "num_experts_per_tok": 2,
        "rotary_dim": 6, "rope_parameters": rope(theta=5e6, partial_rotary_factor=0.5)}),
    "mellum": ("Mellum", {
        **EXPERTS, "num_experts": 5, "norm_topk_prob": True, "sliding_window": 9, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": {
            "sliding_attention": rope(theta=5e3),
            "full_attention": rope(
                "yarn", 5e4, factor=4.0, original_max_position_embeddings=16)}}),
    "jais2": ("Jais2", EVEN),
    "iquestcoder": ("IQuestCoder", TINY),
    "gpt_neo": ("GPTNeo", {
        "vocab_size": 97, "hidden_size": 36, "num_layers": 3, "num_heads": 3, "window_size": 9,
        "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
        "attention_types": [[["global", "local"], 1], [["global"], 1]]}),
    "gpt_bigcode": ("GPTBigCode", BIG_CODE),
    "gpt_bigcode_heads": ("GPTBigCode", {**BIG_CODE, "multi_query": False}),
}  # fmt: skip
"""Name -> class and configuration."""


def ling(model: Any) -> Convert:
    """Return a conversion of GLM-4.5 with norms of queries and keys to Ling 2."""
    names = {
        "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm":
        "attention.key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias",
    }  # fmt: skip
    keys = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        result: Tensors = {}
        for name, tensor in tensors.items():
            if name.endswith("q_proj.weight"):
                parts = [tensors[name.replace("q_proj", f"{c}_proj")] for c in "qkv"]
                start = name.removesuffix("self_attn.q_proj.weight")
                result[f"{start}attention.query_key_value.weight"] = torch.cat(parts)
            elif not name.endswith(("k_proj.weight", "v_proj.weight")):
                for theirs, new in names.items():
                    name = name.replace(theirs, new)
                result[name] = tensor
        result["model.layers.2.eh_proj.weight"] = torch.zeros(2, 3).half()
        config = {keys.get(key, key): value for key, value in config.items()}
        return result, config | {"model_type": "bailing_moe_v2", "num_nextn_predict_layers": 1}

    return convert


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


def transposed_experts(model: Any) -> Convert:
    """Return a conversion of the experts' matrices to (in, out), as they are released."""

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        fused = ("experts.gate_up_proj", "experts.down_proj")
        turned = {k: v.transpose(1, 2) for k, v in tensors.items() if k.endswith(fused)}
        return tensors | turned, config

    return convert


def llama4(model: Any) -> Convert | None:
    """Return the conversion of the model with temperatures; the other stays a text model."""
    names = "language_model.model.", "language_model.lm_head."
    convert = within("llama4", *names, "vision_model.patch_embedding.linear.weight")
    return convert(model) if model.config.attn_temperature_tuning else None


AS_RELEASED: dict[str, Callable[[Any], Convert | None]] = {
    "Qwen3VLMoeForConditionalGeneration": transposed_experts,
    "Glm4Moe": ling,
    "Llama4": llama4,
    "Ministral3": within("mistral3", "language_model.model.", "language_model.lm_head."),
}
"""Class -> conversion to the layout of released checkpoints."""

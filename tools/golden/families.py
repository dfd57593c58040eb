"""Make tests/golden/families: a tiny random checkpoint of each family, with its logits.

    pip install torch transformers
    python tools/golden/families.py [NAME ...]

The tests need neither.  A folder holds config.json, float16 weights (or float32, where stated) and
golden.npz: token ids, the float32 logits after each of them, and the greedy continuation.

The logits are those of transformers.  Families whose published code is not part of it are made from
an equivalent transformers model, with the differences patched in:
`tools/golden/published_models.py`. Matrices in FP8: `tools/golden/fp8_mxfp4.py`.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_mxfp4
import further_models as further
import numpy as np
import published_models as published
import recent_models as recent
import released_layouts as released
import torch
import transformers
from random_models import Made, in_float64, randomize
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parents[2] / "tests" / "golden" / "families"
N_TOKENS, N_NEW = 40, 8
N_SHORT, N_CROSSING = 10, 12
"""Tokens within LongRoPE's original context, and of a continuation that goes beyond it."""
MAX_ERROR = 1.5e-6
"""Largest error of float32 logits of recurrent models, as a share of the largest logit."""
N_READ = 21
"""Tokens that an encoder reads for a decoder."""

SIZES = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "head_dim": 12,
}  # fmt: skip
"""An odd number of heads, one key/value head, nothing a multiple of 16."""
FOUR = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12}  # fmt: skip
"""Grouped heads whose width is not hidden_size / heads."""
FOUR_EVEN = {**FOUR, "head_dim": 8}
FOUR_HALF = {
    **FOUR_EVEN,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS = {**FOUR, "head_dim": 8, "intermediate_size": 48}
GPT2 = {
    "vocab_size": 97, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OPT = {
    "vocab_size": 97, "hidden_size": 36, "ffn_dim": 56, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FALCON = {
    "vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "kv_lora_rank": 20,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
"""Latent attention and experts, no size a multiple of 16."""
GPT_OSS = {
    **FOUR, "head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 3, "num_local_experts": 5,
    "num_experts_per_tok": 2, "sliding_window": 9, "attention_bias": True,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0,
                        "original_max_position_embeddings": 16, "beta_fast": 32.0,
                        "beta_slow": 1.0, "truncate": False},
}  # fmt: skip
LATENT_YARN = {
    "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.707,
    "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "factor": 4.0,
    "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 16,
}  # fmt: skip


def rope(kind: str, theta: float = 10000.0, **numbers: Any) -> dict[str, Any]:
    """Return a configuration's rotary table."""
    return {"rope_theta": theta, "rope_type": kind, **numbers}


HF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama31": ("Llama", {**SIZES, "rope_parameters": rope(
        "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)}),
    "llama_linear": ("Llama", {**FOUR, "rope_parameters": rope("linear", factor=2.0)}),
    "llama_yarn": ("Llama", {**FOUR, "rope_parameters": rope(
        "yarn", factor=4.0, original_max_position_embeddings=16)}),
    "mistral": ("Mistral", {**FOUR, "sliding_window": 9}),
    "qwen2": ("Qwen2", {**SIZES, "use_sliding_window": False, "sliding_window": 7}),
    "qwen2_window": ("Qwen2", {**FOUR, "use_sliding_window": True, "sliding_window": 7,
                               "max_window_layers": 1}),
    "qwen3": ("Qwen3", FOUR),
    "gemma": ("Gemma", {**SIZES, "head_dim": 20, "tie_word_embeddings": True,
                        "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", {**FOUR, "num_hidden_layers": 3, "tie_word_embeddings": True,
                          "sliding_window": 9, "query_pre_attn_scalar": 24,
                          "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**FOUR, "num_hidden_layers": 3, "tie_word_embeddings": True,
                          "sliding_window": 9, "query_pre_attn_scalar": 24,
                          "layer_types": ["sliding_attention", "full_attention",
                                          "sliding_attention"]}),
    "phi": ("Phi", {**SIZES, "num_key_value_heads": 3, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {**FOUR, "sliding_window": 9}),
    "phi3_long": ("Phi3", {**EXPERTS, "rope_parameters": {**LONG, "rope_theta": 1e4},
                           "original_max_position_embeddings": 16}),
    "gpt2": ("GPT2LMHead", GPT2),
    "gpt_neox": ("GPTNeoX", {**SIZES, "rope_parameters": rope(
        "default", partial_rotary_factor=0.5)}),
    "gpt_neox_sequential": ("GPTNeoX", {**SIZES, "use_parallel_residual": False,
                                          "rope_parameters": rope(
                                              "default", partial_rotary_factor=0.5)}),
    "opt": ("OPT", OPT),
    "opt_350m": ("OPT", {**OPT, "word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    "bloom": ("Bloom", {"vocab_size": 97, "hidden_size": 36, "n_layer": 2, "n_head": 3,
                        "bos_token_id": None, "eos_token_id": None}),
    "falcon_7b": ("Falcon", FALCON),
    "falcon_40b": ("Falcon", {**FALCON, "hidden_size": 40, "num_attention_heads": 4,
                              "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon_rw": ("Falcon", {**FALCON, "alibi": True, "parallel_attn": False, "bias": True,
                             "multi_query": False}),
    "stablelm": ("StableLm", {**SIZES, "use_qkv_bias": True, "rope_parameters": rope(
        "default", partial_rotary_factor=0.5)}),
    "stablelm2_12b": ("StableLm", {**FOUR_EVEN, "qk_layernorm": True,
                                   "use_parallel_residual": True, "rope_parameters": rope(
                                       "default", partial_rotary_factor=0.25)}),
    "granite": ("Granite", {**FOUR, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "intermediate_size": 24}),
    # equal divisors: transformers 5.24 has the short ones beyond the original context, too
    "phimoe": ("Phimoe", {**EXPERTS, "num_local_experts": 6, "num_experts_per_tok": 2,
                          "intermediate_size": 24, "router_jitter_noise": 0.3,
                          "attention_bias": True, "lm_head_bias": True, "rope_parameters": {
                              **LONG, "rope_theta": 1e4, "long_factor": LONG["short_factor"],
                              "short_mscale": 0.8, "long_mscale": 1.4}}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "num_experts": 5, "num_experts_per_tok": 3,
                               "moe_intermediate_size": 12,
                               "shared_expert_intermediate_size": 20}),
    "qwen2_moe_mixed": ("Qwen2Moe", {**EXPERTS, "num_experts": 3, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 12, "num_hidden_layers": 3,
                                     "shared_expert_intermediate_size": 12,
                                     "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 5, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 12, "norm_topk_prob": True}),
    "deepseek_v2_lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy",
                                        "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
                                        "rope_parameters": rope("yarn", **LATENT_YARN)}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2,
                                   "topk_method": "group_limited_greedy", "n_shared_experts": 1}),
    "olmo": ("Olmo", {**FOUR_EVEN, "clip_qkv": 0.9}),
    "olmo2": ("Olmo2", FOUR_EVEN),
    "olmoe": ("Olmoe", {**FOUR_EVEN, "intermediate_size": 12, "num_experts": 5,
                        "num_experts_per_tok": 2}),
    "cohere": ("Cohere", {**FOUR_EVEN, "logit_scale": 0.25, "tie_word_embeddings": True}),
    "cohere_plus": ("Cohere", {**FOUR_EVEN, "logit_scale": 0.25, "tie_word_embeddings": True,
                               "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**FOUR_EVEN, "logit_scale": 0.25, "tie_word_embeddings": True,
                            "sliding_window": 9, "num_hidden_layers": 3,
                            "layer_types": ["sliding_attention", "full_attention",
                                            "sliding_attention"]}),
    "starcoder2": ("Starcoder2", {**FOUR_EVEN, "sliding_window": 9}),
    "granitemoe": ("GraniteMoe", {**FOUR_EVEN, "intermediate_size": 12, "num_local_experts": 4,
                                  "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                                  "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "gptj": ("GPTJ", {"vocab_size": 97, "n_embd": 36, "n_layer": 2, "n_head": 3, "rotary_dim": 4,
                      "n_positions": 64, "bos_token_id": None, "eos_token_id": None,
                      "n_inner": 56}),
    "mpt": ("Mpt", {"vocab_size": 97, "d_model": 24, "n_layers": 2, "n_heads": 3,
                    "max_seq_len": 64, "attn_config": {"clip_qkv": 0.6}}),
    "dbrx": ("Dbrx", {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4,
                      "max_seq_len": 64,
                      "attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 5e5},
                      "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 5, "moe_top_k": 3},
                      "bos_token_id": None, "eos_token_id": None}),
    "nemotron": ("Nemotron", {**FOUR_EVEN, "rope_parameters": rope(
        "default", partial_rotary_factor=0.5)}),
    "smollm3": ("SmolLM3", {**FOUR_EVEN, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "helium": ("Helium", FOUR_EVEN),
    "glm": ("Glm", FOUR_HALF),
    "glm4": ("Glm4", FOUR_HALF),
    "glm4_moe": ("Glm4Moe", {**FOUR_HALF, "moe_intermediate_size": 12, "n_routed_experts": 8,
                             "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                             "routed_scaling_factor": 1.5, "use_qk_norm": True,
                             "attention_bias": True}),
    "gpt_oss_floats": ("GptOss", {**GPT_OSS, "hidden_size": 36, "intermediate_size": 12,
                                  "num_hidden_layers": 2}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2,
                                   "n_shared_experts": 1, "norm_topk_prob": True,
                                   "rope_parameters": rope("yarn", **LATENT_YARN)}),
    **further.NARROW,
}  # fmt: skip
"""Name -> class and configuration."""
FALCON_H1 = {
    **FOUR_EVEN, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_state": 18, "mamba_n_groups": 2,
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.6, 1.4, 0.7, 1.2, 0.9], "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
}  # fmt: skip
MAMBA = {
    "vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "state_size": 6,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "time_step_rank": 5,
}  # fmt: skip
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {**FOUR_EVEN, "num_hidden_layers": 4, "tie_word_embeddings": True,
                      "conv_bias": True, "block_multiple_of": 10, "intermediate_size": 80,
                      "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "qwen3_next": ("Qwen3Next", {
        **FOUR_EVEN, "num_hidden_layers": 4, "head_dim": 16, "hidden_size": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 18,
        "linear_value_head_dim": 20, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [1], "intermediate_size": 24}),
    "qwen3_5": ("Qwen3_5", {
        **FOUR_HALF, "num_hidden_layers": 3, "linear_num_key_heads": 2, "layer_types": [
            "linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 2, "linear_key_head_dim": 18, "linear_value_head_dim": 12}),
    "olmo_hybrid": ("OlmoHybrid", {
        **FOUR_EVEN, "num_hidden_layers": 3, "rope_parameters": None, "layer_types": [
            "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 24}),
    "mamba2": ("Mamba2", {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "state_size": 18, "n_groups": 2, "expand": 2, "use_bias": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}),
    "granite4": ("GraniteMoeHybrid", {
        **FOUR_EVEN, "num_hidden_layers": 3, "mamba_n_heads": 4, "mamba_d_state": 18,
        "mamba_n_groups": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 12, "shared_intermediate_size": 20, "position_embedding_type": "nope",
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "granite4_dense": ("GraniteMoeHybrid", {
        **FOUR_EVEN, "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_state": 16,
        "num_local_experts": 0, "shared_intermediate_size": 40, "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "qwen3_5_moe": ("Qwen3_5Moe", {
        **FOUR_HALF, "num_hidden_layers": 2, "linear_num_key_heads": 2, "layer_types": [
            "linear_attention", "full_attention"], "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
        "linear_num_value_heads": 2, "linear_key_head_dim": 18, "linear_value_head_dim": 12}),
    "lfm2_moe": ("Lfm2Moe", {
        **FOUR_EVEN, "num_hidden_layers": 3, "tie_word_embeddings": True, "num_dense_layers": 1,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "routed_scaling_factor": 1.5, "layer_types": ["conv", "full_attention", "conv"]}),
    "nemotron_h": ("NemotronH", {
        **FOUR_EVEN, "num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 18, "layers_block_type": [
            "linear_attention", "mlp", "full_attention", "mlp"]}),
    "falcon_h1": ("FalconH1", FALCON_H1),
    "falcon_h1_norm": ("FalconH1", {
        **FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True,
        "mlp_bias": True, "mamba_d_ssm": None}),
    "bamba": ("Bamba", {
        **FOUR_EVEN, "num_hidden_layers": 3, "mamba_n_heads": 4, "mamba_d_state": 18,
        "mamba_n_groups": 2, "attn_layer_indices": [1]}),
    "jamba": ("Jamba", {
        **FOUR_EVEN, "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
        "expert_layer_period": 3, "expert_layer_offset": 0, "num_experts": 4,
        "mamba_d_state": 6, "mamba_dt_rank": 5, "intermediate_size": 24}),
    "minimax": ("MiniMax", {
        **FOUR, "num_hidden_layers": 3, "intermediate_size": 24, "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 0.7, "linear_attn_beta_factor": 1.2,
        "mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.1, "block_size": 16}),
    "kimi_linear": ("KimiLinear", {
        **{k: v for k, v in LATENT.items() if k not in ("first_k_dense_replace",
                                                         "n_routed_experts")},
        "num_local_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "linear_head_dim": 18, "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "mamba": ("Mamba", {**MAMBA, "use_bias": True}),
    "falcon_mamba": ("FalconMamba", {**MAMBA, "state_size": 20, "time_step_rank": "auto"}),
}  # fmt: skip
"""Models with recurrent layers: name -> class and configuration."""
WIDE = RECURRENT | recent.MODELS | further.MODELS
"""Models whose logits are computed in float64."""

BERT = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 64,
}  # fmt: skip
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT),
    "roberta": ("Roberta", {**BERT, "max_position_embeddings": 66, "type_vocab_size": 1,
                            "pad_token_id": 1}),
    "distilbert": ("DistilBert", {"vocab_size": 97, "dim": 36, "hidden_dim": 56, "n_layers": 2,
                                  "n_heads": 3, "max_position_embeddings": 64}),
}  # fmt: skip
"""Encoders with the head of their masked language model."""
T5 = {
    "vocab_size": 97, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0, "n_positions": 64,
}  # fmt: skip
PAIRS = further.PAIRS | {
    "t5": ("T5", T5),
    "flan_t5": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3,
                       "tie_word_embeddings": False, "d_kv": 8, "d_ff": 28}),
}  # fmt: skip

STORED: dict[str, tuple[str, dict[str, Any], Callable[[Made], Made]]] = {
    "qwen3_fp8": ("Qwen3", FOUR, fp8_mxfp4.fp8_blocks),
    "llama_fp8": ("Llama", FOUR_EVEN, fp8_mxfp4.compressed),
    "gpt_oss": ("GptOss", GPT_OSS, fp8_mxfp4.mxfp4_experts),
}
"""Name -> class, configuration, and conversion to the stored format."""

PUBLISHED: dict[str, Callable[[], Made]] = {
    "internlm": published.internlm,
    "internlm2": published.internlm2,
    "orion": published.orion,
    "minicpm": published.minicpm,
    "baichuan2_7b": published.baichuan2_7b,
    "baichuan2_13b": published.baichuan2_13b,
    "chatglm2": published.chatglm2,
    "deepseek_moe": published.deepseek_moe,
}


def from_transformers(kind: str, options: dict[str, Any]) -> Made:
    """Return a model of transformers with random weights."""
    base = kind.removesuffix("LMHead").removesuffix(recent.WITH_IMAGES)
    config_name = f"{base}TextConfig" if kind in TEXT_OF else f"{base}Config"
    config = getattr(transformers, config_name)(**options, initializer_range=0.5)
    # transformers 5.23 adds Falcon's ALiBi twice in its eager attention
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    if kind in {wide for wide, _ in WIDE.values()}:
        for each in (config, config.get_text_config()):
            each._experts_implementation = "eager"  # which also computes in float64
    suffix = "LMHeadModel" if kind.endswith("LMHead") else "ForCausalLM"
    if kind.endswith(recent.WITH_IMAGES):
        suffix = recent.WITH_IMAGES
    if kind in {encoder for encoder, _ in ENCODERS.values()}:
        suffix = "ForMaskedLM"
    is_pair = kind in {pair for pair, _ in PAIRS.values()}
    if is_pair:
        suffix = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    found = getattr(transformers, base + suffix, None)
    # InternLM 3 has a configuration only, for the implementation of another model
    made = transformers.AutoModelForCausalLM.from_config(config) if found is None else found(config)
    model = made.eval()
    convert = None
    if base == "T5" and options.get("tie_word_embeddings") is False:
        # transformers 5.23 ties the head at construction, though the checkpoints have one
        model.lm_head = torch.nn.Linear(config.d_model, config.vocab_size, bias=False)
        convert = released.with_head(model)
    randomize(model)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias += torch.randn_like(model.final_logits_bias).half().float()
    if is_pair:
        read = torch.tensor(np.random.default_rng(99).integers(3, 97, N_READ))[None]
        return Made(model, lambda ids: model(input_ids=read, decoder_input_ids=ids).logits, convert)
    if base == "Doge" and options.get("is_moe"):
        return Made(model, lambda ids: by_token(model, ids))
    return Made(model, lambda ids: model(ids).logits)


def by_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits token by token; Doge's experts mix the router's scores of a whole prompt."""
    cache = transformers.DynamicCache(config=model.config)
    steps = (model(ids[:, t : t + 1], past_key_values=cache) for t in range(ids.shape[1]))
    return torch.cat([step.logits for step in steps], 1)


def well_conditioned(kind: str, options: dict[str, Any]) -> Made:
    """Return a model whose logits, computed in float64, float32 gives to `MAX_ERROR`.

    The norm behind a recurrence amplifies roundings where the output is a small difference of
    large terms, as it happens to be with some random weights.
    """
    ids = torch.tensor(np.random.default_rng(0).integers(2, 97, N_TOKENS))[None]
    for _ in range(50):
        made = from_transformers(kind, options)
        narrow = made.logits
        with torch.no_grad():
            rough = narrow(ids)
            with in_float64(made.model):
                exact = narrow(ids)
        if (rough - exact).abs().max() < MAX_ERROR * exact.abs().max():
            layouts = released.LAYOUTS | recent.AS_RELEASED
            convert = layouts[kind](made.model) if kind in layouts else None
            return Made(made.model, functools.partial(_wide_logits, made), convert)
    raise ValueError(f"no random weights of {kind} give float32 logits to {MAX_ERROR}")


TEXT_OF = ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
"""Classes whose configuration is called that of the text model."""


def _wide_logits(made: Made, ids: torch.Tensor) -> torch.Tensor:
    with in_float64(made.model):
        logits = made.logits(ids)
    return logits.float()


def main() -> None:
    """Write the folders named on the command line, or all."""
    transformers.utils.logging.disable_progress_bar()
    wanted = sys.argv[1:] or [*HF, *WIDE, *ENCODERS, *PAIRS, *STORED, *PUBLISHED]
    for name in wanted:
        torch.manual_seed(sum(map(ord, name)))
        if name in WIDE:
            write(name, well_conditioned(*WIDE[name]))
        elif name in PUBLISHED:
            write(name, PUBLISHED[name]())
        elif name in STORED:
            kind, options, store = STORED[name]
            write(name, store(from_transformers(kind, options)))
        else:
            made = from_transformers(*(HF | ENCODERS | PAIRS)[name])
            write(name, made, encoder=name in ENCODERS)


def arrays(made: Made, seed: int, n_new: int) -> dict[str, np.ndarray]:
    """Return ids, logits and continuation; those of other ids if the continuation is a near tie."""
    ids = np.random.default_rng(seed).integers(2, 97, N_TOKENS)
    batch = torch.tensor(ids)[None]
    result = {"ids": ids.astype(np.int32), "logits": made.logits(batch)[0].numpy()}
    if made.model.config.model_type == "bert":
        types = (np.arange(N_TOKENS) > 17).astype(np.int32)
        given = {"token_type_ids": torch.tensor(types)[None]}
        states, typed = made.model.bert(batch, **given), made.model(batch, **given).logits
        result |= {"types": types, "hidden": states.last_hidden_state[0].numpy()}
        result["typed_logits"] = typed[0].numpy()
    if made.model.config.is_encoder_decoder:
        result["encoder_ids"] = np.random.default_rng(99).integers(3, 97, N_READ).astype(np.int32)
    result["continuation"], is_tie = greedy(made, ids, n_new)
    numbers = getattr(made.model.config, "rope_parameters", None) or {}
    if numbers.get("rope_type") == "longrope":
        result["short_logits"] = made.logits(batch[:, :N_SHORT])[0].numpy()
        if numbers["short_factor"] != numbers["long_factor"]:
            result |= crossing(made, ids)
    return arrays(made, seed + 1, n_new) if is_tie else result


def crossing(made: Made, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the first tokens whose continuation shows when LongRoPE's angles change."""
    numbers = made.model.config.rope_parameters
    original = numbers["original_max_position_embeddings"]
    for start in range(N_TOKENS - N_SHORT):
        begin = ids[start : start + N_SHORT]
        new, is_tie = greedy(made, begin, N_CROSSING)
        others = []
        for limit in (1, N_TOKENS):  # long divisors throughout, or short ones
            numbers["original_max_position_embeddings"] = limit
            others.append(greedy(made, begin, N_CROSSING)[0])
        numbers["original_max_position_embeddings"] = original
        if not is_tie and not any(np.array_equal(new, other) for other in others):
            return {"crossing_ids": begin.astype(np.int32), "crossing": new}
    raise ValueError("no continuation depends on when the angles change; take other weights")


def greedy(made: Made, ids: np.ndarray, n_new: int) -> tuple[np.ndarray, bool]:
    """Return the most probable continuation, and whether it is nearly a tie somewhere."""
    new, is_tie = list(ids), False
    for _ in range(n_new):
        row = made.logits(torch.tensor(new)[None])[0, -1]
        new.append(int(row.argmax()))
        first, second = row.topk(2).values
        is_tie = is_tie or bool(first - second < 1e-3 * row.abs().max())
    return np.array(new[len(ids) :], np.int32), is_tie


def write(name: str, made: Made, encoder: bool = False) -> None:
    """Write one folder."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    with torch.no_grad():
        golden = arrays(made, 0, 0 if encoder else N_NEW)
    made.model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = {k: v.half() for k, v in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    if made.convert is not None:
        tensors, config = made.convert(tensors, config)
    tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for key in ("transformers_version", "architectures", "dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez_compressed(folder / "golden.npz", **golden)
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{name:20} {size / 1024:6.1f} KB, logits up to {np.abs(golden['logits']).max():.2f}")


if __name__ == "__main__":
    main()

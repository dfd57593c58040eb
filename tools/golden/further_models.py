"""Decoders that differ little from others, for `tools/golden/families.py`."""

from __future__ import annotations

from typing import Any

from recent_models import EVEN, EXPERTS, SIGMOID, WINDOWS, rope

OLD = {
    "vocab_size": 97, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
THREE = {
    **EVEN, "num_hidden_layers": 3, "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
"""A window between two layers without one."""
SINKS = {
    **THREE, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_swa": ("GraniteSWA", {**SINKS, "layer_rope_theta": [3000.0, 100.0, 0.0]}),
    "granitemoe_swa": ("GraniteMoeSWA", {
        **SINKS, "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 20}),
    "nanochat": ("NanoChat", EVEN),
    "exaone": ("Exaone", EVEN),
    "sarvam_moe": ("SarvamMoE", {**SIGMOID, "num_hidden_layers": 2}),
    "flint": ("Flint", {
        **EXPERTS, "num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 20, "sliding_window": 9, "mlp_only_layers": [0],
        "layer_types": THREE["layer_types"]}),
    "cohere2_moe": ("Cohere2Moe", {
        **THREE, "intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
        "num_shared_experts": 2, "prefix_dense_intermediate_size": 40, "logit_scale": 0.25,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "tie_word_embeddings": True}),
    "lfm3": ("Lfm3", {
        **WINDOWS, "num_hidden_layers": 3, "tie_word_embeddings": True, "rope_parameters": {
            "sliding_attention": rope(),
            "full_attention": rope("proportional", 1e6, partial_rotary_factor=0.5)},
        "layer_types": ["conv", "full_attention", "sliding_attention"]}),
    "codegen": ("CodeGen", {**OLD, "n_head": 4, "n_embd": 32, "rotary_dim": 4}),
    "biogpt": ("BioGpt", {
        "vocab_size": 97, "hidden_size": 36, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 3, "max_position_embeddings": 64, "bos_token_id": None,
        "eos_token_id": None}),
}  # fmt: skip
"""Name -> class and configuration."""
NARROW: dict[str, tuple[str, dict[str, Any]]] = {
    "xglm": ("XGLM", {
        "vocab_size": 97, "d_model": 36, "ffn_dim": 56, "num_layers": 2, "attention_heads": 3,
        "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}),
    "openai_gpt": ("OpenAIGPTLMHead", OLD),
    "ctrl": ("CTRLLMHead", {**OLD, "dff": 56}),
}  # fmt: skip
"""Models whose code computes in float32 only."""

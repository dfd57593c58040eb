"""Conversions of tensors and configuration of transformers to those of released checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from random_models import Convert, Tensors


def nested(model: Any) -> Convert:
    """Return a conversion to a text model within a multimodal one, as Qwen 3.5 is released."""

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        renamed = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
        renamed["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 3).half()
        return renamed, {"model_type": "qwen3_5", "text_config": config}

    return convert


def separate_convolutions(model: Any) -> Convert:
    """Return a conversion of OLMo Hybrid's convolutions, which transformers 5.23 cuts wrongly."""

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        for i, layer in enumerate(model.model.layers):
            if hasattr(layer, "linear_attn"):
                whole = layer.linear_attn.conv1d.weight.data.half()
                parts = whole.split([keys, keys, len(whole) - 2 * keys])
                for name, part in zip("qkv", parts, strict=True):
                    tensors[f"model.layers.{i}.linear_attn.{name}_conv1d.weight"] = part
        return tensors, config

    return convert


def pattern_of_letters(model: Any) -> Convert:
    """Return a conversion of Nemotron-H's kinds of layers to the letters of its configuration."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        kinds = config.pop("layers_block_type")
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
        return tensors, config | {"num_hidden_layers": len(kinds)}

    return convert


def keys_of_kimi(model: Any) -> Convert:
    """Return a conversion of Kimi Linear's configuration to the keys of its release."""
    names = {
        "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
        "n_group": "num_expert_group", "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize", "max_position_embeddings": "model_max_length",
    }  # fmt: skip

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        kinds = config.pop("layer_types")
        config["linear_attn_config"] = {
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind[0] == "f"],
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind[0] == "l"],
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        }
        config["first_k_dense_replace"] = config.pop("mlp_layer_types").index("sparse")
        return tensors, {names.get(key, key): value for key, value in config.items()}

    return convert


LAYOUTS: dict[str, Callable[[Any], Convert]] = {
    "KimiLinear": keys_of_kimi,
    "NemotronH": pattern_of_letters,
    "Qwen3_5": nested,
    "OlmoHybrid": separate_convolutions,
}
"""Class -> conversion to the layout of released checkpoints."""


def with_head(model: Any) -> Convert:
    """Return a conversion that adds the head of `model` to its tensors."""

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        head = {"lm_head.weight": model.lm_head.weight.data.half()}
        return tensors | head, config | {"tie_word_embeddings": False}

    return convert

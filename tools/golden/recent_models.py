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


def rope(kind: str = "default", theta: float = 10000.0, **numbers: Any) -> dict[str, Any]:
    """Return a configuration's rotary table."""
    return {"rope_theta": theta, "rope_type": kind, **numbers}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3": ("Ministral3", {**TINY, "sliding_window": None, "rope_parameters": rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, max_position_embeddings=64,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)}),
}  # fmt: skip
"""Name -> class and configuration."""


def within(
    model_type: str, model: str = "model.language_model.", head: str = "lm_head."
) -> Callable[[Any], Convert]:
    """Return what makes the conversion to a text model within a multimodal one."""

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        renamed = {
            name.replace("model.", model, 1).replace("lm_head.", head, 1): tensor
            for name, tensor in tensors.items()
        }
        renamed["vision_tower.patch_conv.weight"] = torch.zeros(2, 3).half()
        return renamed, {"model_type": model_type, "text_config": config}

    return lambda _: convert


AS_RELEASED: dict[str, Callable[[Any], Convert]] = {
    "Ministral3": within("mistral3", "language_model.model.", "language_model.lm_head."),
}
"""Class -> conversion to the layout of released checkpoints."""

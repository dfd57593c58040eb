"""Small model specifications and random checkpoints for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from nbflow.spec.family import family_of
from nbflow.spec.from_config import build_spec
from nbflow.spec.layer_specs import RopeSpec
from nbflow.spec.model_spec import ModelSpec

LLAMA_TENSORS = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attn.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attn.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attn.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attn.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.ffn.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.ffn.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def make_spec(**changes: Any) -> ModelSpec:
    """Return a small Llama; `changes` override its numbers."""
    numbers: dict[str, Any] = {
        "name": "test",
        "family": "llama",
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 192,
        "n_layers": 3,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 32,
        "max_context": 64,
        "norm": "rms",
        "norm_eps": 1e-5,
        "activation": "silu",
        "gated": True,
        "window": None,
        "logits_soft_cap": None,
        "tied_head": False,
        "tensors": LLAMA_TENSORS,
    }
    numbers |= changes
    numbers.setdefault("rope", RopeSpec("half", 10000.0, numbers["head_dim"]))
    numbers.setdefault("sm_scale", numbers["head_dim"] ** -0.5)
    return ModelSpec(**numbers)


def write_llama(folder: Path, dtype: Any = np.float32, seed: int = 0, **changes: Any) -> ModelSpec:
    """Write a Hugging Face folder with random weights and return its specification.

    The scale of the matrices keeps activations near 1, so that rounding is not amplified.
    """
    spec = make_spec(**changes)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        if len(shape) == 2:
            array = rng.standard_normal(shape) / np.sqrt(shape[1])
        else:
            array = 1 + 0.1 * rng.standard_normal(shape)
        tensors[spec.checkpoint_name(name)] = array.astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_head,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return spec


def write_checkpoint(folder: Path, config: dict[str, Any], dtype: Any = np.float32) -> None:
    """Write a Hugging Face folder with random weights, for the config.json of any family."""
    family = family_of(config["model_type"], "test")
    spec = build_spec(family, config, name="test", where="test", checkpoint_tensors=None)
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    parts = [spec] if spec.encoder is None else [spec, spec.encoder]
    places = [part.tensor_layout(name) for part in parts for name in part.tensor_shapes()]
    for place in places:
        if len(place.shape) > 1:
            array = rng.standard_normal(place.shape) / np.sqrt(place.shape[-1])
        else:
            array = 1 + 0.1 * rng.standard_normal(place.shape)
        tensors.setdefault(place.name, array.astype(dtype))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))

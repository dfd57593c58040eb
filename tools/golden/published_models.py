"""Models whose published code is not part of transformers, for `tools/golden/families.py`.

Each is an equivalent transformers class with the published code's differences written out here, and
tensors and configuration renamed as in the published checkpoints:

============  =====================================================================================
internlm      Llama with biases (modeling_internlm.py)
internlm2     Llama with q, k and v in one matrix, group by group (modeling_internlm2.py)
orion         Llama with torch.nn.LayerNorm (modeling_orion.py)
minicpm       Granite, whose factors are called otherwise (modeling_minicpm.py)
baichuan2     Llama with fused q, k, v and a head with rows of length 1; ALiBi in the 13b form
              (modeling_baichuan.py)
chatglm2      GLM, with tensors fused and renamed (modeling_chatglm.py)
deepseek_moe  Llama with the mixture of experts of modeling_deepseek.py
============  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from random_models import Convert, Made, Tensors, randomize
from torch import nn
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

SIZES = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.5,
}  # fmt: skip


def _llama(**options: Any) -> Any:
    config = LlamaConfig(**{**SIZES, **options})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    randomize(model)
    return model


def _configured(config: dict[str, Any], drop: str = "", **values: Any) -> dict[str, Any]:
    kept = {k: v for k, v in config.items() if k not in drop.split()}
    return {**kept, **values}


def internlm() -> Made:
    """InternLM 1."""
    model = _llama(attention_bias=True)

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        rotary = {"base": 10000, "type": "dynamic"}
        dropped = "attention_bias mlp_bias rope_parameters head_dim num_key_value_heads"
        return tensors, _configured(
            config, dropped, model_type="internlm", bias=True, rotary=rotary
        )

    return Made(model, lambda ids: model(ids).logits, convert)


def internlm2() -> Made:
    """InternLM 2."""
    groups, heads, dim = 2, 4, 8
    model = _llama(
        hidden_size=heads * dim, num_attention_heads=heads, num_key_value_heads=groups,
        rope_parameters={"rope_theta": 1e6, "rope_type": "dynamic", "factor": 2.0},
    )  # fmt: skip
    names = {
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        new = {
            "model.tok_embeddings.weight": tensors["model.embed_tokens.weight"],
            "model.norm.weight": tensors["model.norm.weight"],
            "output.weight": tensors["lm_head.weight"],
        }
        for i in range(2):
            at = f"model.layers.{i}."
            q, k, v = (
                tensors[f"{at}self_attn.{n}_proj.weight"].reshape(groups, -1, dim, heads * dim)
                for n in "qkv"
            )
            new[f"{at}attention.wqkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, heads * dim)
            for theirs, ours in names.items():
                new[f"{at}{theirs}.weight"] = tensors[f"{at}{ours}.weight"]
        scaling = {"type": "dynamic", "factor": 2.0}
        dropped = "attention_bias mlp_bias rope_parameters head_dim"
        return new, _configured(
            config, dropped, model_type="internlm2", bias=False, rope_theta=1000000,
            rope_scaling=scaling, attn_implementation="eager",
        )  # fmt: skip

    return Made(model, lambda ids: model(ids).logits, convert)


def orion() -> Made:
    """Orion: every norm is a LayerNorm with a bias."""
    model = _llama(rms_norm_eps=1e-5)

    def norm() -> nn.LayerNorm:
        made = nn.LayerNorm(36, eps=1e-5)
        for parameter in made.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
            parameter.data = parameter.data.half().float()
        return made

    model.model.norm = norm()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        return tensors, _configured(
            config, "rope_parameters", model_type="orion", rope_theta=10000.0, rope_scaling=None
        )

    return Made(model, lambda ids: model(ids).logits, convert)


def minicpm() -> Made:
    """MiniCPM: its factors are Granite's by other names."""
    config = GraniteConfig(
        **{**SIZES, "tie_word_embeddings": True},
        embedding_multiplier=12.0,
        residual_multiplier=1.4 / 2**0.5,
        attention_multiplier=12**-0.5,
        logits_scaling=36 / 16,
    )
    config._attn_implementation = "eager"
    model = GraniteForCausalLM(config).eval()
    randomize(model)

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        dropped = (
            "embedding_multiplier residual_multiplier attention_multiplier logits_scaling "
            "rope_parameters tie_word_embeddings"
        )
        factors = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
        return tensors, _configured(config, dropped, model_type="minicpm", **factors)

    return Made(model, lambda ids: model(ids).logits, convert)


# ---- Baichuan -------------------------------------------------------------------------------


def _baichuan(max_position: int | None) -> Convert:
    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        for i in range(2):
            at = f"model.layers.{i}.self_attn."
            parts = [tensors.pop(f"{at}{name}_proj.weight") for name in "qkv"]
            tensors[f"{at}W_pack.weight"] = torch.cat(parts)
        dropped = "rope_parameters num_key_value_heads head_dim max_position_embeddings"
        config = _configured(config, dropped, model_type="baichuan", model_max_length=64)
        if max_position is not None:
            config["max_position_embeddings"] = max_position
        return tensors, config

    return convert


def _normalized_head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ nn.functional.normalize(model.lm_head.weight).T


def baichuan2_7b() -> Made:
    """Baichuan 2 with rotary positions."""
    model = _llama()

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return _normalized_head(model, model.model(ids).last_hidden_state)

    return Made(model, logits, _baichuan(64))


def baichuan2_13b() -> Made:
    """Baichuan 2 with ALiBi: no rotation, and a mask with a slope for each head."""
    model = _llama()
    model.model.rotary_emb.forward = lambda x, position_ids: (
        torch.ones(1, x.shape[1], 12),
        torch.zeros(1, x.shape[1], 12),
    )

    def logits(ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        # 3 heads: the two slopes of 2 heads, then the first of 4 heads
        slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2])
        distance = torch.arange(n)[None] - torch.arange(n)[:, None]
        mask = slopes[:, None, None] * distance
        mask = mask.masked_fill(distance > 0, torch.finfo(torch.float32).min)
        hidden = model.model(ids, attention_mask=mask[None]).last_hidden_state
        return _normalized_head(model, hidden)

    return Made(model, logits, _baichuan(None))


# ---- ChatGLM2 and DeepSeek -------------------------------------------------------------------


def chatglm2() -> Made:
    """ChatGLM2, as GLM with other names."""
    config = GlmConfig(
        **{**SIZES, "hidden_size": 32, "num_attention_heads": 4},
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        rms_norm_eps=1e-5,
    )
    config._attn_implementation = "eager"
    model = GlmForCausalLM(config).eval()
    randomize(model)

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        new = {
            "transformer.embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
            "transformer.encoder.final_layernorm.weight": tensors["model.norm.weight"],
            "transformer.output_layer.weight": tensors["lm_head.weight"],
            "transformer.rotary_pos_emb.inv_freq": torch.zeros(2),
        }
        for i in range(2):
            old, at = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
            for kind in ("weight", "bias"):
                parts = [tensors[f"{old}self_attn.{n}_proj.{kind}"] for n in "qkv"]
                new[f"{at}self_attention.query_key_value.{kind}"] = torch.cat(parts)
            for theirs, ours in (
                ("self_attn.o_proj", "self_attention.dense"),
                ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
                ("mlp.down_proj", "mlp.dense_4h_to_h"),
                ("input_layernorm", "input_layernorm"),
                ("post_attention_layernorm", "post_attention_layernorm"),
            ):
                new[f"{at}{ours}.weight"] = tensors[f"{old}{theirs}.weight"]
        return new, {
            "model_type": "chatglm", "padded_vocab_size": 97, "hidden_size": 32, "num_layers": 2,
            "num_attention_heads": 4, "ffn_hidden_size": 56, "kv_channels": 8, "seq_length": 64,
            "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True,
            "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True,
            "layernorm_epsilon": 1e-5, "original_rope": True, "tie_word_embeddings": False,
            "apply_residual_connection_post_layernorm": False,
        }  # fmt: skip

    return Made(model, lambda ids: model(ids).logits, convert)


class _Experts(nn.Module):
    """The mixture of experts of DeepSeek MoE: softmax, top-k without renormalising, shared one."""

    def __init__(self, mlp: Callable[[int], nn.Module], n: int, top_k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(36, n, bias=False)
        self.experts = nn.ModuleList(mlp(12) for _ in range(n))
        self.shared_experts = mlp(24)
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.softmax(self.gate(x), -1).topk(self.top_k, -1)
        out = self.shared_experts(x)
        for e, expert in enumerate(self.experts):
            share = (weights * (chosen == e)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


def deepseek_moe() -> Made:
    """DeepSeek MoE: the first layer dense, the others with experts."""
    model = _llama(intermediate_size=40)
    kind = type(model.model.layers[0].mlp)

    def mlp(size: int) -> nn.Module:
        made: nn.Module = kind(LlamaConfig(**{**SIZES, "intermediate_size": size}))
        return made

    for layer in model.model.layers[1:]:
        layer.mlp = _Experts(mlp, 5, 3)
        randomize(layer.mlp)

    def convert(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        experts = {
            "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "norm_topk_prob": False, "scoring_func": "softmax", "rope_theta": 10000,
        }  # fmt: skip
        return tensors, _configured(
            config, "rope_parameters head_dim mlp_bias", model_type="deepseek", **experts
        )

    return Made(model, lambda ids: model(ids).logits, convert)

"""Fields of our families from the network structure of Inferflow's model specifications."""

from __future__ import annotations

from typing import Any

from nbflow.compat.inferflow.model_spec_file import ModelSpecFile
from nbflow.compat.inferflow.model_spec_tensors import Names
from nbflow.spec.fields import FIELDS, check_field

Table = dict[str, Any]

_PRESETS = {"llama": ("rms", "silu", "rope"), "bloom": ("std", "gelu", "alibi")}
_NORMS = {"std": "layer", "rms": "rms"}
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "glu_silu": "silu"}
_POSITIONS = {
    "rope": "rope",
    "alibi": "alibi",
    "sinusoidal": "sinusoidal",
    "sinusoidal2": "sinusoidal",
    "empty": "none",
    "": "none",
}
_GELU: Table = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), "gelu_tanh"),
}
"""Values of the activation's key in config.json that agree with ``gelu``."""
_NEAR_ONE = (0.9999, 1.0001)
_LEAST_SCALE = 1e-4


def structure_and_config(spec: ModelSpecFile, names: Names) -> tuple[Table, Table]:
    """Return the tables [structure] and [config] of a family file."""
    network = spec.network
    norm, activation, position = _PRESETS.get(spec.kind, ("std", "silu", "rope"))
    structure: Table = {
        "norm": spec.word("normalization_function", norm, _NORMS),
        "activation": spec.word("activation_function", activation, _ACTIVATIONS),
        "position": spec.word("position_embedding", position, _POSITIONS),
    }
    config = _numbers(spec)
    if structure["activation"] == "gelu_tanh":
        del structure["activation"]
        config["activation"] = [
            {"when": {"model_type": "gemma"}, "default": "gelu_tanh"},
            {"keys": ["hidden_act", "activation_function", "activation"], "values": _GELU},
            {"default": "gelu_tanh"},
        ]
    _feed_forward(spec, names, structure, config)
    _residual(spec, structure)
    _positions(spec, names, structure, config)
    _scales(spec, structure, config)
    if structure["norm"] == "layer":
        config["norm_bias"] = _stored(names.of("layers.{i}.attn_norm.bias"))
    for field in ("embed_norm", "final_norm"):
        config[field] = _stored(names.of(f"{field}.weight"))
    config["head_bias"] = _stored(names.of("head.bias"))
    config["tied_head"] = {"keys": ["tie_word_embeddings"], "optional": True}
    if "layers.{i}.attn.qkv.weight" in names.tensors:
        structure["qkv_layout"] = "blocks" if network.get("qkv_format", 0) else "groups"
    if network.get("normalize_lm_head", False):
        structure["normalize_head"] = True
    if spec.kind == "encoder":
        structure |= {"causal": False, "head_transform": "transform.weight" in names.tensors}
        if "types.weight" in names.tensors:
            config["type_vocab_size"] = {"keys": ["type_vocab_size"], "default": 2}
    if "embed.in.weight" in names.tensors:
        config["embed_size"] = {"keys": ["word_embed_proj_dim", "embedding_size"], "optional": True}
    for name in [name for name, rules in config.items() if rules == _stored([])]:
        structure[name] = config.pop(name)[0]["default"]
    return structure, config


def _stored(names: list[str]) -> list[Table]:
    """Return rules for a field that is true if the checkpoint has one of some tensors."""
    return [*({"stored": name, "default": True} for name in names), {"default": False}]


def _numbers(spec: ModelSpecFile) -> Table:
    """Return the rules for sizes and tokens; the keys are those that Inferflow reads, and more."""
    side = "encoder" if spec.kind == "encoder" else "decoder"
    config: Table = {
        "vocab_size": {"keys": ["padded_vocab_size", "vocab_size"]},
        "hidden_size": {"keys": ["d_model", "n_embed", "n_embd", "hidden_size"]},
        "intermediate_size": {
            "keys": ["intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"],
            "formula": "4 * hidden_size",
        },
        "n_layers": {
            "keys": [f"{side}_layers", f"num_{side}_layers", "n_layer", "num_hidden_layers",
                     "num_layers"],
        },
        "n_heads": {
            "keys": [f"{side}_attention_heads", "num_attention_heads", "num_heads", "n_head"]
        },
        "n_kv_heads": [
            {"when": {"new_decoder_architecture": True},
             "keys": ["num_kv_heads", "n_head_kv"], "same_as": "n_heads"},
            {"when": {"multi_query": True}, "default": 1},
            {"when": {"multi_query": False}, "same_as": "n_heads"},
            {"when": {"multi_query_attention": False}, "same_as": "n_heads"},
            {"keys": ["num_key_value_heads", "num_kv_heads", "multi_query_group_num"],
             "same_as": "n_heads"},
        ],
        "head_dim": {"keys": ["head_dim", "kv_channels"], "formula": "hidden_size / n_heads"},
        "max_context": {
            "keys": ["max_position_embeddings", "n_positions", "seq_length", "model_max_length"],
            "default": 2048,
        },
        "norm_eps": {
            "keys": ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"],
            "default": 1e-5,
        },
        "bos_token_id": {"keys": ["bos_token_id"], "optional": True},
        "eos_token_ids": {"keys": ["eos_token_id"], "optional": True},
    }  # fmt: skip
    rows = spec.top.get("padded_vocab_size") or next(
        (spec.top[key] for key in ("vocab_size", "input_vocab_size") if key in spec.top), 0
    )
    if rows:
        config["vocab_size"] = [{"default": rows}]
    return config


def _feed_forward(spec: ModelSpecFile, names: Names, structure: Table, config: Table) -> None:
    """State whether the feed-forward network is gated, and its experts."""
    network = spec.network
    experts = network.get("expert_count", 0)
    if spec.kind == "bloom":
        structure["gated"] = False
    elif spec.kind == "llama" or experts or "layers.{i}.ffn.gate_up.weight" in names.tensors:
        structure["gated"] = True
    else:
        config["gated"] = _stored(names.in_checkpoint(names.w3))
    if not experts:
        return
    if network.get("using_expert_count", experts) < experts:
        raise spec.error("using_expert_count", f"must be expert_count, {experts}: all are used")
    if network.get("moe_layer_end", -1) != -1:
        raise spec.error("moe_layer_end", "must be -1: experts up to the last layer")
    structure |= {
        "n_experts": experts,
        "experts_per_token": network.get("moe_top_k", 0),
        "router_renormalize": network.get("moe_norm_top_k_prob", True),
        "dense_first": network.get("moe_layer_start", 0),
    }
    config["expert_size"] = {"keys": ["moe_intermediate_size"], "optional": True}
    if network.get("has_shared_expert", False):
        config["shared_size"] = [
            {"keys": ["shared_expert_intermediate_size"]},
            {"formula": "moe_intermediate_size * n_shared_experts"},
        ]


def _residual(spec: ModelSpecFile, structure: Table) -> None:
    """State how attention and feed-forward network are added."""
    parallel, shared = (
        spec.network.get(key, False) for key in ("is_parallel_attn", "mlp_attn_share_input")
    )
    if parallel and shared:
        raise spec.error("mlp_attn_share_input", "must be false with is_parallel_attn")
    if parallel or shared:
        structure["residual"] = "parallel_two_norms" if shared else "parallel"
    if not spec.network.get("use_self_attn_pre_norm", True):
        raise spec.error("use_self_attn_pre_norm", "must be true: norms have weights")


def _positions(spec: ModelSpecFile, names: Names, structure: Table, config: Table) -> None:
    """State the position embedding."""
    network = spec.network
    if structure["position"] == "none" and "positions.weight" in names.tensors:
        structure["position"] = "learned"
    if network.get("pos_embedding_offset", 0):
        structure["position_offset"] = network["pos_embedding_offset"]
    if structure["position"] == "sinusoidal":
        second = network["position_embedding"].lower() == "sinusoidal2"
        structure["sinusoids"] = "paper" if second else "fairseq"
    if structure["position"] != "rope":
        return
    order = network.get("qk_column_order", 0)
    if order not in (0, 1, 2):
        raise spec.error("qk_column_order", "must be 0, 1 or 2")
    structure["rope_style"] = "half" if order == 2 else "interleaved"
    if network.get("rope_dim", -1) > 0:
        structure["rope_dim"] = network["rope_dim"]
    tables = ("rope_scaling.", "rope_parameters.", "")
    theta = check_field(
        network.get("rope_theta", 10000.0), f"{spec.path}: rope_theta", FIELDS["rope_theta"]
    )
    config["rope_theta"] = [
        {"keys": [f"{table}rope_theta" for table in tables]},
        {"formula": f"{theta!r} * rope_ratio"},
        {"default": theta},
    ]
    config["rope_fraction"] = {
        "keys": [f"{table}partial_rotary_factor" for table in tables],
        "default": network.get("partial_rotary_factor", 1.0),
    }
    config["rope_scaling"] = {"keys": ["rope_scaling", "rope_parameters"], "optional": True}
    config["window"] = [
        {"when": {"model_type": kind}, "keys": ["sliding_window"], "optional": True}
        for kind in ("mistral", "mixtral")
    ]


def _scales(spec: ModelSpecFile, structure: Table, config: Table) -> None:
    """State factors of embeddings, norms, sublayers and logits."""
    network = spec.network
    before_sinusoids = network.get("linear_norm_before_sinusoidal", True)
    sinusoidal = structure["position"] == "sinusoidal" and before_sinusoids
    scale = network.get("embedding_linear_scale", 0.0)
    if network.get("has_embedding_linear_norm", False) or sinusoidal:
        if scale > _LEAST_SCALE:
            structure["embed_scale"] = scale
        else:
            config["embed_scale"] = {"formula": "sqrt(hidden_size)"}
    offset = spec.number(("attn_pre_norm_base", "ffn_pre_norm_base", "output_norm_base"), 0.0)
    if offset:
        structure["norm_offset"] = offset
    for field, keys in (
        ("residual_scale", ("attn_out_scale", "ffn_out_scale")),
        ("logits_scale", ("out_scale",)),
    ):
        number = spec.number(keys, 1.0)
        if not _NEAR_ONE[0] <= number <= _NEAR_ONE[1]:
            structure[field] = number

"""Values of config.json besides those of the golden models: without effect, or refused by name.

That the former change nothing was found by running transformers' models of tests/golden/families
with each of them; where the authors' code is older than that, by reading it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nbflow.checkpoint import open_weights
from nbflow.spec.family import family_of_config
from nbflow.spec.from_config import build_spec
from nbflow.spec.layer_specs import IndexerSpec, RopeSpec, TemperatureSpec
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import LinearRopeScaling

FOLDER = Path(__file__).parents[1] / "golden" / "families"
ABSENT = object()


def spec_of(name, changes):
    """Return the spec of the golden model with these values of config.json."""
    config = json.loads((FOLDER / name / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ABSENT}
    with open_weights(FOLDER / name) as file:
        held = file.names()
    family = family_of_config(config, "config.json")
    return build_spec(family, config, name=name, where="config.json", checkpoint_tensors=held)


TRAINING = {
    "use_cache": False, "attention_dropout": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
    "hidden_dropout": 0.1, "initializer_range": 0.02, "dtype": "bfloat16", "torch_dtype": "float16",
    "architectures": ["Any"], "transformers_version": "4.31.0", "output_router_logits": True,
    "router_aux_loss_coef": 0.1, "attn_implementation": "flash_attention_2", "auto_map": {},
    "head_dim": ABSENT, "quantization_config": None, "is_encoder_decoder": False,
}  # fmt: skip
"""Keys of every family that do not affect the computation; default head size."""
NO_EFFECT = [
    ("bloom", {"pretraining_tp": 2}),  # bloom-3b, bloom-7b1, bloomz
    ("bloom", {"pretraining_tp": 4, "slow_but_exact": False, "offset_alibi": 100}),
    ("bloom", {"pretraining_tp": 1, "slow_but_exact": True}),
    ("bloom", TRAINING | {"masked_softmax_fusion": True, "attention_softmax_in_fp32": False}),
    ("llama31", {"pretraining_tp": 2}),
    ("llama31", {"sliding_window": 7, "max_window_layers": 1, "layer_types": None}),
    ("llama31", {"hidden_act": "swish"} | TRAINING),
    ("mistral", {"max_window_layers": 1, "use_sliding_window": False}),
    ("internlm2", {"pretraining_tp": 2}),
    ("minicpm", {"sparse_config": None}),
    ("qwen2", {"sliding_window": 3, "max_window_layers": 0, "layer_types": ABSENT}),
    ("qwen2_moe", {"use_sliding_window": False, "layer_types": ABSENT, "sliding_window": 5}),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
    ("smollm3", {"use_sliding_window": False, "sliding_window": 5, "layer_types": ABSENT}),
    ("gemma", {"hidden_act": "gelu"}),  # as first released; tanh is meant
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma", {"hidden_act": ABSENT, "hidden_activation": ABSENT}),
    ("gemma2", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gpt2", {"activation_function": "gelu_fast", "reorder_and_upcast_attn": True, "n_ctx": 9}),
    ("phi", {"hidden_act": "gelu_pytorch_tanh"}),
    ("gpt_neox", {"hidden_act": "gelu_python"}),
    ("starcoder2", {"hidden_act": "gelu_accurate"}),
    ("bert", {"hidden_act": "gelu_python", "position_embedding_type": "absolute"}),
    ("distilbert", {"sinusoidal_pos_embds": True}),  # how the stored table was made
    ("gpt_oss_floats", {"hidden_act": "swish"}),
    ("mpt", {"attn_config": {"clip_qkv": 0.6, "attn_impl": "triton"}, "learned_pos_emb": True}),
    ("m2m_100", {"static_position_embeddings": True, "normalize_embedding": False}),
    ("m2m_100", {"normalize_before": True, "add_final_layer_norm": True}),
    ("mbart", {"normalize_before": True, "add_final_layer_norm": True}),
    ("marian", {"static_position_embeddings": True, "normalize_embedding": False,
                "normalize_before": False, "add_final_layer_norm": False, "add_bias_logits": False,
                "bad_words_ids": [[96]]}),
    ("flan_t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}),  # transformers 5
    ("flan_t5", {"tie_word_embeddings": False, "scale_decoder_outputs": ABSENT}),
    ("cohere", {"use_qk_norm": False}),
    ("stablelm", {"qk_layernorm": False}),
    ("ernie4_5_moe", {"moe_layer_end_index": 2, "moe_capacity": [64, 64], "mtp_loss_weight": 0.3}),
    ("hunyuan_moe", {"moe_topk": 2, "num_experts": [5, 5], "moe_intermediate_size": [12, 12]}),
    ("hunyuan", {"use_qk_norm": True, "use_cla": False, "cla_share_factor": 2}),
    ("seed_oss", {"residual_dropout": 0.1, "pretraining_tp": 2}),
    ("exaone4", {"sliding_window_pattern": "LLLG"}),  # layer_types says it
    ("exaone4_full", {"sliding_window_pattern": None, "layer_types": None}),
    ("deepseek_v2", {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 8}),
    ("chatglm2", {"apply_query_key_layer_scaling": True, "fp32_residual_connection": True}),
    ("llama4_text", {"attn_scale": 3.0, "floor_scale": 2, "router_jitter_noise": 0.1}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2}),
    ("llama31", {"per_layer_config": {"0": {"hidden_act": "silu"}}}),  # as in the other layers
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), NO_EFFECT)
def test_values_without_effect(name, changes):
    base = dict.fromkeys(changes.keys() & {"head_dim"}, ABSENT)
    assert spec_of(name, changes).as_dict() == spec_of(name, base).as_dict()


PLAIN_ROPE = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": ABSENT}
LINEAR = {"rope_type": "linear", "factor": 2.0}
ROPES = [
    ("qwen3", PLAIN_ROPE),
    ("qwen3", PLAIN_ROPE | {"rope_scaling": {"type": "default"}}),
    ("qwen3", PLAIN_ROPE | {"rope_scaling": {"rope_type": "default", "type": "default"}}),
    ("qwen3", PLAIN_ROPE | {"rope_scaling": {}, "rope_theta": None}),
    ("qwen3", {"rope_theta": 5.0}),  # rope_parameters takes precedence
    ("llama_linear", {"rope_scaling": {}}),
    ("llama_linear", PLAIN_ROPE | {"rope_scaling": LINEAR}),
    ("llama_linear", PLAIN_ROPE | {"rope_scaling": {"type": "linear", "factor": 2}}),
    (
        "llama_linear",
        PLAIN_ROPE | {"rope_scaling": LINEAR | {"rope_theta": 1e4}, "rope_theta": 5.0},
    ),
    ("gpt_neox", PLAIN_ROPE | {"rotary_pct": 0.5, "rotary_emb_base": 10000}),
    ("stablelm", PLAIN_ROPE | {"partial_rotary_factor": 0.5}),
    ("stablelm", {"partial_rotary_factor": 0.25}),
    (
        "olmo3",
        {
            "rope_theta": 5e3, "rope_parameters": ABSENT,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                             "original_max_position_embeddings": 16},
        },
    ),
    (
        "hunyuan",
        PLAIN_ROPE | {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0,
                                       "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 0.0}},
    ),
    ("internlm3", PLAIN_ROPE | {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
    ("seed_oss", PLAIN_ROPE),
    ("qwen2", PLAIN_ROPE | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}),
    ("bailing_moe_v2", PLAIN_ROPE | {"partial_rotary_factor": 0.5}),
]  # fmt: skip
"""The rotary embedding in the words of transformers 4 and 5."""


@pytest.mark.parametrize(("name", "changes"), ROPES)
def test_names_of_rotary_numbers(name, changes):
    assert spec_of(name, changes).as_dict() == spec_of(name, {}).as_dict()


CONV_BIASES = frozenset({"ssm.x_conv", "ssm.b_conv", "ssm.c_conv"})
DEFAULTS = [
    ("mixtral", "rope_parameters", "rope.theta", 1e6),
    ("cohere", "rope_parameters", "rope.theta", 5e5),
    ("cohere2", "rope_parameters", "rope.theta", 1e4),
    ("smollm3", "rope_parameters", "rope.theta", 2e6),
    ("helium", "rope_parameters", "rope.theta", 1e5),
    ("helium", "rms_norm_eps", "norm_eps", 1e-8),
    ("glm4", "rms_norm_eps", "norm_eps", 1.5625e-7),
    ("olmo2", "rms_norm_eps", "norm_eps", 1e-5),
    ("mixtral", "rms_norm_eps", "norm_eps", 1e-5),
    ("roberta", "layer_norm_eps", "norm_eps", 1e-12),
    ("olmo3", "rope_parameters", "rope.theta", 5e5),
    ("olmo3", "rope_parameters", "local_rope.theta", 5e5),
    ("apertus", "rope_parameters", "rope.theta", 12e6),
    ("apertus", "rope_parameters", "rope.scaling.factor", 8.0),
    ("ernie4_5", "rope_parameters", "rope.theta", 5e5),
    ("solar_open", "rope_parameters", "rope.theta", 1e6),
    ("exaone_moe", "routed_scaling_factor", "moe.scale", 2.5),
    ("exaone_moe", "mlp_layer_types", "moe.layers", frozenset({1, 2})),
    ("ernie4_5_moe", "moe_layer_end_index", "moe.layers", frozenset({1, 2, 3})),
    ("arcee", "hidden_act", "activation", "relu2"),
    ("m2m_100", "activation_function", "activation", "relu"),
    ("m2m_100", "scale_embedding", "embed_scale", math.sqrt(24)),
    ("bart", "scale_embedding", "embed_scale", 1.0),
    ("deepseek_v2", "topk_method", "moe.groups", 1),
    ("deepseek_v3", "topk_method", "moe.groups", 4),
    ("llama4_text", "attention_chunk_size", "attention_chunk", 8192),
    ("deepseek_v32", "index_topk", "indexer", None),  # 2048, more than the context
    ("glm_moe_dsa", "indexer_types", "indexer.layers", frozenset({0, 1, 2})),
    ("llama4_text", "no_rope_layers", "unrotated_layers", frozenset()),
    ("llama4_text", "moe_layers", "moe.layers", frozenset({0, 1, 2})),
    ("llama4_text", "use_qk_norm", "qk_norm", "head"),
    ("mistral", "sliding_window", "window", 4096),
    ("ministral", "sliding_window", "window", 4096),
    ("exaone4", "sliding_window", "window", 4096),
    ("gemma2", "sliding_window", "window", 4096),
    ("gemma3", "sliding_window", "window", 4096),
    ("gemma3n", "sliding_window", "window", 512),
    ("gemma4", "sliding_window", "window", 512),
    ("gpt_oss_floats", "sliding_window", "window", 128),
    ("gpt_oss_floats", "rope_parameters", "rope.scaling.factor", 32.0),
    ("mellum", "sliding_window", "window", 1024),
    ("gemma2", "attn_logit_softcapping", "logits_soft_cap", 50.0),
    ("gemma2", "final_logit_softcapping", "head_soft_cap", 30.0),
    ("gemma3", "final_logit_softcapping", "head_soft_cap", None),
    ("vaultgemma", "query_pre_attn_scalar", "sm_scale", 1 / 16),
    ("gemma2", "head_dim", "head_dim", 256),
    ("nanochat", "final_logit_softcapping", "head_soft_cap", 15.0),
    ("cohere", "logit_scale", "logits_scale", 1 / 16),
    ("phi3", "rms_norm_eps", "norm_eps", 1e-5),
    ("iquestcoder", "rms_norm_eps", "norm_eps", 1e-5),
    ("glm4_moe_lite", "rms_norm_eps", "norm_eps", 1e-5),
    ("glm4_moe_lite", "routed_scaling_factor", "moe.scale", 1.8),
    ("deepseek_v3", "routed_scaling_factor", "moe.scale", 2.5),
    ("deepseek_v32", "topk_group", "moe.groups_used", 4),
    ("mistral4", "routed_scaling_factor", "moe.scale", 1.0),
    ("mistral4", "rope_parameters", "rope.scaling.factor", 128.0),
    ("mistral4", "rope_parameters", "temperature.floor", 8192),
    ("flint", "norm_topk_prob", "moe.renormalize", True),
    ("qwen2_5_vl", "text_config.rms_norm_eps", "norm_eps", 1e-5),
    ("qwen2_5_vl", "text_config.rope_parameters", "rope.theta", 1e6),
    ("qwen3_vl", "text_config.rope_parameters", "rope.theta", 5e5),
    ("cwm", "rope_parameters", "rope.scaling.factor", 16.0),
    ("olmo_hybrid", "rope_parameters", "rope.theta", 1e4),
    ("falcon_h1", "mamba_conv_bias", "biases", CONV_BIASES),
    ("bart", "decoder_start_token_id", "decoder_start_id", 2),
    ("marian", "forced_eos_token_id", "forced_eos_ids", (0,)),
]
"""Optional keys and transformers' defaults."""


@pytest.mark.parametrize(("name", "key", "field", "value"), DEFAULTS)
def test_absent_keys(name, key, field, value):
    outer, _, inner = key.rpartition(".")
    changes = {key: ABSENT}
    if outer:
        table = json.loads((FOLDER / name / "config.json").read_text())[outer]
        changes = {outer: {k: v for k, v in table.items() if k != inner}}
    found = spec_of(name, changes)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


MATTERS = [
    ("bloom", {"pretraining_tp": 2, "slow_but_exact": True},
     "pretraining_tp = 2, with slow_but_exact = True, is not supported by family 'bloom'"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
    ("llama31", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama31", {"hidden_act": "tanh"}, "hidden_act: must be one of silu, gelu"),
    ("llama31", {"rope_scaling": {"type": "spiral", "factor": 2.0}, "rope_parameters": None},
     "unknown rope_type 'spiral'"),
    ("qwen2_moe", {"use_sliding_window": True, "layer_types": ABSENT, "sliding_window": 5},
     "use_sliding_window = True, with layer_types = 'absent'"),
    ("smollm3", {"use_sliding_window": True, "layer_types": ABSENT, "sliding_window": 5},
     "use_sliding_window = True, with layer_types = 'absent'"),
    ("qwen2_moe", {"qkv_bias": False}, "qkv_bias = False"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln = True"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type = 'rmsnorm'"),
    ("olmo", {"clip_qkv": -8.0}, "clip_qkv: must be a number from 0 to"),
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
     "moe_normalize_expert_weights = 2.0"),
    ("ctrl", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon = 1e-05"),
    ("jamba", {"num_hidden_layers": ABSENT}, "the configuration does not say n_layers"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm = True"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm = True"),
    ("gpt_oss_floats", {"swiglu_limit": -1.0}, "swiglu_limit"),
    ("olmo3", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}},
     "rope_parameters.rope_type = 'yarn'"),
    ("apertus", {"qk_norm": False}, "qk_norm = False"),
    ("apertus", {"post_norm": True}, "post_norm = True"),
    ("ernie4_5", {"compression_ratio": 0.5}, "compression_ratio = 0.5"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias = True"),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1"),
    ("ernie4_5_moe", {"moe_k": [3, 2]}, "moe_k: must be one number, or a list of the same"),
    ("hunyuan", {"use_cla": True}, "use_cla = True"),
    ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": -2.0}},
     "alpha must be above 0"),
    ("hunyuan", {"use_qk_norm": False}, "use_qk_norm = False"),
    ("hunyuan_moe", {"moe_topk": [1, 2]}, "moe_topk: must be one number"),
    ("hunyuan_moe", {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe = False"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("exaone4", {"layer_types": ABSENT, "sliding_window_pattern": "LLLG"},
     "sliding_window_pattern: must be a whole number"),
    ("afmoe", {"score_func": "softmax"}, "score_func = 'softmax'"),
    ("afmoe", {"sliding_window": None}, "sliding_window"),
    ("bailing_moe_v2", {"norm_head": True}, "norm_head = True"),
    ("gemma3_images", {"text_config": {"final_logit_softcapping": 30.0}},
     "text_config.final_logit_softcapping = 30.0"),
    ("minicpm3", {"scale_depth": None}, "the configuration does not say residual_scale"),
    ("minicpm", {"sparse_config": {"dense_len": -1}}, "attention is sparse at every length"),
    ("phimoe", {"router_jitter_noise": -0.1}, "router_margin must be at least 0, and goes with"),
    ("ministral3", {"text_config": {"model_type": "sphinx"}}, "unknown model_type 'mistral3'"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias = False"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    ("marian", {"normalize_before": True}, "normalize_before = True"),
    ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "attention_chunk goes without"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "index_types must be 3 times"),
    ("glm_moe_dsa", {"indexer_types": ABSENT, "index_topk_freq": 4}, "index_topk_freq = 4"),
    ("cohere2", {"layer_types": ["chunked_attention"] * 3}, "which needs attention_chunk"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 16}}},
     r"head_dim is 16 in layers 1 and 8 in the others, but must have one value for all layers w"),
    ("gemma4", {"per_layer_config": {"6": {}}}, r"numbers of layers, 0\.\.5, got '6'"),
    ("llama31", {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}},
     "rms_norm_eps is 0.5 in layers 0 and .* must have one value for all layers; take"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("granite_swa", {"layer_rope_theta": [1e4, 1e4]}, "rope_thetas must be 3 numbers, one for e"),
    ("granite_swa", {"layer_rope_theta": [1e4, 1e4, 1e3]},
     r"one base in the layers with the window, and one in the others, got \[10000.0\] and \[1000"),
    ("aria_text", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("lara_mini", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("nanochat", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
     "rope_parameters.rope_type = 'linear'"),
    ("bamba", {"hidden_act": "gelu"},
     r'extends = "bamba", \[only\] "hidden_act" = "any" and these fields to a file for --spec'),
    ("biogpt", {"scale_embedding": 0}, "scale_embedding: must be true or false, got 0"),
    ("falcon_7b", {"multi_query": "false"}, "multi_query: must be true or false, got 'false'"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "truncate": {}}},
     "truncate must be true or false, got {}"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale": True}},
     "mscale must be a number, or a list of numbers, got True"),
    ("lfm3", {"rope_parameters": [1e4]}, r"rope_parameters: must be a table, got \[10000.0\]"),
    ("mpt", {"attn_config": {"softmax_scale": math.inf}}, "softmax_scale: must be a number from"),
    ("mellum", {"mlp_layer_types": ["dense", "silu", "sparse"]}, "must be one of dense, sparse, g"),
    ("mellum", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types: must have \d entries, one for e"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), MATTERS)
def test_values_that_matter_are_refused_by_name(name, changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        spec_of(name, changes)
    assert "config.json" in str(caught.value)


CHANGES = [
    ("minimax_m2", {"rotary_dim": 4, "rope_parameters": None, "rope_theta": 5e5}, "rope",
     RopeSpec("half", 5e5, 4)),
    ("gpt2", {"scale_attn_weights": False}, "sm_scale", 1.0),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "sm_scale_by_layer", True),
    ("gpt_oss_floats", {"swiglu_alpha": 1.5}, "activation_name", "swigluoai:7.0:1.5"),
    ("mimo_v2_flash", {"layer_types": ABSENT, "hybrid_layer_pattern": [0, 1, 0, 1]}, "full_layers",
     frozenset({0, 2})),
    ("mimo_v2_flash", {"attention_value_scale": None}, "attn_output_scale", 1.0),
    ("mistral", {"sliding_window": None}, "window", None),  # null is stated
    ("gemma2", {"attn_logit_softcapping": None}, "logits_soft_cap", None),
    ("olmo_hybrid", {"rope_theta": None, "rope_parameters": None}, "position", "none"),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, "position",
     "none"),
    ("gemma2", {"hidden_activation": "gelu"}, "activation", "gelu"),
    ("m2m_100", {"pad_token_id": 4}, "position_offset", 5),
    ("roberta", {"pad_token_id": 3}, "position_offset", 4),
    ("roberta", {"pad_token_id": 3}, "max_context", 62),
    ("t5", {"scale_decoder_outputs": False}, "logits_scale", 1.0),
    ("flan_t5", {"scale_decoder_outputs": True}, "logits_scale", 1 / math.sqrt(24)),
    ("gpt_oss_limit", {"swiglu_limit": 6.0}, "swiglu_limit", 6.0),
    ("olmo3", {"sliding_window": 5}, "window", 5),
    ("olmo3", {"layer_types": ABSENT}, "full_layers", frozenset({3})),
    ("vaultgemma", {"layer_types": ABSENT}, "full_layers", frozenset({1, 3})),
    ("dots1", {"layer_types": ABSENT}, "full_layers", frozenset({0, 1})),
    ("exaone4", {"layer_types": ABSENT}, "full_layers", frozenset({2})),
    ("exaone_moe", {"layer_types": ABSENT}, "full_layers", frozenset({1})),
    ("afmoe", {"layer_types": ABSENT}, "full_layers", frozenset({1})),
    ("gemma3_images", {"tie_word_embeddings": False}, "tied_head", False),
    ("exaone4", {"sliding_window": None}, "unrotated_layers", frozenset()),
    ("ernie4_5", {"use_bias": False}, "biases", frozenset()),
    ("afmoe", {"mup_enabled": False}, "embed_scale", 1.0),
    ("hunyuan", {"attention_bias": False}, "biases", frozenset()),
    ("internlm3", {"attention_bias": False, "mlp_bias": False, "qkv_bias": True}, "biases",
     frozenset({"attn.q", "attn.k", "attn.v"})),
    ("minicpm3", {"scale_emb": 1.0}, "embed_scale", 1.0),
    ("minicpm", {"sparse_config": {"dense_len": 40, "topk": 4}}, "max_context", 39),
    ("minicpm", {"sparse_config": {}, "max_position_embeddings": 32768}, "max_context", 8191),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}, "full_layers", frozenset()),
    ("llama4_text", {"attention_chunk_size": 9}, "attention_chunk", 9),
    ("deepseek_v32", {"index_topk": 64}, "indexer", None),
    (
        "glm_moe_dsa",
        {"index_topk": 20},
        "indexer",
        IndexerSpec(8, 12, 20, "interleaved", frozenset({0, 2})),
    ),
    (
        "glm_moe_dsa",
        {"indexer_types": ABSENT, "index_topk_pattern": "FSS"},
        "indexer",
        IndexerSpec(8, 12, 7, "interleaved", frozenset({0})),
    ),
    ("granite_swa", {"layer_rope_theta": [0.0, 100.0, 3000.0]}, "unrotated_layers",
     frozenset({0})),
    ("granite_swa", {"layer_rope_theta": [100.0, 100.0, 0.0]}, "local_rope", None),
    ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 4}, "unrotated_layers",
     frozenset({0, 2})),
    ("llama4_text", {"no_rope_layers": [0, 1, 0]}, "unrotated_layers", frozenset({0, 2})),
    (
        "llama4_text",
        {"attn_temperature_tuning": True, "floor_scale": 5, "attn_scale": 0.25},
        "temperature",
        TemperatureSpec(0.25, 5, 1, "unrotated"),
    ),
]  # fmt: skip


def test_limits_of_time_steps() -> None:
    for stated in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], ABSENT):
        found = spec_of("mamba2", {"time_step_limit": stated}).ssm
        assert (found.dt_min, found.dt_max or math.inf) == (0.0, math.inf)
    found = spec_of("bamba", {"time_step_limit": [0.25, 0.5]}).ssm
    assert (found.dt_min, found.dt_max) == (0.25, 0.5)


def test_trained_length_outside_the_table_of_a_scaling() -> None:
    """As in transformers 5, it wins over the table's; Phi 3 has one in any case."""
    found = spec_of("llama31", {"original_max_position_embeddings": 32}).rope.scaling
    assert found.original_max_position == 32
    found = spec_of("phi3_long", {"original_max_position_embeddings": ABSENT}).rope.scaling
    assert found.original_max_position == 4096


@pytest.mark.parametrize("name", ["granite", "cohere2"])
def test_logits_of_models_with_images_have_no_factor(name: str) -> None:
    """As transformers computes them."""
    text = json.loads((FOLDER / name / "config.json").read_text())
    config = {"model_type": "llava_next", "text_config": text}
    names = [f"language_model.{n}" for n in open_weights(FOLDER / name).names()]
    family = family_of_config(config, "config.json")
    spec = build_spec(family, config, name=name, where="here", checkpoint_tensors=names)
    assert (spec.logits_scale, spec_of(name, {}).logits_scale != 1.0) == (1.0, True)
    assert spec.tensors["embed.weight"] == "language_model.model.embed_tokens.weight"


def test_other_model_types_of_a_family() -> None:
    assert spec_of("ernie4_5", {"model_type": "paddleocr_vl_text"}).rope.style == "half"
    assert spec_of("phi3", {"model_type": "phi4mm"}) == spec_of("phi3", {})
    assert spec_of("qwen2", {"model_type": "mimo"}) == spec_of("qwen2", {})


def test_scaling_of_layers_with_a_window() -> None:
    table = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}
    found = spec_of("gemma3", {"rope_parameters": {"sliding_attention": table}})
    assert found.local_rope == RopeSpec("half", 5e3, 12, LinearRopeScaling(factor=2.0))
    assert found.rope.scaling is None
    found = spec_of("granite_swa", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    assert found.rope.scaling == found.local_rope.scaling == LinearRopeScaling(factor=2.0)
    assert found.rope.theta != found.local_rope.theta


def test_null_is_not_true() -> None:
    """As in the published code; a key that is absent has its default."""
    assert spec_of("deepseek_v3", {"rope_interleave": None}).rope.style == "half"
    assert not spec_of("deepseek_v3", {"norm_topk_prob": None}).moe.renormalize
    assert spec_of("deepseek_v3", {"norm_topk_prob": ABSENT}).moe.renormalize
    assert spec_of("cohere", {"tie_word_embeddings": None}).tied_head


@pytest.mark.parametrize(("name", "changes", "field", "value"), CHANGES)
def test_values_that_are_followed(name, changes, field, value):
    assert getattr(spec_of(name, {}), field) != value or field == "full_layers"
    assert getattr(spec_of(name, changes), field) == value


def test_widths_of_layers_as_transformers_saves_them() -> None:
    """It writes keys of layers that differ, with zeros before their numbers; none if all agree."""
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    config = {
        "model_type": "gemma4_text", "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 12, "layer_types": types,
    }  # fmt: skip
    wide = {"head_dim": 16, "num_key_value_heads": 1}
    for layers, heads in (({"05": wide, "11": wide}, (1, 16)), ({}, (2, 8)), (None, (2, 512))):
        stated = config if layers is None else config | {"per_layer_config": layers}
        spec = build_spec(family_of_config(stated, "c"), stated, name="m", where="config.json")
        assert (spec.n_kv_heads, spec.head_dim) == heads
        local = spec.local_heads
        assert (local is None) == (heads == (2, 8))
        assert local is None or (local.n_kv_heads, local.key_dim) == (2, 8)


def test_the_last_layer_of_gemma_4_sees_all_tokens() -> None:
    """Its code says so, whatever layer_types does, and in layers of the default pattern, too."""
    types = ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"]
    spec = spec_of("gemma4", {"layer_types": [*types, "sliding_attention"]})
    assert spec.as_dict() == spec_of("gemma4", {}).as_dict()
    changes = {"layer_types": ABSENT, "per_layer_config": ABSENT, "num_hidden_layers": 8}
    assert spec_of("gemma4", changes).full_layers == {5, 7}


def test_layers_are_counted_where_their_number_is_not_stated() -> None:
    kinds = ["linear_attention", "mlp", "full_attention", "mlp"]
    absent = dict.fromkeys(("num_hidden_layers", "hybrid_override_pattern"), ABSENT)
    spec = spec_of("nemotron_h", absent | {"layers_block_type": kinds})
    assert spec.as_dict() == spec_of("nemotron_h", {}).as_dict()


@pytest.mark.parametrize(("n", "full"), [(2, [1]), (3, [2]), (5, [3]), (8, [3, 7])])
def test_olmo_hybrid_without_layer_types(n, full):
    """As transformers fills them in: every fourth layer, or the last one of fewer."""
    spec = spec_of("olmo_hybrid", {"layer_types": ABSENT, "num_hidden_layers": n})
    attends = [i for i, kind in enumerate(spec.layer_kinds) if "attention" in kind.mixer]
    assert attends == full


def test_without_layer_types_the_rotated_layers_attend_within_chunks():
    stated, derived = (spec_of("llama4_text", changes) for changes in ({}, {"layer_types": ABSENT}))
    assert [stated.chunk_of(i) for i in range(3)] == [7, None, 7]
    assert [derived.chunk_of(i) for i in range(3)] == [7, None, 7]

"""Fields of a model specification: type, bounds, default and meaning.

A family, a config.json (through the family's rules) or a model file sets these fields; an
architecture is a choice among their values.  `check_field` bounds every number, whatever its
source, before it sizes anything.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from nbflow.spec.field import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_FLOAT,
    MAX_HEADS,
    MAX_INT,
    MAX_ITEMS,
    MAX_LAYERS,
    MAX_TAPS,
    MAX_WIDTH,
    MIN_POSITIVE,
    REQUIRED,
    Field,
    check_bounds,
    check_field,
)
from nbflow.spec.layer_input_fields import LAYER_INPUT_FIELDS
from nbflow.spec.layer_specs import Mixer
from nbflow.tokenization.special_tokens import MAX_TOKEN_ID, NO_TOKEN

__all__ = [
    "ACTIVATION_ALIASES", "FIELDS", "LAYER_FIELDS", "MAX_CONTEXT", "MAX_FLOAT", "MAX_INT",
    "MAX_ITEMS", "MAX_LAYERS", "REQUIRED", "SIZES", "Field", "check_bounds", "check_field", "show",
]  # fmt: skip


def show(value: Any) -> str:
    """Return a value of a field as text for tables."""
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


ACTIVATION_ALIASES = {
    "swish": "silu",
    "quick_gelu": "gelu_quick",
    "gelu_python": "gelu",
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        "gelu_tanh",
    ),
}
"""Names in transformers, several of which are the same function."""
SIZES = {
    "vocab_size": Field(int, "rows of the token embedding and of the head", least=1),
    "hidden_size": Field(int, "width of the residual stream", least=1, most=MAX_WIDTH),
    "intermediate_size": Field(int, "width of the feed-forward network", least=1, most=MAX_WIDTH),
    "n_layers": Field(int, "number of layers", least=1, most=MAX_LAYERS),
    "n_heads": Field(int, "query heads", least=1, most=MAX_HEADS),
    "n_kv_heads": Field(
        int, "key/value heads; n_heads is a multiple of it", least=1, most=MAX_HEADS
    ),
    "head_dim": Field(int, "width of one head", least=1, most=MAX_WIDTH),
    "max_context": Field(int, "longest sequence, in tokens", least=1, most=MAX_CONTEXT),
    "embed_size": Field(
        int,
        "width of the token embedding, if not hidden_size: embed.in and embed.out project",
        None,
        most=MAX_WIDTH,
    ),
    "type_vocab_size": Field(int, "rows of the token type embedding; 0 for none", 0),
}

FIELDS: dict[str, Field] = {
    **SIZES,
    # norms
    "norm": Field(("rms", "layer"), "kind of the norms"),
    "norm_eps": Field(float, "added to the mean square (or the variance)", least=0.0),
    "norm_offset": Field(float, "added to the weights of norms: 1 where weights are w - 1", 0.0),
    "norm_weight": Field(bool, "norms have weights", True),
    "norm_bias": Field(bool, "norms of kind layer have a bias", True),
    "norm_place": Field(
        ("pre", "post", "sandwich", "output", "stream"),
        "pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x))); "
        "output: x + norm(f(x)); stream: norm(x) + f(norm(x))",
        "pre",
    ),
    "embed_norm": Field(bool, "norm after the embeddings", False),
    "final_norm": Field(bool, "norm before the head", True),
    "qk_norm": Field(
        ("none", "head", "each_head", "all"),
        "norm of queries and keys: of each head, with shared weights (head) or "
        "weights per head (each_head), or of all heads together",
        "none",
    ),
    "qk_norm_kind": Field(
        ("rms", "layer"), "kind of that norm; layer has no bias and excludes qk_norm all", "rms"
    ),
    "qk_norm_after_rope": Field(
        bool, "that norm follows the rotation; false: it precedes it", False
    ),
    "qk_norm_weight": Field(bool, "that norm has weights", True),
    "qk_norm_layers": Field(
        ("all", "rotated"), "layers with that norm: all, or those with rotation", "all"
    ),
    # attention
    "qkv_clip": Field(
        float, "largest magnitude of queries, keys and values; 0: no limit", 0.0, least=0.0
    ),
    "causal": Field(bool, "causal mask; false for encoders", True),
    "sm_scale": Field(
        float,
        "factor of the attention scores; 1 / sqrt(head_dim) if absent",
        None,
        least=MIN_POSITIVE,
    ),
    "sm_scale_by_layer": Field(bool, "scores of layer i, from 0, are also divided by i + 1", False),
    "window": Field(int, "sliding window in tokens, the query itself included", None, least=1),
    "window_first_layer": Field(int, "first layer with the window", 0),
    "full_layer_every": Field(int, "every n-th layer uses full attention; 0: none", 0),
    "attention_chunk": Field(
        int,
        "tokens see those of the same chunk of this many positions, in layers of kind "
        "chunked_attention, or in the layers with rotation if layer_types is absent",
        None,
        least=1,
    ),
    "layer_types": Field(
        [str],
        "kind of each layer, or one for all: full_attention, sliding_attention, chunked_attention, "
        "or the name of a [layer] table; wins over window_first_layer and full_layer_every",
        (),
    ),
    "last_layer_type": Field(
        str, "kind of the last layer, whatever layer_types says; absent: as it says", None
    ),
    "logits_soft_cap": Field(
        float, "scores become cap * tanh(score / cap)", None, least=MIN_POSITIVE
    ),
    "attention_sinks": Field(
        bool, "each head has a sink: one more score in the softmax, without a key", False
    ),
    "sink_layers": Field(("all", "window"), "layers with attention_sinks", "all"),
    "attention_temperature_scale": Field(
        float,
        "queries at position p times 1 + scale * ln(1 + (p + offset) // floor); none if absent",
        None,
    ),
    "attention_temperature_floor": Field(
        int, "positions per step of that factor", None, least=1, most=MAX_CONTEXT
    ),
    "attention_temperature_offset": Field(
        int, "added to the positions in that factor", 0, most=MAX_CONTEXT
    ),
    "attention_temperature_layers": Field(
        ("all", "unrotated"), "layers with that factor: all, or those without rotation", "all"
    ),
    "kv_rank": Field(
        int,
        "latent attention: width of the compressed keys and values, which the cache holds; 0: none",
        0,
        most=MAX_WIDTH,
    ),
    "q_rank": Field(
        int, "latent attention: width of the compressed queries; 0: none", 0, most=MAX_WIDTH
    ),
    "index_topk": Field(
        int,
        "latent attention: keys that an indexer selects for each token (sparse attention); all "
        "if absent",
        None,
        least=1,
        most=MAX_CONTEXT,
    ),
    "index_heads": Field(int, "indexer: heads", 0, most=MAX_HEADS),
    "index_dim": Field(int, "indexer: width of a head, and of its one key", 0, most=MAX_WIDTH),
    "index_rope_style": Field(
        ("half", "interleaved"), "indexer: pairs of the first columns, rotated as rope_dim", "half"
    ),
    "index_types": Field(
        [str],
        "indexer: full or shared per layer; a shared layer uses the keys that the layer before it "
        "attends to",
        (),
    ),
    "value_dim": Field(
        int,
        "width of a head's values; head_dim if absent",
        None,
        least=1,
        most=MAX_WIDTH,
    ),
    "latent_norm_eps": Field(
        float,
        "latent attention: eps of the norms of the compressed vectors; norm_eps if absent",
        None,
        least=0.0,
    ),
    "attention": Field(
        str,
        "attention variant of a plugin: its registered name, or FILE.py:NAME; the plugin has to be "
        "named on the command line (docs/bring_your_own.md)",
        None,
    ),
    "output_gate": Field(
        bool, "multiply the heads' outputs by sigmoid(attn.gate), a projection of the input", False
    ),
    "output_gate_by_head": Field(
        bool, "attn.gate has a row for each head, not for each column of the heads' outputs", False
    ),
    "qkv_layout": Field(
        ("blocks", "groups"),
        "rows of a fused attn.qkv: all q, all k, all v; or q, k, v of each key/value head, or of "
        "each of qkv_groups groups of heads",
        "blocks",
    ),
    "qkv_groups": Field(int, "groups of qkv_layout groups; n_kv_heads if 0", 0, most=MAX_HEADS),
    "qkv_order": Field(
        ("qkv", "qvk"), "order of the rows of q, k and v in a fused attn.qkv or a group", "qkv"
    ),
    # recurrent layers
    "conv_kernel": Field(
        int, "taps of short convolutions, the token itself included", 0, most=MAX_TAPS
    ),
    "linear_key_heads": Field(int, "gated delta rule: query and key heads", 0, most=MAX_HEADS),
    "linear_key_copies": Field(
        int,
        "gated delta rule: times that all stored key heads come in turn to make linear_key_heads, "
        "for checkpoints whose value head h uses key head h modulo their number",
        1,
        least=1,
        most=MAX_HEADS,
    ),
    "linear_value_heads": Field(
        int, "gated delta rule: value heads, a multiple of the key heads", 0, most=MAX_HEADS
    ),
    "linear_key_dim": Field(int, "gated delta rule: width of a key head", 0, most=MAX_WIDTH),
    "linear_value_dim": Field(int, "gated delta rule: width of a value head", 0, most=MAX_WIDTH),
    "linear_norm_eps": Field(
        float,
        "gated delta rule, lightning attention: eps of the norm of its output; norm_eps if absent",
        None,
        least=0.0,
    ),
    "linear_beta_scale": Field(
        float, "gated delta rule: factor of the write strength; 2 allows negative eigenvalues", 1.0
    ),
    "linear_decay": Field(
        ("head", "channel"),
        "gated delta rule: a decay for each value head, or for each column of its key",
        "head",
    ),
    "linear_rank": Field(
        int,
        "gated delta rule: width of the compressed decays and output gates; 0: none",
        0,
        most=MAX_WIDTH,
    ),
    "linear_gate": Field(
        ("silu", "sigmoid"), "gated delta rule: activation of the output gate", "silu"
    ),
    "lightning_output_scale": Field(float, "lightning attention: factor of its output", 1.0),
    "lightning_residual_scale": Field(
        float, "lightning attention: factor of the residual stream that it is added to", 1.0
    ),
    "stored_rates": Field(
        bool,
        "Mamba-1, Mamba-2, gated delta rule: a_log holds the negative rates themselves, not the "
        "logarithms of their magnitudes (GGUF)",
        False,
    ),
    "ssm_heads": Field(int, "Mamba-2: heads", 0, most=MAX_HEADS),
    "ssm_head_dim": Field(int, "Mamba-2: width of a head", 0, most=MAX_WIDTH),
    "ssm_groups": Field(
        int, "Mamba-2: groups of heads that share input and output vectors", 1, most=MAX_HEADS
    ),
    "ssm_state_dim": Field(int, "Mamba-2: numbers of a state per column", 0, most=MAX_WIDTH),
    "ssm_dt_min": Field(float, "Mamba-2: least time step", 0.0, least=0.0),
    "ssm_dt_max": Field(
        float, "Mamba-2: largest time step; no limit if absent", None, least=0.0, absent=(math.inf,)
    ),
    "ssm_norm": Field(
        ("after_gate", "before_gate", "none"),
        "Mamba-2: norm of its output, after or before the multiplication by silu(z)",
        "after_gate",
    ),
    "ssm_norm_groups": Field(
        int, "Mamba-2: groups of columns that the norm of its output normalizes", 1, most=MAX_HEADS
    ),
    "ssm_input_scale": Field(float, "Mamba-2: factor of its input", 1.0),
    "ssm_scales": Field(
        [float], "Mamba-2: factors of the projections z, x, b, c and dt; 1 if absent", ()
    ),
    "ssm_output_scale": Field(float, "Mamba-2: factor of its output", 1.0),
    "mamba1_width": Field(int, "Mamba-1: channels", 0, most=MAX_WIDTH),
    "mamba1_state_dim": Field(int, "Mamba-1: numbers of a state per channel", 0, most=MAX_WIDTH),
    "mamba1_dt_rank": Field(int, "Mamba-1: rank of the time steps", 0, most=MAX_WIDTH),
    "mamba1_norm": Field(
        ("none", "plain", "weighted"),
        "Mamba-1: rms norms of time steps, input and output vectors, without or with weights",
        "none",
    ),
    "mamba1_norm_eps": Field(
        float, "Mamba-1: eps of these norms; norm_eps if absent", None, least=0.0
    ),
    # positions
    "position": Field(
        ("rope", "alibi", "relative", "learned", "sinusoidal", "none"),
        "position encoding; learned and sinusoidal are added to the embeddings, alibi and "
        "relative (T5) to the scores",
        "rope",
    ),
    "position_offset": Field(int, "row of position 0 in the table", 0, most=MAX_CONTEXT),
    "sinusoids": Field(
        ("none", "fairseq", "paper", "alternating"),
        "sinusoidal needs one: of h = hidden_size / 2 frequencies, number c is "
        "10000 ** (-c / (h - 1)) (fairseq), else 10000 ** (-c / h); sines first, then cosines, or "
        "in turn (alternating)",
        "none",
    ),
    "rope_style": Field(
        ("half", "interleaved"), "columns that form a pair: (j, j + d/2) or (2j, 2j + 1)", "half"
    ),
    "rope_theta": Field(float, "base of the frequencies", 10000.0, least=1.0),
    "rope_dim": Field(int, "rotated columns of each head; all if absent", None, most=MAX_WIDTH),
    "rope_fraction": Field(
        float, "fraction of each head's columns that is rotated", 1.0, least=0.0, most=1.0
    ),
    "rope_scaling": Field(
        dict,
        "table as in config.json: rope_type linear, dynamic, yarn, llama3, longrope, proportional",
        None,
    ),
    "rope_original_context": Field(
        int, "length before a yarn, llama3 or longrope scaling; wins over the table", None, least=1
    ),
    "rope_truncate": Field(
        bool, "YaRN: round the ends of the ramp to whole pairs; wins over the table", None
    ),
    "rope_thetas": Field(
        [float],
        "base of each layer, 0 where it is not rotated: one base in the layers with the window, "
        "one in the others; wins over rope_theta, local_rope_theta and rope_layers",
        (),
    ),
    "rope_layers": Field(
        [int], "1 or 0 per layer: rotated or not; wins over the two fields below", ()
    ),
    "unrotated_every": Field(int, "every n-th layer is not rotated; 0: all are", 0),
    "rope_windows_only": Field(bool, "only layers with the window are rotated", False),
    "rotated_layers": Field([int], "layers that rotate in spite of rope_windows_only", ()),
    "local_n_kv_heads": Field(
        int,
        "heads of keys and values in the layers with the window; n_kv_heads if absent",
        None,
        least=1,
        most=MAX_WIDTH,
    ),
    "local_head_dim": Field(
        int,
        "width of one head in the layers with the window; head_dim if absent",
        None,
        least=1,
        most=MAX_WIDTH,
    ),
    "local_value_dim": Field(
        int,
        "width of a head's values in the layers with the window; if absent, local_head_dim if that "
        "is stated, else value_dim",
        None,
        least=1,
        most=MAX_WIDTH,
    ),
    "local_rope_theta": Field(
        float,
        "base in the layers with the window; rope_theta and rope_scaling if absent",
        None,
        least=1.0,
    ),
    "local_rope_scaling": Field(
        dict, "scaling of the layers with the window, if they have a base; none if absent", None
    ),
    "bias_buckets": Field(int, "buckets of distances of the relative bias", 32),
    "bias_max_distance": Field(int, "distance from which the last bucket is used", 128),
    "alibi_scaled": Field(bool, "multiply ALiBi's bias by sm_scale, too", False),
    # layers and head
    "residual": Field(
        ("sequential", "parallel", "parallel_two_norms"),
        "parallel: attention and feed-forward network read the same x, through one norm or two",
        "sequential",
    ),
    "activation": Field(
        ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swigluoai", "xielu"),
        "activation of the feed-forward network; swigluoai: gate and up clamped at swiglu_limit, "
        "gate * sigmoid(swiglu_alpha * gate) * (up + 1); xielu: with numbers of each layer "
        "(Apertus)",
        aliases=ACTIVATION_ALIASES,
    ),
    "swiglu_limit": Field(
        float, "limit of gate and up with activation swigluoai", 7.0, least=MIN_POSITIVE
    ),
    "swiglu_alpha": Field(
        float,
        "factor of the gate in the sigmoid of activation swigluoai",
        1.702,
        least=MIN_POSITIVE,
    ),
    "gated": Field(bool, "feed-forward network act(gate) * up, else act(up)"),
    **LAYER_INPUT_FIELDS,
    "transposed": Field(bool, "the layers' matrices are stored (in, out)", False),
    "embed_scale": Field(float, "factor of the token embeddings", 1.0),
    "attn_input_scale": Field(float, "factor of the input of attention", 1.0),
    "attn_output_scale": Field(float, "factor of the output of attention", 1.0),
    "attn_residual_scale": Field(
        float, "factor of the residual stream that attention is added to", 1.0
    ),
    "ffn_residual_scale": Field(
        float, "factor of the residual stream that the feed-forward network is added to", 1.0
    ),
    "ffn_gate_scale": Field(float, "factor of ffn.gate's output, before the activation", 1.0),
    "ffn_output_scale": Field(float, "factor of the output of the feed-forward network", 1.0),
    "residual_scale": Field(float, "factor of a sublayer's output in the residual stream", 1.0),
    "logits_scale": Field(float, "factor of the logits", 1.0),
    "head_soft_cap": Field(
        float, "logits become cap * tanh(logit / cap)", None, least=MIN_POSITIVE
    ),
    "tied_head": Field(
        bool, "the head is the token embedding; a head in the checkpoint wins", None
    ),
    "head_bias": Field(bool, "the head has a bias", False),
    "normalize_head": Field(bool, "normalize the rows of the head", False),
    "head_transform": Field(
        bool, "a linear layer, the activation and a norm precede the head (BERT)", False
    ),
    "classifier": Field(
        ("none", "tanh", "relu"),
        "classification head: pooler, this activation and classifier on the first token, if the "
        "checkpoint has these tensors (BERT)",
        "none",
    ),
    "head": Field(bool, "has a head; without one the model returns hidden states", True),
    # experts
    "n_experts": Field(int, "experts per layer; 0: dense model", 0, most=MAX_EXPERTS),
    "experts_per_token": Field(int, "experts per token", 0, most=MAX_EXPERTS),
    "expert_size": Field(
        int, "width of an expert; intermediate_size if absent", None, most=MAX_WIDTH
    ),
    "expert_latent_size": Field(
        int,
        "width of the experts' inputs and outputs, between the projections experts.in and "
        "experts.out; 0: none",
        0,
        most=MAX_WIDTH,
    ),
    "router_scoring": Field(("softmax", "sigmoid"), "scoring function of the router", "softmax"),
    "router_renormalize": Field(bool, "divide a token's weights by their sum", True),
    "router_margin": Field(
        float,
        "above 0 (SparseMixer): an expert's weight is its softmax among the experts not chosen "
        "before it whose scores fall short of its own by at most this share; 0: of all experts",
        0.0,
    ),
    "router_scale": Field(float, "factor of the weights", 1.0),
    "router_groups": Field(int, "groups of neighbouring experts; 1: none", 1, most=MAX_EXPERTS),
    "router_groups_used": Field(int, "groups per token", 1, most=MAX_EXPERTS),
    "router_group_score": Field(("max", "top2_sum"), "score of a group", "max"),
    "router_bias": Field(bool, "add router.bias to the scores for the selection only", False),
    "router_weighs_inputs": Field(
        bool, "the weights multiply the experts' inputs, not their outputs", False
    ),
    "experts_transposed": Field(
        bool, "the fused matrices of all experts are stored (in, out)", False
    ),
    "experts_down_transposed": Field(
        bool, "the fused matrix of all experts behind their activation is stored (in, out)", False
    ),
    "gate_up_layout": Field(
        ("blocks", "neighbours"),
        "rows of the experts' fused gate and up: all of gate, then all of up; or interleaved",
        "blocks",
    ),
    "shared_size": Field(int, "width of the shared expert; 0: none", 0, most=MAX_WIDTH),
    "experts_beside_dense": Field(
        bool,
        "the experts are added to the dense feed-forward network; both, and the router, have norms "
        "of their own, and each expert a factor",
        False,
    ),
    "experts_output_scale": Field(
        float, "factor of the sum of the experts' outputs and the shared expert's", 1.0
    ),
    "shared_gate": Field(bool, "multiply the shared expert by sigmoid(gate)", False),
    "dense_first": Field(int, "number of first layers without experts", 0),
    "dense_last": Field(int, "number of last layers without experts", 0),
    "expert_every": Field(int, "every n-th layer has experts", 1),
    "expert_offset": Field(int, "first of these layers; expert_every - 1 if absent", None),
    "dense_layers": Field([int], "further layers without experts", ()),
    "expert_layers": Field([int], "layers with experts; wins over the three fields above", None),
    # tokens
    "decoder_start_id": Field(
        int,
        "first token of the decoder, for models with an encoder",
        None,
        most=MAX_TOKEN_ID,
        absent=NO_TOKEN,
    ),
    "forced_bos_id": Field(
        int,
        "first new token of the decoder, for models with an encoder",
        None,
        most=MAX_TOKEN_ID,
        absent=NO_TOKEN,
    ),
    "forced_eos_ids": Field(
        [int],
        "tokens of which one must be the last of max_tokens, for models with an encoder",
        (),
        most=MAX_TOKEN_ID,
        absent=NO_TOKEN,
    ),
    "bos_token_id": Field(int, "beginning of sequence", None, most=MAX_TOKEN_ID, absent=NO_TOKEN),
    "eos_token_ids": Field(
        [int], "ids that end a sequence", (), most=MAX_TOKEN_ID, absent=NO_TOKEN
    ),
    "banned_token_ids": Field([int], "ids that are never generated", (), most=MAX_TOKEN_ID),
}
"""Every field that can be set."""

LAYER_FIELDS: dict[str, Field] = {
    "mixer": Field(
        [get_args(Mixer)],
        "sublayer that mixes tokens; several read the same input, and their outputs are added",
        ("attention",),
    ),
    "feed_forward": Field(bool, "a feed-forward network or experts follow the mixer", True),
    "op": Field(str, "op of a plugin in the place of the mixer", None),
    "feed_forward_op": Field(str, "op of a plugin in the place of the feed-forward network", None),
    "window": Field(bool, "attention has the sliding window (field window)", False),
    "chunk": Field(bool, "attention within chunks (field attention_chunk)", False),
    "norm_place": Field(
        ("pre", "post", "sandwich", "output", "stream"),
        "place of the norms, if not that of the model",
        None,
    ),
}
"""Keys of a table [layer.NAME]: fields of `nbflow.spec.layer_specs.LayerKind`."""

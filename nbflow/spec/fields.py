"""The words of the specification language: every field of a model, its type, default and meaning.

A family, a config.json (through the family's rules) or a model file sets these fields; nothing else
can be set.  An architecture is a choice among their values.  `check_field` holds every number to
the bounds of its field, wherever it comes from, before anything is sized by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbflow.tokenization.special_tokens import MAX_TOKEN_ID, NO_TOKEN
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import Kind, check_value
from nbflow_kernels.errors import UsageError

REQUIRED = object()
"""Default of a field that every model must state."""

MAX_LAYERS = 4096
"""Most layers: the deepest published transformer has 1,000; each costs Python objects."""
MAX_HEADS = 4096
"""Most heads: published models have at most some 256; rows of fused matrices are listed by head."""
MAX_EXPERTS = 4096
"""Most experts of a layer: published models have at most 2,048."""
MAX_WIDTH = 1 << 24
"""Widest matrix: several hundred times those of published models."""
MAX_CONTEXT = 1 << 24
"""Longest context: published models state up to 10,485,760; tables have a row per position."""
MAX_INT = 2**31 - 1
"""Largest whole number of all other fields: kernels count in 32 bits."""
MAX_FLOAT = 3.4028234663852886e38
"""Largest number of a field: kernels compute in float32."""
MIN_POSITIVE = 1.1754943508222875e-38
"""Least number of a field that must be above 0: the least normal float32."""
MAX_ITEMS = 4096
"""Most entries of a list, e.g. one for each layer."""


@dataclass(frozen=True)
class Field:
    """One word of the language."""

    kind: Kind
    """Type: see `nbflow.utils.toml_schema.Kind`."""
    doc: str
    """What it means."""
    default: Any = REQUIRED
    """Value if nobody states it; None: it follows from other fields, or is absent."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names of its values, which a configuration may use where a rule says no `values`."""
    least: float | None = None
    """Least number; by default 0 for whole numbers, else -`MAX_FLOAT`."""
    most: float | None = None
    """Largest number; by default `MAX_INT` for whole numbers, else `MAX_FLOAT`."""
    absent: tuple[int, ...] = ()
    """Numbers that files write where they mean none."""


def check_field(value: Any, where: str, field: Field) -> Any:
    """Return a value with its type and its numbers checked, None for a number that means none.

    Parameters
    ----------
    value : object
        From a file; not None.
    where : str
        File and key; begins the error messages.
    field : Field
        What it must be.

    Raises
    ------
    UsageError
        If the type is another one, or a number is not finite or out of bounds.
    """
    checked = check_value(value, where, field.kind)
    if field.kind is dict:
        _check_table(checked, where)
    elif isinstance(field.kind, list):
        checked = tuple(item for item in checked if item not in field.absent)
        if len(checked) > MAX_ITEMS:
            raise UsageError(f"{where}: may have at most {MAX_ITEMS} entries, got {len(checked)}")
        for item in checked if field.kind[0] is int else ():
            check_bounds(item, where, field)
    elif field.kind in (int, float):
        if checked in field.absent:
            return None
        check_bounds(checked, where, field)
    return checked


def check_bounds(number: float, where: str, field: Field) -> None:
    """Raise `UsageError` unless a number is finite and within the bounds of a field."""
    whole = field.kind is not float
    least = (0 if whole else -MAX_FLOAT) if field.least is None else field.least
    most = (MAX_INT if whole else MAX_FLOAT) if field.most is None else field.most
    if not least <= number <= most:  # false for NaN, too
        bounds = f"{least} to {most}" if whole else f"a number from {least:g} to {most:g}"
        raise UsageError(f"{where}: must be {bounds}, got {shown(number)}")


def _check_table(table: dict[str, Any], where: str) -> None:
    """Raise `UsageError` for a number of a nested table that is not finite or too large."""
    inner: list[tuple[str, Any]] = [(where, table)]
    while inner:
        at, value = inner.pop()
        if isinstance(value, dict):
            inner += [(f"{at}.{key:.80}", item) for key, item in value.items()]
        elif isinstance(value, list):
            if len(value) > MAX_ITEMS:
                raise UsageError(f"{at}: may have at most {MAX_ITEMS} entries, got {len(value)}")
            inner += [(at, item) for item in value]
        elif isinstance(value, str) and not at.endswith("type"):
            raise UsageError(f"{at}: must be a number, got {shown(value):.80}")
        elif isinstance(value, int | float) and not -MAX_FLOAT <= value <= MAX_FLOAT:
            raise UsageError(f"{at}: must be a finite float32, got {shown(value)}")


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
        "width of the token embedding, if not hidden_size: embed.in, embed.out map",
        None,
        most=MAX_WIDTH,
    ),
    "type_vocab_size": Field(int, "rows of the token type embedding; 0 for none", 0),
}
NORMS = {
    "norm": Field(("rms", "layer"), "kind of the norms"),
    "norm_eps": Field(float, "added to the mean square (or the variance)", least=0.0),
    "norm_offset": Field(float, "added to the weights of norms: 1 where weights are w - 1", 0.0),
    "norm_weight": Field(bool, "whether the norms have weights", True),
    "norm_bias": Field(bool, "whether norms of kind layer have a bias", True),
    "norm_place": Field(
        ("pre", "post", "sandwich", "output"),
        "pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x))); "
        "output: x + norm(f(x))",
        "pre",
    ),
    "embed_norm": Field(bool, "whether the embeddings go through a norm", False),
    "final_norm": Field(bool, "whether there is a norm before the head", True),
    "qk_norm": Field(
        ("none", "head", "each_head", "all"),
        "norm of queries and keys before the rotation: of each head, with the same weights (head) "
        "or with weights of its own (each_head), or of all heads together",
        "none",
    ),
    "qk_norm_kind": Field(
        ("rms", "layer"), "kind of that norm; layer has no bias, and is not of all heads", "rms"
    ),
}
ATTENTION = {
    "causal": Field(bool, "whether a token sees only those before it; false for encoders", True),
    "sm_scale": Field(
        float,
        "factor of the attention scores; 1 / sqrt(head_dim) if absent",
        None,
        least=MIN_POSITIVE,
    ),
    "window": Field(
        int, "sliding window: tokens that a token sees, itself included", None, least=1
    ),
    "window_first_layer": Field(int, "first layer with the window", 0),
    "full_layer_every": Field(int, "every so many-th layer sees everything; 0: none does", 0),
    "layer_types": Field(
        [str],
        "for each layer full_attention or sliding_attention; wins over the two fields above",
        (),
    ),
    "logits_soft_cap": Field(
        float, "scores become cap * tanh(score / cap)", None, least=MIN_POSITIVE
    ),
    "attention_sinks": Field(
        bool, "whether each head has one more score in the softmax, that of no key", False
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
    "value_dim": Field(
        int,
        "latent attention: width of a head's values; head_dim if absent",
        None,
        least=1,
        most=MAX_WIDTH,
    ),
    "latent_norm_eps": Field(
        float,
        "latent attention: eps of the norms of what is compressed; norm_eps if absent",
        None,
        least=0.0,
    ),
    "qkv_layout": Field(
        ("blocks", "groups"),
        "rows of a fused attn.qkv: all q, all k, all v; or for each key/value head its q, k, v",
        "blocks",
    ),
}
POSITIONS = {
    "position": Field(
        ("rope", "alibi", "relative", "learned", "sinusoidal", "none"),
        "how positions come in; learned and sinusoidal are added to the embeddings, alibi and "
        "relative (T5) to the scores",
        "rope",
    ),
    "position_offset": Field(int, "position 0 is this row of the table", 0, most=MAX_CONTEXT),
    "sinusoids": Field(
        ("fairseq", "paper"),
        "sinusoidal: of h = hidden_size / 2 frequencies, number c is 10000 ** (-c / (h - 1)) or "
        "10000 ** (-c / h); sines first, then cosines",
        "fairseq",
    ),
    "rope_style": Field(
        ("half", "interleaved"), "which columns form a pair: (j, j + d/2) or (2j, 2j + 1)", "half"
    ),
    "rope_theta": Field(float, "base of the frequencies", 10000.0, least=1.0),
    "rope_dim": Field(int, "rotated columns of each head; all if absent", None, most=MAX_WIDTH),
    "rope_fraction": Field(
        float, "part of each head's columns that is rotated", 1.0, least=0.0, most=1.0
    ),
    "rope_scaling": Field(
        dict, "table as in config.json: rope_type linear, dynamic, yarn, llama3, longrope", None
    ),
    "rope_original_context": Field(
        int, "length before the scaling, if the table lacks it", None, least=1
    ),
    "rope_truncate": Field(
        bool, "YaRN: whether the ends of the ramp are whole pairs; wins over the table", None
    ),
    "rope_layers": Field(
        [int], "for each layer 1 if it rotates, 0 if not; wins over the two fields below", ()
    ),
    "unrotated_every": Field(int, "every so many-th layer does not rotate; 0: all do", 0),
    "rope_windows_only": Field(bool, "whether only layers with the window rotate", False),
    "local_rope_theta": Field(
        float, "base in the layers with the window, which then have no scaling", None, least=1.0
    ),
    "bias_buckets": Field(int, "buckets of distances of the relative bias", 32),
    "bias_max_distance": Field(int, "distance from which on the last bucket holds", 128),
    "alibi_scaled": Field(bool, "whether ALiBi's bias is multiplied by sm_scale too", False),
}
ACTIVATION_ALIASES = {
    "swish": "silu",
    "quick_gelu": "gelu_quick",
    "gelu_python": "gelu",
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        "gelu_tanh",
    ),
}
"""Names of transformers, several of which compute the same."""
BLOCKS = {
    "residual": Field(
        ("sequential", "parallel", "parallel_two_norms"),
        "parallel: attention and feed-forward network read the same x, through one norm or two",
        "sequential",
    ),
    "activation": Field(
        ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swigluoai"),
        "activation of the feed-forward network; swigluoai, of gate and up: cut off at 7, "
        "gate * sigmoid(1.702 * gate) * (up + 1)",
        aliases=ACTIVATION_ALIASES,
    ),
    "gated": Field(bool, "whether the feed-forward network is act(gate) * up, or act(up)"),
    "transposed": Field(bool, "whether the layers' matrices are stored (in, out)", False),
    "embed_scale": Field(float, "factor of the token embeddings", 1.0),
    "residual_scale": Field(float, "factor of what a sublayer adds to the residual stream", 1.0),
    "logits_scale": Field(float, "factor of the logits", 1.0),
    "head_soft_cap": Field(
        float, "logits become cap * tanh(logit / cap)", None, least=MIN_POSITIVE
    ),
    "tied_head": Field(
        bool, "whether the head is the embedding; a head in the checkpoint wins", None
    ),
    "head_bias": Field(bool, "whether the head has a bias", False),
    "normalize_head": Field(bool, "whether the head's rows are divided by their lengths", False),
    "head_transform": Field(
        bool, "whether a linear, the activation and a norm come before the head (BERT)", False
    ),
    "head": Field(bool, "whether there is a head; without one the model gives hidden states", True),
}
EXPERTS = {
    "n_experts": Field(int, "experts of a layer; 0: no mixture of experts", 0, most=MAX_EXPERTS),
    "experts_per_token": Field(int, "experts that a token goes to", 0, most=MAX_EXPERTS),
    "expert_size": Field(
        int, "width of an expert; intermediate_size if absent", None, most=MAX_WIDTH
    ),
    "router_scoring": Field(("softmax", "sigmoid"), "scores of the experts", "softmax"),
    "router_renormalize": Field(bool, "whether a token's weights are divided by their sum", True),
    "router_scale": Field(float, "factor of the weights", 1.0),
    "router_groups": Field(int, "groups of neighbouring experts; 1: none", 1, most=MAX_EXPERTS),
    "router_groups_used": Field(int, "groups that a token may use", 1, most=MAX_EXPERTS),
    "router_group_score": Field(("max", "top2_sum"), "what makes a group good", "max"),
    "router_bias": Field(bool, "whether router.bias is added to the scores for the choice", False),
    "experts_transposed": Field(
        bool, "whether the matrices of all experts in one tensor are stored (in, out)", False
    ),
    "gate_up_layout": Field(
        ("blocks", "neighbours"),
        "rows of the experts' gate and up in one tensor: all of the gate, all of up; or in turn",
        "blocks",
    ),
    "shared_size": Field(int, "width of the expert of all tokens; 0: none", 0, most=MAX_WIDTH),
    "shared_gate": Field(bool, "whether the shared expert is multiplied by sigmoid(gate)", False),
    "dense_first": Field(int, "so many layers at the beginning have no experts", 0),
    "expert_every": Field(int, "every so many-th layer has experts", 1),
    "dense_layers": Field([int], "further layers without experts", ()),
}
TOKENS = {
    "decoder_start_id": Field(
        int,
        "first token of the decoder, for models with an encoder",
        None,
        most=MAX_TOKEN_ID,
        absent=NO_TOKEN,
    ),
    "bos_token_id": Field(int, "beginning of sequence", None, most=MAX_TOKEN_ID, absent=NO_TOKEN),
    "eos_token_ids": Field(
        [int], "ids that end a sequence", (), most=MAX_TOKEN_ID, absent=NO_TOKEN
    ),
    "banned_token_ids": Field([int], "ids that are never generated", (), most=MAX_TOKEN_ID),
}

FIELDS: dict[str, Field] = {
    **SIZES,
    **NORMS,
    **ATTENTION,
    **POSITIONS,
    **BLOCKS,
    **EXPERTS,
    **TOKENS,
}
"""Every field that can be set."""

CROSS = ("cross.q", "cross.k", "cross.v", "cross.o")
LINEARS = (
    "attn.q", "attn.k", "attn.v", "attn.o", "attn.q_a", "attn.kv_a", *CROSS,
    "ffn.gate", "ffn.up", "ffn.down", "router", "moe.gate", "moe.up", "moe.down",
)  # fmt: skip
"""A layer's matrices that may have a bias; moe.gate and the like stand for those of all experts,
whose biases lie in one tensor (experts, width)."""
EXPERT_BIASES = ("moe.gate", "moe.up", "moe.down")
FUSED = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn.kv_b": ("attn.k_b", "attn.v_b"),
    "ffn.gate_up": ("ffn.gate", "ffn.up"),
    "moe.{j}.gate_up": ("moe.{j}.gate", "moe.{j}.up"),
}
"""Matrices that a checkpoint may store in one: its name and the parts."""
LAYER_NORMS = (
    "attn_norm",
    "attn_post_norm",
    "cross_norm",
    "ffn_norm",
    "ffn_post_norm",
    "attn.q_norm",
    "attn.k_norm",
    "attn.q_a_norm",
    "attn.kv_a_norm",
)
DIVISORS = ("rope_divisors", "rope_short_divisors", "rope_long_divisors")
"""Tensors with divisors of the rotary frequencies; the latter two are LongRoPE's."""
EXPERT_PARTS = tuple(f"moe.{{j}}.{part}" for part in ("gate", "up", "down"))
"""Matrices of expert j; a checkpoint's name without {j} is one tensor of all experts."""
HEAD_NORMS = ("attn.q_norm.{j}", "attn.k_norm.{j}")
"""Norms of one head's queries or keys, head j; a checkpoint's name without {j} is one tensor of
all heads (heads, columns)."""
SHARED_PARTS = tuple(f"shared.{part}" for part in ("gate", "up", "down"))

HEAD_PARTS = ("attn.k_b", "attn.v_b")
"""Matrices of latent attention, one below the other for each head; they have no bias."""

_LAYER_PARTS = (
    *LAYER_NORMS, *HEAD_NORMS, "attn.sinks", *LINEARS, *HEAD_PARTS, *FUSED, *EXPERT_PARTS,
    "moe.gate_up", *SHARED_PARTS, "shared_gate",
)  # fmt: skip
_ONE_KIND = {
    "bias": ("embed", "positions", "position_bias", "types", "attn.k_b", "attn.v_b", "attn.kv_b",
             "attn.sinks", *HEAD_NORMS),
    "weight": (*EXPERT_BIASES, "moe.gate_up"),
}  # fmt: skip
"""What there is not."""
_OUTSIDE = (
    "embed", "positions", "position_bias", "types", "embed_norm", "embed.in", "embed.out",
    "final_norm", "transform", "transform_norm", "head",
)  # fmt: skip
TENSOR_NAMES = (
    *(
        f"{part}.{kind}"
        for part in (*_OUTSIDE, *(f"layers.{{i}}.{part}" for part in _LAYER_PARTS))
        for kind in ("weight", "bias")
        if part.removeprefix("layers.{i}.") not in _ONE_KIND[kind]
    ),
    *DIVISORS,
)
"""Our names of tensors, ``{i}`` for the layer and ``{j}`` for the expert or the head."""

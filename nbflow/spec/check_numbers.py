"""Consistency of the numbers of a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbflow.spec.architecture import Architecture
from nbflow.spec.fields import FIELDS, MAX_FLOAT, MAX_INT, check_bounds
from nbflow.spec.layer_specs import HeadShape, LatentSpec, RopeSpec
from nbflow.spec.plugin_ops import OPS
from nbflow.spec.tensor_names import EXPERT_BIASES
from nbflow_kernels.errors import UsageError
from nbflow_kernels.product_keys import MAX_CHOSEN

_WITHOUT_RETRIEVAL = ("swigluoai", "xielu")
MAX_EXPERT_LAYERS = 1 << 17
"""Bound on the experts of all layers, each of which has names and shapes; published: 23,000."""


def check_numbers(spec: Architecture) -> None:
    """Raise `UsageError` if the numbers of `spec` contradict each other or exceed their bounds."""
    for name, field in FIELDS.items():
        value = getattr(spec, name, None)
        if value is None or field.kind not in (int, float):
            continue
        if field.kind is int and not isinstance(value, int):
            raise UsageError(f"{spec.name}: {name} must be a whole number, got {value!r:.80}")
        check_bounds(value, f"{spec.name}: {name}", field)
    problem = next(_problems(spec), None)
    if problem is not None:
        raise UsageError(f"{spec.name}: {problem}")


def _problems(spec: Architecture) -> Iterator[str]:
    """Yield contradictions; only the first is reported, as later checks may depend on it."""
    yield from _rope_problems(spec)
    yield from _position_problems(spec)
    yield from _token_problems(spec)
    yield from _block_problems(spec)
    yield from _plugin_op_problems(spec)
    if spec.is_recurrent:
        yield from _recurrent_problems(spec)
    yield from _projection_problems(spec)
    if spec.attention is not None:
        yield from _variant_problems(spec, spec.attention)
    if spec.latent is not None:
        yield from _latent_problems(spec, spec.latent)
    elif spec.indexer is not None:
        yield "index_topk needs latent attention (kv_rank)"
    if not spec.causal and spec.window is not None:
        yield "a window needs causal attention"
    yield from _chunk_problems(spec)
    if spec.qk_norm in ("each_head", "all") and not spec.qk_norm_weight:
        yield f"qk_norm {spec.qk_norm!r} needs qk_norm_weight"
    if spec.attention_sinks and (spec.latent is not None or spec.encoder is not None):
        yield "attention_sinks go without latent attention and encoders"
    yield from _expert_problems(spec)
    yield from _sharing_problems(spec)
    yield from _around_problems(spec)
    yield from _retrieval_problems(spec)
    yield from _mask_problems(spec)


def _rope_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of heads and the rotation of queries and keys."""
    if spec.n_heads % spec.n_kv_heads:
        yield (
            f"n_heads must be a multiple of n_kv_heads, got {spec.n_heads} and {spec.n_kv_heads}"
        )
    if spec.local_heads is not None:
        yield from _local_problems(spec, spec.local_heads)
    for rope, local in ((spec.rope, None), (spec.local_rope, spec.local_heads)):
        most = spec.head_dim if local is None else local.key_dim
        if rope and (rope.dim > most or rope.dim % 2 or rope.dim < 0):
            yield f"rope.dim must be even and at most head_dim = {most}, got {rope.dim}"
        if rope and rope.scaling is not None:
            yield from _scaling_problems(spec, rope)


def _position_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of residuals and positions."""
    if spec.residual != "sequential" and spec.norm_place != "pre":
        yield f"residual {spec.residual!r} needs norm_place 'pre', got {spec.norm_place!r}"
    if spec.position == "relative" and (
        not 4 <= spec.bias_buckets <= 2**16 or spec.bias_max_distance <= spec.bias_buckets // 2
    ):
        yield (
            f"bias_buckets must be 4..65536 and bias_max_distance more than half of "
            f"it, got {spec.bias_buckets} and {spec.bias_max_distance}"
        )
    if (spec.position == "sinusoidal") != (spec.sinusoids != "none"):
        yield (
            "position 'sinusoidal' needs sinusoids 'fairseq', 'paper' or 'alternating', and others "
            f"none, got position {spec.position!r} and sinusoids {spec.sinusoids!r}"
        )


def _token_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of token ids."""
    forced = () if spec.forced_bos_id is None else (spec.forced_bos_id,)
    for name, ids in (
        ("banned_token_ids", spec.banned_token_ids),
        ("forced_bos_id", forced),
        ("forced_eos_ids", spec.forced_eos_ids),
    ):
        wrong = [i for i in ids if not 0 <= i < spec.vocab_size]
        if wrong:
            yield f"{name} must be 0..{spec.vocab_size - 1}, got {wrong[0]}"


def _block_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of norms and of decoders with an encoder."""
    if spec.qk_norm_after_rope and spec.latent is not None:
        yield "qk_norm_after_rope goes without latent attention (kv_rank)"
    if spec.qk_norm == "all" and spec.qk_norm_kind != "rms":
        yield "qk_norm 'all' needs qk_norm_kind 'rms', got 'layer'"
    if spec.encoder is not None and (
        spec.residual != "sequential" or spec.norm_place not in ("pre", "post")
    ):
        yield (
            "a decoder with an encoder needs residual 'sequential' and norm_place 'pre' or 'post', "
            f"got {spec.residual!r} and {spec.norm_place!r}"
        )


def _projection_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of output gates and of q, k and v in one matrix."""
    if spec.output_gate_by_head and spec.transposed:
        yield "output_gate_by_head needs matrices that are not transposed"
    groups = spec.qkv_groups
    if groups and (spec.n_heads % groups or spec.n_kv_heads % groups):
        yield (
            f"qkv_groups must divide n_heads and n_kv_heads, got {groups} for {spec.n_heads} and "
            f"{spec.n_kv_heads}"
        )
    if spec.output_gate and spec.latent is not None:
        yield "output_gate goes without latent attention (kv_rank)"


def _sharing_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of layers that use the keys and values of others, or keys as values."""
    if not spec.kv_shared_layers and spec.values_from_keys == "none":
        return
    wanted = (("latent", None), ("encoder", None), ("residual", "sequential"))
    for field, value in wanted:
        if getattr(spec, field) != value:
            yield f"kv_shared_layers and values_from_keys go without {field}"
    if spec.qk_norm not in ("none", "head") or spec.qkv_layout != "blocks":
        yield (
            "kv_shared_layers and values_from_keys go with qk_norm 'none' or 'head' and "
            f"qkv_layout 'blocks', got {spec.qk_norm!r} and {spec.qkv_layout!r}"
        )
    for i in range(spec.n_layers):
        heads = spec.heads_of(i)
        if i >= spec.n_layers - spec.kv_shared_layers and spec.kv_source(i) == i:
            yield (
                f"kv_shared_layers = {spec.kv_shared_layers}: no layer before the last "
                f"{spec.kv_shared_layers} has the attention of layer {i}, whose keys and values it "
                "could use"
            )
        if spec.takes_values_from_keys(i) and heads.key_dim != heads.value_dim:
            yield (
                f"values_from_keys needs values as wide as keys, got {heads.value_dim} and "
                f"{heads.key_dim} in layer {i}"
            )


def _mask_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of keys with a bias of their values."""
    if not spec.dynamic_mask_keys:
        return
    for field, value in (
        ("latent", None), ("encoder", None), ("local_heads", None), ("attention", None),
        ("attention_chunk", None), ("logits_soft_cap", None), ("kv_shared_layers", 0),
        ("temperature", None),
    ):  # fmt: skip
        if getattr(spec, field) != value:
            yield f"dynamic_mask_keys goes without {field}"
    if spec.position in ("alibi", "relative") or spec.value_dim != spec.head_dim:
        yield "dynamic_mask_keys goes with rotary or learned positions and values as wide as keys"
    if spec.qk_norm == "all":
        yield "dynamic_mask_keys goes with qk_norm 'none', 'head' or 'each_head', got 'all'"


def _around_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of streams, per-layer embeddings and networks that differ between layers."""
    if len(spec.ffn_sizes) not in (0, 1, spec.n_layers):
        yield f"ffn_sizes must have {spec.n_layers} entries, or one, got {len(spec.ffn_sizes)}"
    for name in ("activation_sparsity", "activation_cuts"):
        found = getattr(spec, name)
        if len(found) > spec.n_layers:
            yield f"{name} must have at most {spec.n_layers} entries, got {len(found)}"
        if any(found) and not spec.gated:
            yield f"{name} needs gated = true"
    if spec.active_stream >= spec.streams:
        yield f"active_stream must be 0..{spec.streams - 1}, got {spec.active_stream}"
    if spec.streams > 1 and (spec.norm != "rms" or spec.norm_offset):
        yield (
            f"streams need norm 'rms' and norm_offset 0, got {spec.norm!r} and {spec.norm_offset:g}"
        )
    parts = ("laurel_rank", "layer_embed_size", "layer_scale", "residual_weights")
    used = [name for name in parts if getattr(spec, name)] + ["streams"] * (spec.streams > 1)
    if used and (spec.residual != "sequential" or spec.encoder is not None or not spec.causal):
        yield f"{used[0]} needs residual 'sequential' and a decoder without an encoder"
    if spec.layer_embed_size and spec.activation in ("swigluoai", "xielu"):
        yield f"layer_embed_size goes without activation {spec.activation!r}"


def _retrieval_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of experts that are retrieved, and of those next to a dense network."""
    n_keys, top_k = spec.retrieval_keys, spec.retrieved_per_token
    if spec.retrieved_experts and not 1 <= top_k <= min(n_keys * n_keys, MAX_CHOSEN):
        yield (
            f"retrieved_per_token must be 1..{min(n_keys * n_keys, MAX_CHOSEN)} with "
            f"retrieved_experts = {spec.retrieved_experts}, got {top_k}"
        )
    if spec.retrieved_experts and (spec.moe is not None or spec.activation in _WITHOUT_RETRIEVAL):
        yield (
            "retrieved_experts needs a dense feed-forward network, and goes without activation "
            f"{' and '.join(map(repr, _WITHOUT_RETRIEVAL))}"
        )
    moe = spec.moe
    if (
        moe is not None
        and moe.beside_dense
        and (
            moe.router_bias
            or moe.shared_size
            or moe.latent_size
            or spec.norm_place != "sandwich"
            or spec.biases.intersection(("router", *EXPERT_BIASES))
        )
    ):
        yield (
            "experts_beside_dense needs norm_place 'sandwich', and goes without biases of router "
            "and experts, shared experts and expert_latent_size"
        )


def _chunk_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of attention within chunks."""
    if spec.attention_chunk is None:
        if any(kind.chunk for kind in spec.layer_kinds):
            yield "layer_types has chunked_attention, which needs attention_chunk"
        return
    if any(kind.window for kind in spec.layer_kinds) or spec.window is not None:
        yield "attention_chunk goes without window and layers of kind sliding_attention"
    if not spec.causal or spec.encoder is not None or spec.latent is not None:
        yield "attention_chunk needs causal attention without encoder and kv_rank"


def _scaling_problems(spec: Architecture, rope: RopeSpec) -> Iterator[str]:
    """Yield problems of a scaling, which must give finite angles for short and long sequences."""
    assert rope.scaling is not None
    for length in (1, spec.max_context):
        try:
            with np.errstate(all="ignore"):
                found, factor = rope.scaling.frequencies(rope.dim, rope.theta, length)
        except (ValueError, TypeError, ArithmeticError) as error:
            yield f"rope_scaling: {error}"
            return
        if not (np.abs(found) <= MAX_FLOAT).all() or not 0 < factor <= MAX_FLOAT:
            yield (
                f"rope_scaling gives angles that are not finite, for {length} "
                "positions; its numbers are too large or too small"
            )


def _local_problems(spec: Architecture, local: HeadShape) -> Iterator[str]:
    """Yield problems of layers with the window that have heads of their own."""
    if spec.n_heads % local.n_kv_heads:
        yield (
            f"n_heads must be a multiple of local_n_kv_heads, got {spec.n_heads} and "
            f"{local.n_kv_heads}"
        )
    for name, wanted in (("latent", None), ("encoder", None), ("attention", None)):
        if getattr(spec, name) != wanted:
            yield f"local_n_kv_heads, local_head_dim and local_value_dim go without {name}"
    if local.key_dim != spec.head_dim and spec.local_rope is None and spec.rope.dim:
        yield "local_head_dim needs local_rope_theta, the rotary base of the layers with the window"
    if spec.qk_norm == "all" or spec.qkv_layout == "groups":
        yield (
            "local_n_kv_heads, local_head_dim and local_value_dim go without qk_norm 'all' and "
            f"qkv_layout 'groups', got {spec.qk_norm!r} and {spec.qkv_layout!r}"
        )


def _variant_problems(spec: Architecture, name: str) -> Iterator[str]:
    """Yield problems of an attention variant, which replaces changes of the scores."""
    from nbflow_kernels.attention.variants import find_variant  # late: most models have none

    for field, wanted in (("logits_soft_cap", None), ("latent", None), ("encoder", None)):
        if getattr(spec, field) != wanted:
            yield f"attention {name!r} goes without {field}, got {getattr(spec, field)!r:.80}"
    if spec.position in ("alibi", "relative"):
        yield f"attention {name!r} goes without position {spec.position!r}: write it in the variant"
    try:
        variant = find_variant(name, "attention")
    except UsageError as error:
        yield str(error)
        return
    if spec.attention_sinks and not variant.use_softmax:
        yield f"attention_sinks need a softmax, and attention {name!r} has none"


def _latent_problems(spec: Architecture, latent: LatentSpec) -> Iterator[str]:
    for name in ("kv_rank", "q_rank", "value_dim"):
        least = 0 if name == "q_rank" else 1
        if not least <= getattr(latent, name) <= MAX_INT:
            yield f"{name} must be {least} or more, got {getattr(latent, name)}"
    if not 0 < spec.rope.dim < spec.head_dim:
        yield (
            f"latent attention (kv_rank) needs rope_dim, the rotated columns at the "
            f"end of each head, between 0 and head_dim = {spec.head_dim}, got {spec.rope.dim}"
        )
    for name, wanted in (("n_kv_heads", 1), ("qk_norm", "none"), ("causal", True)):
        if getattr(spec, name) != wanted:
            yield (
                f"latent attention (kv_rank) needs {name} = {wanted!r}, got {getattr(spec, name)!r}"
            )
    indexer = spec.indexer
    if indexer is not None and not (
        indexer.heads and spec.rope.dim <= indexer.dim and latent.q_rank and spec.window is None
    ):
        yield (
            "an indexer (index_topk) needs index_heads, index_dim of at least rope_dim = "
            f"{spec.rope.dim}, q_rank and no window, got {indexer.heads}, {indexer.dim}, "
            f"{latent.q_rank} and {spec.window}"
        )
    if spec.encoder is not None:
        yield "latent attention (kv_rank) has no encoder"


def _plugin_op_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of ops of plugins."""
    for kind in dict.fromkeys(spec.layer_kinds):
        for name in filter(None, (kind.op, kind.feed_forward_op)):
            try:
                op = OPS[name]
                op.shapes(spec), op.state_shape(spec), op.n_heads(spec)
            except UsageError as error:
                yield str(error)
                continue
            if spec.residual != "sequential" or spec.encoder is not None:
                yield f"op {name!r} needs residual 'sequential' and goes without an encoder"
            if op.state is not None and name == kind.feed_forward_op:
                yield f"op {name!r} has a state: it can be a mixer (op), not a feed_forward_op"


def _recurrent_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of layers with a recurrent state."""
    if spec.conv_kernel < 2 and not spec.mixers <= {"attention", "lightning_attention", "none"}:
        yield f"recurrent layers need conv_kernel, at least 2, got {spec.conv_kernel}"
    for name, wanted in (("causal", True), ("encoder", None), ("residual", "sequential")):
        if getattr(spec, name) != wanted:
            yield f"recurrent layers need {name} = {wanted!r}, got {getattr(spec, name)!r:.80}"
    yield from _mixer_problems(spec)
    if len(spec.layer_kinds) != spec.n_layers:
        yield f"layer_types must have {spec.n_layers} entries, got {len(spec.layer_kinds)}"
    if "mamba2" in spec.mixers:
        yield from _state_space_problems(spec)
    mamba = spec.selective
    if "mamba1" in spec.mixers and (
        mamba is None or min(mamba.width, mamba.state_dim, mamba.dt_rank) < 1
    ):
        yield "mamba1 needs mamba1_width, mamba1_state_dim and mamba1_dt_rank, at least 1"
    delta = spec.delta
    if "gated_delta_rule" not in spec.mixers:
        return
    if delta is None or min(delta.key_heads, delta.key_dim, delta.value_dim) < 1:
        yield (
            "gated_delta_rule needs linear_key_heads, linear_value_heads, linear_key_dim and "
            "linear_value_dim, at least 1"
        )
    elif delta.key_heads % delta.key_copies:
        yield (
            f"linear_key_copies must divide linear_key_heads, got {delta.key_copies} and "
            f"{delta.key_heads}"
        )
    elif delta.value_heads % delta.key_heads:
        yield (
            "linear_value_heads must be a multiple of linear_key_heads, got "
            f"{delta.value_heads} and {delta.key_heads}"
        )
    elif delta.decay == "channel" and delta.group != 1:
        yield (
            "linear_decay 'channel' needs as many linear_key_heads as linear_value_heads, got "
            f"{delta.key_heads} and {delta.value_heads}"
        )


def _mixer_problems(spec: Architecture) -> Iterator[str]:
    """Yield problems of the mixers of a kind of layer."""
    for i, kind in enumerate(spec.layer_kinds):
        ops = kind.op or kind.feed_forward_op
        if kind.mixer == ("none",) and not (kind.feed_forward or ops):
            yield "a [layer] table needs a mixer or a feed_forward, got neither"
        several = len(kind.mixer) > 1
        if not kind.mixer or len(set(kind.mixer)) < len(kind.mixer):
            yield f"mixer of a [layer] table must be one or several that differ, got {kind.mixer}"
        if several and ("none" in kind.mixer or spec.norm_place_of(i) != "pre"):
            yield (
                "several mixers in a layer need norm_place 'pre', and none of them is 'none'; got "
                f"{spec.norm_place_of(i)!r} and {', '.join(kind.mixer)}"
            )


def _state_space_problems(spec: Architecture) -> Iterator[str]:
    ssm = spec.ssm
    if ssm is None or min(ssm.head_dim, ssm.groups, ssm.state_dim, ssm.norm_groups) < 1:
        yield (
            "mamba2 needs ssm_heads, ssm_head_dim, ssm_groups, ssm_state_dim and "
            "ssm_norm_groups, at least 1"
        )
    elif ssm.heads % ssm.groups or ssm.width % ssm.norm_groups:
        yield (
            f"ssm_groups must divide ssm_heads, and ssm_norm_groups the {ssm.width} columns, got "
            f"{ssm.groups}, {ssm.heads} and {ssm.norm_groups}"
        )
    elif len(ssm.scales) not in (0, 5):
        yield f"ssm_scales must be 5 numbers, for z, x, b, c and dt, got {len(ssm.scales)}"


def _expert_problems(spec: Architecture) -> Iterator[str]:
    moe = spec.moe
    if spec.activation == "swigluoai" and not spec.gated:
        yield "activation 'swigluoai' needs gated = true"
    if spec.activation == "xielu" and spec.gated:
        yield "activation 'xielu' needs gated = false"
    if moe is None:
        return
    if not spec.gated and (spec.activation == "xielu" or "moe.down" in spec.biases):
        yield "experts without a gate have no biases, and another activation than xielu"
    if moe.weighs_inputs and moe.latent_size:
        yield "router_weighs_inputs goes without expert_latent_size"
    if moe.n_experts < 1 or moe.expert_size < 1:
        yield (
            f"n_experts and expert_size must be positive, got {moe.n_experts} and {moe.expert_size}"
        )
    if moe.n_experts * len(moe.layers) > MAX_EXPERT_LAYERS:
        yield (
            f"all layers together may have at most {MAX_EXPERT_LAYERS} experts, "
            f"got {moe.n_experts} in each of {len(moe.layers)} layers"
        )
    if moe.router_bias and "router" in spec.biases:
        yield (
            "router.bias is added to the scores for the choice (router_bias) or to "
            "the router's results ([biases] router), not both"
        )
    if spec.biases.intersection(EXPERT_BIASES) not in (set(), set(EXPERT_BIASES)):
        yield (
            f"of {', '.join(EXPERT_BIASES)} all or none must have biases, got "
            f"{', '.join(sorted(spec.biases))}"
        )
    if moe.groups < 1 or moe.n_experts % moe.groups or not 1 <= moe.groups_used <= moe.groups:
        yield (
            f"{moe.n_experts} experts cannot be in {moe.groups} groups of which "
            f"{moe.groups_used} are used"
        )
    most = moe.n_experts // moe.groups * moe.groups_used
    if not 1 <= moe.top_k <= most:
        yield f"experts_per_token must be 1..{most}, got {moe.top_k}"

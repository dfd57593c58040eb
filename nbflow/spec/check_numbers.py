"""Whether the numbers of a `ModelSpec` can belong to one model that can be run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbflow.spec.fields import EXPERT_BIASES
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.spec.model_spec import LatentSpec, ModelSpec

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "max_context",
)
MOST = 2**31 - 1


def check_numbers(spec: ModelSpec) -> None:
    """Raise `UsageError` if the numbers of `spec` cannot belong to one model."""
    for name in _POSITIVE:
        value = getattr(spec, name)
        if not isinstance(value, int) or not 1 <= value <= MOST:
            raise UsageError(f"{spec.name}: {name} must be a positive integer, got {value!r}")
    for name in ("embed_size", "type_vocab_size", "position_offset"):
        if not 0 <= getattr(spec, name) <= MOST:
            raise UsageError(f"{spec.name}: {name} must be 0 or more, got {getattr(spec, name)}")
    if spec.n_heads % spec.n_kv_heads:
        raise UsageError(
            f"{spec.name}: n_heads must be a multiple of n_kv_heads, "
            f"got {spec.n_heads} and {spec.n_kv_heads}"
        )
    for rope in (spec.rope, spec.local_rope):
        if rope and (rope.dim > spec.head_dim or rope.dim % 2 or rope.dim < 0):
            raise UsageError(
                f"{spec.name}: rope.dim must be even and at most head_dim = {spec.head_dim}, "
                f"got {rope.dim}"
            )
    if spec.window is not None and spec.window < 1:
        raise UsageError(f"{spec.name}: window must be at least 1 token, got {spec.window}")
    if spec.residual != "sequential" and spec.norm_place != "pre":
        raise UsageError(
            f"{spec.name}: residual {spec.residual!r} needs norm_place 'pre', "
            f"got {spec.norm_place!r}"
        )
    if spec.position == "relative" and (
        not 4 <= spec.bias_buckets <= 2**16 or spec.bias_max_distance <= spec.bias_buckets // 2
    ):
        raise UsageError(
            f"{spec.name}: bias_buckets must be 4..65536 and bias_max_distance more than half of "
            f"it, got {spec.bias_buckets} and {spec.bias_max_distance}"
        )
    wrong = [i for i in spec.banned_token_ids if not 0 <= i < spec.vocab_size]
    if wrong:
        raise UsageError(
            f"{spec.name}: banned_token_ids must be 0..{spec.vocab_size - 1}, got {wrong[0]}"
        )
    if spec.qk_norm == "all" and spec.qk_norm_kind != "rms":
        raise UsageError(f"{spec.name}: qk_norm 'all' needs qk_norm_kind 'rms', got 'layer'")
    if spec.encoder is not None:
        _check_encoder(spec)
    if spec.latent is not None:
        _check_latent(spec, spec.latent)
    if not spec.causal and spec.window is not None:
        raise UsageError(f"{spec.name}: a window needs causal attention")
    if spec.attention_sinks and (spec.latent is not None or spec.encoder is not None):
        raise UsageError(f"{spec.name}: attention_sinks go without latent attention and encoders")
    _check_experts(spec)


def _check_latent(spec: ModelSpec, latent: LatentSpec) -> None:
    for name in ("kv_rank", "q_rank", "value_dim"):
        least = 0 if name == "q_rank" else 1
        if not least <= getattr(latent, name) <= MOST:
            raise UsageError(
                f"{spec.name}: {name} must be {least} or more, got {getattr(latent, name)}"
            )
    if not 0 < spec.rope.dim < spec.head_dim:
        raise UsageError(
            f"{spec.name}: latent attention (kv_rank) needs rope_dim, the rotated columns at the "
            f"end of each head, between 0 and head_dim = {spec.head_dim}, got {spec.rope.dim}"
        )
    for name, wanted in (("n_kv_heads", 1), ("qk_norm", "none"), ("causal", True)):
        if getattr(spec, name) != wanted:
            raise UsageError(
                f"{spec.name}: latent attention (kv_rank) needs {name} = {wanted!r}, "
                f"got {getattr(spec, name)!r}"
            )
    if spec.encoder is not None or spec.unrotated_layers:
        raise UsageError(
            f"{spec.name}: latent attention (kv_rank) has no encoder, and rotates in every layer"
        )


def _check_encoder(spec: ModelSpec) -> None:
    if spec.residual != "sequential" or spec.norm_place not in ("pre", "post"):
        raise UsageError(
            f"{spec.name}: a decoder with an encoder needs residual 'sequential' and norm_place "
            f"'pre' or 'post', got {spec.residual!r} and {spec.norm_place!r}"
        )


def _check_experts(spec: ModelSpec) -> None:
    moe = spec.moe
    if spec.activation == "swigluoai" and not spec.gated:
        raise UsageError(f"{spec.name}: activation 'swigluoai' needs gated = true")
    if moe is None:
        return
    if not spec.gated:
        raise UsageError(f"{spec.name}: experts must be gated")
    if not 1 <= moe.n_experts <= 4096 or not 1 <= moe.expert_size <= MOST:
        raise UsageError(
            f"{spec.name}: n_experts must be 1..4096 and expert_size positive, "
            f"got {moe.n_experts} and {moe.expert_size}"
        )
    if moe.router_bias and "router" in spec.biases:
        raise UsageError(
            f"{spec.name}: router.bias is added to the scores for the choice (router_bias) or to "
            "the router's results ([biases] router), not both"
        )
    if spec.biases.intersection(EXPERT_BIASES) not in (set(), set(EXPERT_BIASES)):
        raise UsageError(
            f"{spec.name}: of {', '.join(EXPERT_BIASES)} all or none must have biases, got "
            f"{', '.join(sorted(spec.biases))}"
        )
    if moe.groups < 1 or moe.n_experts % moe.groups or not 1 <= moe.groups_used <= moe.groups:
        raise UsageError(
            f"{spec.name}: {moe.n_experts} experts cannot be in {moe.groups} groups of which "
            f"{moe.groups_used} are used"
        )
    most = moe.n_experts // moe.groups * moe.groups_used
    if not 1 <= moe.top_k <= most:
        raise UsageError(f"{spec.name}: experts_per_token must be 1..{most}, got {moe.top_k}")

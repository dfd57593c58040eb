"""Position embeddings: RoPE and its scalings, ALiBi, T5 relative bias, sinusoidal, learned."""

from __future__ import annotations

from nbflow_kernels.position.absolute import (
    add_learned_positions,
    sinusoidal_position_embedding,
)
from nbflow_kernels.position.alibi import alibi_bias, alibi_slopes
from nbflow_kernels.position.relative_bias import (
    relative_position_bias,
    relative_position_bucket,
)
from nbflow_kernels.position.rope import (
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    rope_cos_sin_cache,
    rope_frequencies,
)
from nbflow_kernels.position.rope_float8 import rope_quantize_fp8
from nbflow_kernels.position.rope_llama31 import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
)
from nbflow_kernels.position.rope_scaling import (
    DynamicNtkRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)
from nbflow_kernels.position.temperature import apply_attention_temperature_inplace

__all__ = [
    "DynamicNtkRopeScaling", "LinearRopeScaling", "Llama3RopeScaling", "LongRopeScaling",
    "ProportionalRopeScaling",
    "RopeScaling", "YarnRopeScaling", "add_learned_positions", "alibi_bias", "alibi_slopes",
    "apply_attention_temperature_inplace", "apply_llama31_rope", "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids", "apply_llama31_rope_pos_ids_inplace", "apply_rope",
    "apply_rope_inplace", "apply_rope_pos_ids", "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace",
    "relative_position_bias", "relative_position_bucket",
    "rope_cos_sin_cache", "rope_frequencies", "rope_quantize_fp8", "sinusoidal_position_embedding",
]  # fmt: skip

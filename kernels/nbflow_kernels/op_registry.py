"""Op families and all public names with their modules.

A family is the folder ``nbflow_kernels/<family>/`` with `__init__.py` (the public functions),
`reference.py`, `cpu.py`, `cuda.py` and `cases.py`.  The package's attributes, the tests, the
benchmark and the table of tolerances read this table.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbflow_kernels.op_case import OpCase

FAMILIES: dict[str, tuple[str, ...]] = {
    "norm": (
        "rmsnorm", "layernorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm",
        "fused_add_layernorm", "l2norm", "linear_norm", "gated_rmsnorm", "rmsnorm_quant",
        "fused_add_rmsnorm_quant", "layernorm_quant",
    ),
    "activation": (
        "silu", "gelu", "gelu_tanh", "relu", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul",
        "relu_and_mul", "gelu_quick", "relu2", "sigmoid", "gelu_quick_and_mul", "relu2_and_mul",
        "sigmoid_and_mul", "glu", "swigluoai_and_mul", "xielu",
    ),
    "embedding": ("embedding",),
    "position": (
        "apply_rope", "apply_rope_pos_ids", "apply_rope_with_cos_sin_cache_inplace",
        "rope_cos_sin_cache", "apply_rope_inplace", "apply_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache", "apply_llama31_rope", "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids", "apply_llama31_rope_pos_ids_inplace", "rope_frequencies",
        "RopeScaling", "LinearRopeScaling", "DynamicNtkRopeScaling", "YarnRopeScaling",
        "Llama3RopeScaling", "LongRopeScaling", "ProportionalRopeScaling",
        "alibi_slopes", "alibi_bias",
        "relative_position_bucket", "relative_position_bias", "sinusoidal_position_embedding",
        "add_learned_positions", "apply_attention_temperature_inplace", "rope_quantize_fp8",
    ),
    "matmul": ("matmul",),
    "quantized_matmul": ("qmatmul",),
    "sparse": ("CsrMatrix", "sparse_matmul"),
    "kv_cache": (
        "append_paged_kv_cache", "append_paged_mla_kv_cache", "convert_paged_kv_cache",
        "gather_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens",
        "rope_quantize_fp8_append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "attention": (
        "single_prefill_with_kv_cache", "single_decode_with_kv_cache", "merge_state",
        "merge_state_in_place", "merge_states", "select_top_keys", "AttentionVariant",
        "BatchAttention",
        "BatchAttentionWithAttentionSinkWrapper", "PODWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper", "BatchMLAPagedAttentionWrapper",
        "BlockSparseAttentionWrapper", "MultiLevelCascadeAttentionWrapper",
        "VariableBlockSparseAttentionWrapper",
    ),
    "convolution": ("causal_conv1d",),
    "delta_rule": ("gated_delta_rule",),
    "gating": ("gated_product", "log_decay", "clip", "extend_heads"),
    "hadamard": ("hadamard_transform",),
    "product_keys": ("gathered_dot", "product_key_routing"),
    "row_statistics": ("match_rms", "row_moments", "gaussian_topk"),
    "state_space": ("mamba1_scan", "mamba2_scan"),
    "linear_attention": ("lightning_attention",),
    "masks": ("convert_bsr_mask_layout", "packbits", "segment_packbits"),
    "sampling": (
        "softmax", "argmax", "sampling_from_probs", "top_k_sampling_from_probs",
        "top_p_sampling_from_probs", "min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs",
        "top_k_renorm_probs", "top_p_renorm_probs", "min_p_renorm_probs", "typical_renorm_probs",
        "tail_free_renorm_probs", "xtc_renorm_probs", "typical_sampling_from_probs",
        "tail_free_sampling_from_probs", "mirostat_sampling_from_probs", "sampling_from_logits",
        "top_k_top_p_sampling_from_logits", "top_k", "top_k_mask_logits", "top_n_sigma_mask_logits",
        "top_k_page_table_transform", "top_k_ragged_transform", "chain_speculative_sampling",
    ),
    "penalties": (
        "apply_penalties", "apply_no_repeat_ngram", "apply_dry_penalty", "apply_logit_bias",
        "mask_token_ids", "apply_token_bitmask",
    ),
    "moe": (
        "moe_routing", "moe_permute", "grouped_matmul", "moe_combine", "fused_moe", "SharedExpert",
        "SegmentGEMMWrapper",
    ),
    "logits": (
        "log_softmax", "token_log_probs", "kl_divergence", "top1_agreement", "soft_cap",
        "masked_softmax",
    ),
}  # fmt: skip
"""Family to its public names."""

_TABLE = "makes a table in host memory once; copy it to the device"
_RECORD = "a dataclass of parameters"

NO_CUDA: dict[str, str] = {
    "rope_cos_sin_cache": _TABLE,
    "rope_frequencies": _TABLE,
    "alibi_slopes": _TABLE,
    "RopeScaling": _RECORD,
    "LinearRopeScaling": _RECORD,
    "DynamicNtkRopeScaling": _RECORD,
    "YarnRopeScaling": _RECORD,
    "Llama3RopeScaling": _RECORD,
    "LongRopeScaling": _RECORD,
    "ProportionalRopeScaling": _RECORD,
    "SharedExpert": _RECORD,
}
"""Public names without a CUDA variant and the reason; all others run on CUDA devices too."""

NUMPY_ON_CPU = (
    "linear_norm", "embedding", "alibi_bias", "relative_position_bucket", "relative_position_bias",
    "sinusoidal_position_embedding", "add_learned_positions", "packbits", "get_seq_lens",
    "get_batch_indices_positions", "top1_agreement",
)  # fmt: skip
"""Public ops whose CPU variant is NumPy: they copy, compare or make a table.

`embedding` decodes rows of a quantized table with the format's compiled kernel.
"""

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mla_rope_quantize_fp8": ("rope_quantize_fp8", {}),
    "single_prefill_with_kv_cache_return_lse": (
        "single_prefill_with_kv_cache", {"return_lse": True},
    ),
}  # fmt: skip
"""FlashInfer's second names of functions to the names here, and the arguments that they imply."""

METHOD_ALIASES = {
    "begin_forward": "plan", "forward": "run", "forward_return_lse": "run_return_lse",
}  # fmt: skip
"""FlashInfer's deprecated names of methods to the methods of the wrappers."""

_ROPE_INPLACE = ("q", "k")
_NORM_INPLACE = ("x", "residual")
_NVFP4_CACHE = ("paged_kv_cache", "kv_cache_sf")

IN_PLACE: dict[str, tuple[str, ...]] = {
    "fused_add_rmsnorm": _NORM_INPLACE,
    "gemma_fused_add_rmsnorm": _NORM_INPLACE,
    "fused_add_layernorm": _NORM_INPLACE,
    "fused_add_rmsnorm_quant": ("residual",),
    "apply_rope_inplace": _ROPE_INPLACE,
    "apply_rope_pos_ids_inplace": _ROPE_INPLACE,
    "apply_llama31_rope_inplace": _ROPE_INPLACE,
    "apply_llama31_rope_pos_ids_inplace": _ROPE_INPLACE,
    "apply_rope_with_cos_sin_cache_inplace": ("query", "key"),
    "rope_quantize_fp8": ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"),
    "apply_attention_temperature_inplace": ("query",),
    "append_paged_kv_cache": ("paged_kv_cache",),
    "append_paged_mla_kv_cache": ("ckv_cache", "kpe_cache"),
    "nvfp4_quantize_append_paged_kv_cache": _NVFP4_CACHE,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": _NVFP4_CACHE,
    "rope_quantize_fp8_append_paged_kv_cache": ("paged_kv_cache", "q_rope_out", "q_nope_out"),
    "get_batch_indices_positions": ("batch_indices", "positions"),
    "merge_state_in_place": ("v", "s"),
    "causal_conv1d": ("state",),
    "gated_delta_rule": ("state",),
    "mamba1_scan": ("state",),
    "mamba2_scan": ("state",),
    "lightning_attention": ("state",),
    "chain_speculative_sampling": (
        "maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num",
    ),
    "apply_penalties": ("logits",),
    "apply_no_repeat_ngram": ("logits",),
    "apply_dry_penalty": ("logits",),
    "apply_logit_bias": ("logits",),
    "mask_token_ids": ("logits",),
    "apply_token_bitmask": ("logits",),
}  # fmt: skip
"""Public ops to the arguments that they change; `out` and `lse` of all ops are changed too."""

READS_HALF: dict[str, tuple[str, ...]] = {
    "matmul": ("w",),
    "embedding": ("table",),
    "add_learned_positions": ("table",),
    "grouped_matmul": ("weights",),
    "SegmentGEMMWrapper": ("weights",),
    "fused_moe": ("gate_up", "up", "down"),
    "SharedExpert": ("gate_up", "up", "down"),
}
"""Arguments whose kernels read float16 and the bits of bfloat16; others are widened to float32."""

FLOAT32_RESULTS = (
    "mirostat_sampling_from_probs", "token_log_probs", "kl_divergence", "log_decay",
)  # fmt: skip
"""Ops whose results stay float32 for half-precision inputs: states and small differences."""

INT64_RESULTS = ("top_k",)
"""Ops whose int32 indices become int64 for PyTorch's tensors, which PyTorch indexes with."""

SUPPORT: dict[str, tuple[str, ...]] = {
    "formats": ("FORMATS", "QuantFormat", "QuantTensor", "dequantize"),
    "quantizers": ("quantize",),
    "formats.user": ("register_format", "unregister_format"),
    "plugins": ("load_plugin", "loaded_plugins"),
    "testing.format_checks": ("check_format",),
    "attention.paged": ("fast_decode_plan",),
    "kv_cache.formats": ("KVFormat", "kv_format", "kv_formats"),
    "cpu.parallel_for": ("get_num_threads", "set_num_threads"),
    "errors": ("MissingExtraError", "UsageError"),
}
"""Other modules to their public names."""


FLASHINFER_INSTEAD = {
    "CUDAGraph": "BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True)",
    "trtllm_": "BatchPrefillWithPagedKVCacheWrapper",
    "cudnn_": "BatchPrefillWithPagedKVCacheWrapper",
    "xqa": "BatchDecodeWithPagedKVCacheWrapper",
    "mm_f": "qmatmul",
    "bmm_f": "qmatmul",
    "fp4_": "quantize and dequantize",
    "nvfp4_": "quantize and dequantize",
    "mxfp": "quantize and dequantize",
}
"""First letters of FlashInfer's names that call libraries of GPUs -> what to use here."""


def module_of() -> dict[str, str]:
    """Return the full module name of every public name."""
    modules = {
        name: f"nbflow_kernels.{module}"
        for table in (FAMILIES, SUPPORT)
        for module, names in table.items()
        for name in names
    }
    return modules | {name: modules[other] for name, (other, _) in ALIASES.items()}


def family_of(op: str) -> str:
    """Return the family of a public op."""
    return next(family for family, ops in FAMILIES.items() if op in ops)


def load(family: str, part: str) -> ModuleType:
    """Import a part of a family: ``reference``, ``cpu``, ``cuda`` or ``cases``."""
    return importlib.import_module(f"nbflow_kernels.{family}.{part}")


def all_cases() -> Iterator[OpCase]:
    """Yield the cases of all families, in the order of the table."""
    for family in FAMILIES:
        yield from load(family, "cases").CASES

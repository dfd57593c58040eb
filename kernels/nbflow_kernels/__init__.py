"""Kernels for LLM inference: arrays in, arrays out.

    import nbflow_kernels as nk
    y = nk.rmsnorm(x, weight, eps=1e-5)

A NumPy array runs on the CPU, an array on a CUDA device runs there.  Names and conventions are
FlashInfer's.  Each op is a folder with a readable reference (`reference.py`), the CPU kernel, the
CUDA kernel and the test cases; `nbflow_kernels.families` lists them.

Nothing is imported before it is used: the import costs a few milliseconds, and the first use of a
function imports Numba.  Three functions have the name of their folder (`matmul`, `qmatmul`,
`embedding`): here the name always means the function; reach into the folder with
``from nbflow_kernels.matmul import cpu``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nbflow_kernels.families import module_of

if TYPE_CHECKING:
    from nbflow_kernels.activation import gelu as gelu
    from nbflow_kernels.activation import gelu_and_mul as gelu_and_mul
    from nbflow_kernels.activation import gelu_quick as gelu_quick
    from nbflow_kernels.activation import gelu_quick_and_mul as gelu_quick_and_mul
    from nbflow_kernels.activation import gelu_tanh as gelu_tanh
    from nbflow_kernels.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
    from nbflow_kernels.activation import glu as glu
    from nbflow_kernels.activation import relu as relu
    from nbflow_kernels.activation import relu2 as relu2
    from nbflow_kernels.activation import relu2_and_mul as relu2_and_mul
    from nbflow_kernels.activation import relu_and_mul as relu_and_mul
    from nbflow_kernels.activation import sigmoid as sigmoid
    from nbflow_kernels.activation import sigmoid_and_mul as sigmoid_and_mul
    from nbflow_kernels.activation import silu as silu
    from nbflow_kernels.activation import silu_and_mul as silu_and_mul
    from nbflow_kernels.activation import swigluoai_and_mul as swigluoai_and_mul
    from nbflow_kernels.attention import AttentionVariant as AttentionVariant
    from nbflow_kernels.attention import BatchAttention as BatchAttention
    from nbflow_kernels.attention import (
        BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper,
    )
    from nbflow_kernels.attention import (
        BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
    )
    from nbflow_kernels.attention import (
        BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper,
    )
    from nbflow_kernels.attention import (
        BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper,
    )
    from nbflow_kernels.attention import (
        BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
    )
    from nbflow_kernels.attention import (
        BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
    )
    from nbflow_kernels.attention import (
        BlockSparseAttentionWrapper as BlockSparseAttentionWrapper,
    )
    from nbflow_kernels.attention import (
        MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper,
    )
    from nbflow_kernels.attention import (
        VariableBlockSparseAttentionWrapper as VariableBlockSparseAttentionWrapper,
    )
    from nbflow_kernels.attention import merge_state as merge_state
    from nbflow_kernels.attention import merge_state_in_place as merge_state_in_place
    from nbflow_kernels.attention import merge_states as merge_states
    from nbflow_kernels.attention import single_decode_with_kv_cache as single_decode_with_kv_cache
    from nbflow_kernels.attention import (
        single_prefill_with_kv_cache as single_prefill_with_kv_cache,
    )
    from nbflow_kernels.embedding import embedding as embedding
    from nbflow_kernels.errors import MissingExtraError as MissingExtraError
    from nbflow_kernels.errors import UsageError as UsageError
    from nbflow_kernels.format_checks import check_format as check_format
    from nbflow_kernels.formats import FORMATS as FORMATS
    from nbflow_kernels.formats import QuantFormat as QuantFormat
    from nbflow_kernels.formats import QuantTensor as QuantTensor
    from nbflow_kernels.formats import dequantize as dequantize
    from nbflow_kernels.formats.user import load_formats as load_formats
    from nbflow_kernels.formats.user import register_format as register_format
    from nbflow_kernels.formats.user import unregister_format as unregister_format
    from nbflow_kernels.kvcache import append_paged_kv_cache as append_paged_kv_cache
    from nbflow_kernels.kvcache import append_paged_mla_kv_cache as append_paged_mla_kv_cache
    from nbflow_kernels.kvcache import gather_paged_kv_cache as gather_paged_kv_cache
    from nbflow_kernels.kvcache import get_batch_indices_positions as get_batch_indices_positions
    from nbflow_kernels.kvcache import get_seq_lens as get_seq_lens
    from nbflow_kernels.kvcache.formats import KVFormat as KVFormat
    from nbflow_kernels.kvcache.formats import kv_format as kv_format
    from nbflow_kernels.kvcache.formats import kv_formats as kv_formats
    from nbflow_kernels.logits import kl_divergence as kl_divergence
    from nbflow_kernels.logits import log_softmax as log_softmax
    from nbflow_kernels.logits import masked_softmax as masked_softmax
    from nbflow_kernels.logits import soft_cap as soft_cap
    from nbflow_kernels.logits import token_log_probs as token_log_probs
    from nbflow_kernels.logits import top1_agreement as top1_agreement
    from nbflow_kernels.masks import convert_bsr_mask_layout as convert_bsr_mask_layout
    from nbflow_kernels.masks import packbits as packbits
    from nbflow_kernels.masks import segment_packbits as segment_packbits
    from nbflow_kernels.matmul import matmul as matmul
    from nbflow_kernels.moe import SegmentGEMMWrapper as SegmentGEMMWrapper
    from nbflow_kernels.moe import SharedExpert as SharedExpert
    from nbflow_kernels.moe import fused_moe as fused_moe
    from nbflow_kernels.moe import grouped_matmul as grouped_matmul
    from nbflow_kernels.moe import moe_combine as moe_combine
    from nbflow_kernels.moe import moe_permute as moe_permute
    from nbflow_kernels.moe import moe_routing as moe_routing
    from nbflow_kernels.norm import fused_add_layernorm as fused_add_layernorm
    from nbflow_kernels.norm import fused_add_rmsnorm as fused_add_rmsnorm
    from nbflow_kernels.norm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
    from nbflow_kernels.norm import gemma_rmsnorm as gemma_rmsnorm
    from nbflow_kernels.norm import l2norm as l2norm
    from nbflow_kernels.norm import layernorm as layernorm
    from nbflow_kernels.norm import linear_norm as linear_norm
    from nbflow_kernels.norm import rmsnorm as rmsnorm
    from nbflow_kernels.penalties import apply_dry_penalty as apply_dry_penalty
    from nbflow_kernels.penalties import apply_logit_bias as apply_logit_bias
    from nbflow_kernels.penalties import apply_no_repeat_ngram as apply_no_repeat_ngram
    from nbflow_kernels.penalties import apply_penalties as apply_penalties
    from nbflow_kernels.penalties import apply_token_bitmask as apply_token_bitmask
    from nbflow_kernels.penalties import mask_token_ids as mask_token_ids
    from nbflow_kernels.position import DynamicNtkRopeScaling as DynamicNtkRopeScaling
    from nbflow_kernels.position import LinearRopeScaling as LinearRopeScaling
    from nbflow_kernels.position import Llama3RopeScaling as Llama3RopeScaling
    from nbflow_kernels.position import LongRopeScaling as LongRopeScaling
    from nbflow_kernels.position import RopeScaling as RopeScaling
    from nbflow_kernels.position import YarnRopeScaling as YarnRopeScaling
    from nbflow_kernels.position import add_learned_positions as add_learned_positions
    from nbflow_kernels.position import alibi_bias as alibi_bias
    from nbflow_kernels.position import alibi_slopes as alibi_slopes
    from nbflow_kernels.position import apply_llama31_rope as apply_llama31_rope
    from nbflow_kernels.position import apply_llama31_rope_inplace as apply_llama31_rope_inplace
    from nbflow_kernels.position import apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids
    from nbflow_kernels.position import (
        apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace,
    )
    from nbflow_kernels.position import apply_rope as apply_rope
    from nbflow_kernels.position import apply_rope_inplace as apply_rope_inplace
    from nbflow_kernels.position import apply_rope_pos_ids as apply_rope_pos_ids
    from nbflow_kernels.position import apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace
    from nbflow_kernels.position import (
        apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache,
    )
    from nbflow_kernels.position import (
        apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace,
    )
    from nbflow_kernels.position import relative_position_bias as relative_position_bias
    from nbflow_kernels.position import relative_position_bucket as relative_position_bucket
    from nbflow_kernels.position import rope_cos_sin_cache as rope_cos_sin_cache
    from nbflow_kernels.position import rope_frequencies as rope_frequencies
    from nbflow_kernels.position import (
        sinusoidal_position_embedding as sinusoidal_position_embedding,
    )
    from nbflow_kernels.qmatmul import qmatmul as qmatmul
    from nbflow_kernels.quantizers import quantize as quantize
    from nbflow_kernels.sampling import argmax as argmax
    from nbflow_kernels.sampling import chain_speculative_sampling as chain_speculative_sampling
    from nbflow_kernels.sampling import min_p_renorm_probs as min_p_renorm_probs
    from nbflow_kernels.sampling import min_p_sampling_from_probs as min_p_sampling_from_probs
    from nbflow_kernels.sampling import mirostat_sampling_from_probs as mirostat_sampling_from_probs
    from nbflow_kernels.sampling import sampling_from_logits as sampling_from_logits
    from nbflow_kernels.sampling import sampling_from_probs as sampling_from_probs
    from nbflow_kernels.sampling import softmax as softmax
    from nbflow_kernels.sampling import tail_free_renorm_probs as tail_free_renorm_probs
    from nbflow_kernels.sampling import (
        tail_free_sampling_from_probs as tail_free_sampling_from_probs,
    )
    from nbflow_kernels.sampling import top_k as top_k
    from nbflow_kernels.sampling import top_k_mask_logits as top_k_mask_logits
    from nbflow_kernels.sampling import top_k_renorm_probs as top_k_renorm_probs
    from nbflow_kernels.sampling import top_k_sampling_from_probs as top_k_sampling_from_probs
    from nbflow_kernels.sampling import (
        top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits,
    )
    from nbflow_kernels.sampling import (
        top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs,
    )
    from nbflow_kernels.sampling import top_n_sigma_mask_logits as top_n_sigma_mask_logits
    from nbflow_kernels.sampling import top_p_renorm_probs as top_p_renorm_probs
    from nbflow_kernels.sampling import top_p_sampling_from_probs as top_p_sampling_from_probs
    from nbflow_kernels.sampling import typical_renorm_probs as typical_renorm_probs
    from nbflow_kernels.sampling import typical_sampling_from_probs as typical_sampling_from_probs
    from nbflow_kernels.sampling import xtc_renorm_probs as xtc_renorm_probs
    from nbflow_kernels.sparse import CsrMatrix as CsrMatrix
    from nbflow_kernels.sparse import sparse_matmul as sparse_matmul
    from nbflow_kernels.threads import get_num_threads as get_num_threads
    from nbflow_kernels.threads import set_num_threads as set_num_threads

_MODULE_OF = module_of()

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Type of this package: importing the folder of an op does not hide the op itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULE_OF and isinstance(value, ModuleType):
            value = getattr(value, name)  # the import system sets `matmul` to the folder
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

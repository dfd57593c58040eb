"""Attention of query rows over a key/value cache: single requests, batches, pages, rags.

Names and conventions are FlashInfer's: ragged rows with an int32 `indptr`, the page table as a CSR
triple, ``"NHD"``/``"HND"`` layouts, causal masks aligned to the end, `window_left` as the number of
keys to the left, a log-sum-exp (LSE) to base 2.
"""

from __future__ import annotations

from nbflow_kernels.attention.block_sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from nbflow_kernels.attention.cascade import CascadeTiming, MultiLevelCascadeAttentionWrapper
from nbflow_kernels.attention.merge import merge_state, merge_state_in_place, merge_states
from nbflow_kernels.attention.mla import BatchMLAPagedAttentionWrapper
from nbflow_kernels.attention.paged import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.ragged import BatchAttention, BatchPrefillWithRaggedKVCacheWrapper
from nbflow_kernels.attention.single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from nbflow_kernels.attention.variants import AttentionVariant

__all__ = [
    "AttentionPlan",
    "AttentionVariant",
    "BatchAttention",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CascadeTiming",
    "MultiLevelCascadeAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]

"""Attention over a key/value cache: single requests, ragged and paged batches, cascades, MLA.

Names and conventions are FlashInfer's: ragged rows with an int32 `indptr`, the page table as a CSR
triple, ``"NHD"``/``"HND"`` layouts, causal masks aligned to the end, `window_left` as the number of
keys to the left, a log-sum-exp (LSE) to base 2.

===================  =============================================================================
`single.py`          `single_decode_with_kv_cache`, `single_prefill_with_kv_cache`
`paged.py`           `BatchDecodeWithPagedKVCacheWrapper`, `BatchPrefillWithPagedKVCacheWrapper`
`multi_item.py`      masks of items after a prompt
`ragged.py`          `BatchPrefillWithRaggedKVCacheWrapper`
`mixed.py`           `BatchAttention`: prefill and decode mixed, lengths in tokens
`pod.py`             `PODWithPagedKVCacheWrapper`: a contiguous prompt and a paged decode batch
`sink.py`            `BatchAttentionWithAttentionSinkWrapper`
`cascade.py`         shared prefixes; `merge.py` has `merge_state` and `merge_states`
`mla.py`             latent attention (DeepSeek); `block_sparse.py`: block-sparse masks
`select_keys.py`     selection of the keys of each row (DeepSeek sparse attention)
`plan.py`            the work of a step; `run.py` runs a plan on the CPU or on a device
`cpu/`               `flash_attention.py` (all kernels), `scheduler.py`
`cuda/`              `flash_decode_mma.cu`, `flash_prefill_mma.cu`, `flash_prefill_wgmma.cu`,
                     `quantized_kv.cu`, `simt_fallback.cu`; `cuda.attend` selects one
`loops.py`           the online softmax in plain loops; `reference.py`: NumPy float64
===================  =============================================================================
"""

from __future__ import annotations

from nbflow_kernels.attention.block_sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from nbflow_kernels.attention.cascade import CascadeTiming, MultiLevelCascadeAttentionWrapper
from nbflow_kernels.attention.merge import merge_state, merge_state_in_place, merge_states
from nbflow_kernels.attention.mixed import BatchAttention
from nbflow_kernels.attention.mla import BatchMLAPagedAttentionWrapper
from nbflow_kernels.attention.paged import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.pod import PODWithPagedKVCacheWrapper
from nbflow_kernels.attention.ragged import BatchPrefillWithRaggedKVCacheWrapper
from nbflow_kernels.attention.select_keys import select_top_keys
from nbflow_kernels.attention.single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from nbflow_kernels.attention.sink import BatchAttentionWithAttentionSinkWrapper
from nbflow_kernels.attention.variants import AttentionVariant

__all__ = [
    "AttentionPlan", "AttentionVariant", "BatchAttention", "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper", "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper", "BlockSparseAttentionWrapper", "CascadeTiming",
    "MultiLevelCascadeAttentionWrapper", "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper", "fast_decode_plan", "merge_state",
    "merge_state_in_place", "merge_states", "select_top_keys",
    "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
]  # fmt: skip

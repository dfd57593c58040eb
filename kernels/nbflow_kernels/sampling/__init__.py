"""Sampling: softmax, argmax, exact filters, draws, speculative (rejection) sampling.

Random numbers come from a counter-based generator (Philox4x32-10): a draw depends only on its row's
probabilities, seed and offset, not on the rest of the batch.  Filters are exact and deterministic;
among equal probabilities the lowest index wins.

===================  ==============================================================================
`from_logits`        softmax, argmax, top-k, masks of logits, sampling from logits
`top_k_transform`    top-k of windows of scores, as positions in a page table
`from_probs`         sampling from probabilities, with one or two filters
`renorm`             filters that return probabilities, for chaining
`speculative`        rejection sampling of a chain of draft tokens
===================  ==============================================================================
"""

from __future__ import annotations

from nbflow_kernels.sampling.from_logits import (
    argmax,
    sampling_from_logits,
    softmax,
    top_k,
    top_k_mask_logits,
    top_k_top_p_sampling_from_logits,
    top_n_sigma_mask_logits,
)
from nbflow_kernels.sampling.from_probs import (
    min_p_sampling_from_probs,
    mirostat_sampling_from_probs,
    sampling_from_probs,
    tail_free_sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
    typical_sampling_from_probs,
)
from nbflow_kernels.sampling.renorm import (
    min_p_renorm_probs,
    tail_free_renorm_probs,
    top_k_renorm_probs,
    top_p_renorm_probs,
    typical_renorm_probs,
    xtc_renorm_probs,
)
from nbflow_kernels.sampling.speculative import chain_speculative_sampling
from nbflow_kernels.sampling.top_k_transform import (
    top_k_page_table_transform,
    top_k_ragged_transform,
)

__all__ = [
    "argmax", "chain_speculative_sampling", "min_p_renorm_probs", "min_p_sampling_from_probs",
    "mirostat_sampling_from_probs", "sampling_from_logits", "sampling_from_probs", "softmax",
    "tail_free_renorm_probs", "tail_free_sampling_from_probs", "top_k", "top_k_mask_logits",
    "top_k_page_table_transform", "top_k_ragged_transform", "top_k_renorm_probs",
    "top_k_sampling_from_probs", "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs", "top_n_sigma_mask_logits", "top_p_renorm_probs",
    "top_p_sampling_from_probs", "typical_renorm_probs", "typical_sampling_from_probs",
    "xtc_renorm_probs",
]  # fmt: skip

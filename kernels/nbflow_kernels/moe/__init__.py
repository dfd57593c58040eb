"""Mixture of experts: routing, grouped GEMM, and the whole layer.

===================  ==============================================================================
`routing`            top-k routing, and permutation of tokens by expert
`grouped_matmul`     grouped GEMM: a weight matrix per segment of rows; multi-LoRA
`fused_moe`          gate, up, activation, down and weighted sum; shared experts
`cuda_fused_moe`     the whole layer for up to 8 tokens in two CUDA kernels
===================  ==============================================================================

A token's result does not depend on the other tokens of the call, bit for bit.
"""

from __future__ import annotations

from nbflow_kernels.moe.fused_moe import SharedExpert, fused_moe, moe_combine
from nbflow_kernels.moe.grouped_matmul import SegmentGEMMWrapper, grouped_matmul
from nbflow_kernels.moe.routing import moe_permute, moe_routing

__all__ = [
    "SegmentGEMMWrapper",
    "SharedExpert",
    "fused_moe",
    "grouped_matmul",
    "moe_combine",
    "moe_permute",
    "moe_routing",
]

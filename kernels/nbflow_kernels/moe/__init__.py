"""Mixture of experts: routing, grouped products, and the whole layer.

===================  ==============================================================================
`routing`            which experts a token goes to, with which weights; rows in order of experts
`grouped`            products of consecutive rows with one weight matrix each; multi-LoRA
`layer`              gate, up, activation, down and the weighted sum; shared experts
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

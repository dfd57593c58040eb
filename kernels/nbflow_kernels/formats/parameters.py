"""How a linear format stores the base and the scale of a block, as its kernels are told."""

from __future__ import annotations

F16_PAIR = 0
"""Base and scale, float16 each."""
F16_SCALE = 1
"""A scale, float16, which may be negative, and no base."""
U8_PAIR = 2
"""Scale u / 1000 and base v / 100 - 1, uint8 each."""

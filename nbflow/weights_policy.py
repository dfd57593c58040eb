"""Which tensors a weight format applies to.

The matrices of attention and feed-forward are stored in the chosen format; norms, biases, the
routers of experts, the token embedding and the head keep what the checkpoint stores, as Inferflow,
GPTQ and AWQ do.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Return whether the weight format applies to the tensor with our name `name`."""
    routes = name.endswith(("router.weight", "shared_gate.weight"))
    return len(shape) == 2 and name.startswith("layers.") and not routes

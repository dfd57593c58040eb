"""Which tensors a weight format applies to.

The matrices of attention and feed-forward are stored in the chosen format; norms, biases, the
routers of experts, the token embedding and the head keep what the checkpoint stores, as Inferflow,
GPTQ and AWQ do.  So do the matrices of each head of latent attention (attn.k_b, attn.v_b): a head's
columns are no whole blocks of many formats, and they are less than half a percent of such a model.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Return whether the weight format applies to the tensor with our name `name`."""
    kept = ("router.weight", "shared_gate.weight", "attn.k_b.weight", "attn.v_b.weight")
    return len(shape) == 2 and name.startswith("layers.") and not name.endswith(kept)

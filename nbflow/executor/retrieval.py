"""Launch of a `retrieve` op: experts of one row each, chosen by product keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow.program.records import Op
from nbflow_kernels import op_registry


def retrieval_launch(binder: Any, op: Op, index: int) -> Callable[[], None]:
    """Return the launch of the choice, the products with it, and the sum of the experts' rows.

    `binder` is a `nbflow.executor.bind.Binder`.
    """
    (x, scores), out = (binder.view(name) for name in op.inputs), binder.view(op.out)
    (down, up), (first, end) = binder.executor.weights.operands[index], op.attrs["experts"]
    families = ("product_keys", "activation", "gating", "moe")
    keys, activation, gating, moe = (op_registry.load(f, binder.variant) for f in families)
    shape = len(x), op.attrs["top_k"]
    weights, dots = (binder.constant(np.zeros(shape, np.float32)) for _ in range(2))
    chosen = binder.constant(np.zeros(shape, np.int32))

    def launch() -> None:
        keys.product_key_routing(scores, first, end - first, weights, chosen)
        keys.gathered_dot(x, down, chosen, dots)
        activation.elementwise(dots, op.attrs["activation"], dots)
        gating.gated_product(weights, dots, "identity", dots)
        moe.combine(up, dots, chosen, False, out)

    return launch

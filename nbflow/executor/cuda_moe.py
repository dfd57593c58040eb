"""Unfused mixture of experts on a CUDA device, with preallocated scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.executor.expert_bias import ExpertBiases
from nbflow.program.records import Op, expert_parts
from nbflow_kernels.activation import cuda as activations
from nbflow_kernels.cuda import device_of, to_device
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.moe import cuda as experts


class MoERunner:
    """Runner of one `experts` op for the tokens `x`, float32 (T, H).

    `held` are the first expert and the end of those of this rank.  `matrices` are those of gate, up
    and down (up and down without gates): a stack (E, N, K) of each, or all matrices one by one.
    `arithmetic` is that of the products, as of `nbflow_kernels.grouped_matmul`.
    """

    def __init__(
        self, x: Any, matrices: Sequence[Any], held: tuple[int, int], top_k: int, op: Op, out: Any,
        bias: ExpertBiases, arithmetic: str,
    ) -> None:  # fmt: skip
        self._x, self._out, self._bias, self._arithmetic = x, out, bias, arithmetic
        self._first, n = held[0], held[1] - held[0]
        self._gated, self._activation = op.attrs.get("gated", True), op.attrs["activation"]
        n_kinds = 3 if self._gated else 2
        stacked = len(matrices) == n_kinds and n != 1
        parts: Sequence[Any] = matrices if stacked else expert_parts(op, matrices)
        first, self._downs = list(parts[:-1]), parts[-1]
        self._first_products = first
        n_pairs, width = len(x) * top_k, (first[0] if stacked else first[0][0]).shape[-2]
        at_once = stacked and all(experts.multiplies_at_once(w, arithmetic) for w in parts)
        self.waits = not at_once or n_pairs >= experts.MIN_ROWS_TO_SYNC * n
        """True if the host must wait to learn the active experts."""
        device = device_of(x)
        self.workspaces: list[Any] = []
        """Scratch arrays, which all layers share."""

        def scratch(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
            size = math.prod(shape)
            found = workspace(device, f"experts {name}", size, dtype)
            self.workspaces.append(found)
            return found[:size].reshape(shape)

        self._rows = scratch("rows", (n_pairs,), np.int32)
        self._indptr = scratch("indptr", (n + 1,), np.int32)
        self._inverse = scratch("inverse", (len(x), top_k), np.int32)
        self._both = scratch("gate and up", (n_pairs, len(first) * width))
        self._hidden = scratch("hidden", (n_pairs, width))
        self._results = scratch("results", (n_pairs, out.shape[1]))
        self._weighed: Any = None
        self.constants: tuple[Any, ...] = ()
        """Constants of experts whose inputs are weighed: the token of each pair, and ones."""
        if op.attrs.get("weigh_inputs"):
            tokens = np.repeat(np.arange(len(x), dtype=np.int32), top_k)[:, None]
            ones = np.ones((len(x), top_k), np.float32)
            self.constants = to_device(tokens, x), to_device(ones, x)
            self._weighed = scratch("weighed", (n_pairs, x.shape[1]))

    def run(self, scores: Any, chosen: Any) -> None:
        """Compute the weighted sums of the chosen experts; scores and experts are (T, top_k).

        The experts of other ranks add nothing.
        """
        width, bias, x, inverse = self._hidden.shape[1], self._bias, self._x, self._inverse
        if self.constants:
            tokens, ones = self.constants
            experts.combine(x, scores.reshape(-1, 1), tokens, False, self._weighed)
            x, scores = self._weighed, ones
            chosen, inverse = chosen.reshape(-1, 1), inverse.reshape(-1, 1)
        experts.permute(chosen, self._rows, self._indptr, inverse, self._first)
        biases = (bias.gate, bias.up) if self._gated else (bias.up,)
        for i, (matrices, own) in enumerate(zip(self._first_products, biases, strict=True)):
            part = self._both[:, i * width : (i + 1) * width]
            experts.grouped(x, matrices, self._indptr, own, part, self._rows, self._arithmetic)
        if self._gated:
            activations.glu(self._both, self._activation, True, self._hidden)
        else:
            activations.elementwise(self._both, self._activation, self._hidden)
        experts.grouped(
            self._hidden, self._downs, self._indptr, bias.down, self._results, None,
            self._arithmetic,
        )  # fmt: skip
        experts.combine(self._results, scores, self._inverse, False, self._out)

"""Run a program op by op in NumPy float64: slow, plain, and easy to step through.

It needs no page table: it keeps each layer's keys and values in growing arrays.  `trace` is called
after every op with the op and the value it wrote, so that a debugger, a notebook or a test can
look at any intermediate result.  Programs of one rank only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.execute.weights import RankWeights
from nbflow.program.records import COMMUNICATION, Op, Program
from nbflow_kernels.activation import reference as activation
from nbflow_kernels.attention import reference as attention
from nbflow_kernels.norm import reference as norm
from nbflow_kernels.position import reference as position
from nbflow_kernels.quants import QuantTensor


class ReferenceExecutor:
    """Executor of a whole model for one sequence.

    Parameters
    ----------
    program : Program
        Program of one rank, fused or not.
    weights : RankWeights
        Its weights.
    trace : callable, optional
        Called as ``trace(op, array)`` after every op.
    """

    def __init__(
        self,
        program: Program,
        weights: RankWeights,
        trace: Callable[[Op, np.ndarray], None] | None = None,
    ) -> None:
        self._program = program
        self._trace = trace
        self._bias = weights.bias
        self._operands = [tuple(map(_as_float64, group)) for group in weights.operands]
        self._cache: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._length = 0

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits after each of the next tokens of the sequence.

        Parameters
        ----------
        ids : array of int, shape (T,)
            The tokens that follow those of earlier calls.

        Returns
        -------
        array of float64, shape (T, V)
        """
        values: dict[str, np.ndarray] = {}
        for index, op in enumerate(self._program.ops):
            if op.kind in COMMUNICATION:
                raise ValueError("the reference executor runs programs of one rank only")
            result = getattr(self, f"_{op.kind}")(op, index, values, ids)
            if result is not None:
                self._write(values, op.out, result)
            if self._trace is not None:
                self._trace(op, values.get(op.out, np.empty(0)))
        self._length += len(ids)
        return values["logits"]

    def _write(self, values: dict[str, np.ndarray], name: str, result: np.ndarray) -> None:
        """Store a result, and the bands of it that have names of their own."""
        values[name] = result
        for band, buffer in self._program.buffers.items():
            if buffer.base == name:
                values[band] = result[:, buffer.offset : buffer.offset + buffer.width]

    def _heads(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1, self._program.spec.head_dim)

    def _embedding(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return self._operands[index][0][ids]  # type: ignore[no-any-return]

    def _norm(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        x, eps = values[op.inputs[0]], op.attrs["eps"]
        if op.attrs["norm"] == "rms":
            return norm.rmsnorm(x, self._operands[index][0], eps=eps)
        return norm.layernorm(x, *self._operands[index], eps=eps)

    def _linear(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        result = values[op.inputs[0]] @ np.concatenate(self._operands[index]).T
        if self._bias[index] is not None:
            result += self._bias[index]
        if op.attrs.get("accumulate"):
            result += values[op.out]
        return result  # type: ignore[no-any-return]

    def _rope(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        rope = self._program.spec.rope
        positions = np.arange(self._length, self._length + len(ids))
        q, k = (self._heads(values[name]) for name in op.inputs)
        q, k = position.apply_rope_pos_ids(
            q,
            k,
            positions,
            rotary_dim=rope.dim,
            interleave=rope.style == "interleaved",
            rope_theta=rope.theta,
        )
        for name, rotated in zip(op.inputs, (q, k), strict=True):
            values[name] = rotated.reshape(len(ids), -1)

    def _append_kv(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        new = [self._heads(values[name]) for name in op.inputs]
        old = self._cache.get(op.layer or 0, (new[0][:0], new[1][:0]))
        self._cache[op.layer or 0] = (
            np.concatenate([old[0], new[0]]),
            np.concatenate([old[1], new[1]]),
        )

    def _attention(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        spec = self._program.spec
        result: np.ndarray = attention.single_prefill_with_kv_cache(
            self._heads(values[op.inputs[0]]),
            *self._cache[op.layer or 0],
            causal=True,
            sm_scale=spec.sm_scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.logits_soft_cap,
        )
        return result.reshape(len(ids), -1)

    def _activation(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        function = getattr(activation, op.attrs["activation"])
        return function(values[op.inputs[0]])  # type: ignore[no-any-return]

    def _gate(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        both = np.concatenate([values[name] for name in op.inputs], axis=1)
        function = getattr(activation, f"{op.attrs['activation']}_and_mul")
        return function(both)  # type: ignore[no-any-return]

    def _add(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return values[op.out] + values[op.inputs[0]]  # type: ignore[no-any-return]

    def _take_rows(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return values[op.inputs[0]]  # type: ignore[no-any-return]


def _as_float64(operand: Any) -> np.ndarray:
    if isinstance(operand, QuantTensor):
        return nk.dequantize(operand).astype(np.float64)
    if operand.dtype == np.uint16:  # bfloat16: the upper half of a float32
        wide: np.ndarray = operand.astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return np.asarray(operand, np.float64)

"""Run a program with the Numba CPU kernels.

For each pair (tokens, logit rows) the program is bound once: every op becomes a callable with its
buffers cut to length, so that running a step is a loop over callables with nothing left to decide.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.cache.storage import KVStorage
from nbflow.execute.step import Step
from nbflow.execute.weights import RankWeights
from nbflow.parallel.comm import Alone, Comm
from nbflow.program.records import Op, Program
from nbflow_kernels.attention.plan import build_plan
from nbflow_kernels.quants import QuantTensor
from nbflow_kernels.threads import capture, count_kernel_seconds

MAX_BOUND = 32
"""Bound programs kept; prompts of many lengths would otherwise fill the memory."""
CAPTURED = frozenset({"norm", "linear", "gate", "activation"})
"""Kinds of op whose arguments are the same arrays at every step."""

BoundOp = tuple[str, Callable[[], Any], bool]
"""Kind, what to call, and whether that is a compiled kernel itself."""


def _captured(launcher: Callable[[], Any]) -> tuple[Callable[[], Any], bool]:
    """Return the one compiled call a launcher makes; the launcher, if it does more."""
    launcher()  # whatever it prepares once is prepared for real
    with capture() as seen:
        launcher()
    if seen.complete and len(seen.calls) == 1:
        return seen.calls[0], True
    return launcher, False


class CpuExecutor:
    """Executor of one rank's program.

    Parameters
    ----------
    program : Program
        The rank's program.
    weights : RankWeights
        Its weights.
    storage : KVStorage
        Its pages.
    comm : Comm
        All ranks of the model.
    numbers : tuple of int
        The number, in the partition string, of each rank of `comm`.
    """

    def __init__(
        self,
        program: Program,
        weights: RankWeights,
        storage: KVStorage,
        comm: Comm | None = None,
        numbers: tuple[int, ...] = (0,),
    ) -> None:
        self.program = program
        self.storage = storage
        self.seconds: defaultdict[str, float] | None = None
        """Set to a dict to add up the time of each kind of op."""
        self._weights = weights
        self._comm = comm or Alone()
        self._numbers = numbers
        self._groups: dict[tuple[int, ...], Comm] = {}
        self._buffers: dict[str, np.ndarray] = {}
        self._bound: dict[tuple[int, int], list[BoundOp]] = {}
        self._step: Step | None = None
        spec = program.spec
        self._attention_plan: Any = None
        self._cos_sin = nk.rope_cos_sin_cache(
            spec.max_context, max(spec.rope.dim, 2), theta=spec.rope.theta
        )

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of the buffers."""
        return sum(b.nbytes for b in self._buffers.values())

    def set_groups(self, groups: dict[tuple[int, ...], Comm]) -> None:
        """Give the communicator of each stage, by rank numbers."""
        self._groups = groups

    def buffer(self, name: str, n_rows: int) -> np.ndarray:
        """Return the first rows of a buffer, as the last step left them."""
        return self._view(name, n_rows, n_rows)

    def run(self, step: Step) -> None:
        """Run the program once; results are in its buffers."""
        n_tokens, n_logits = len(step.ids), len(step.logit_rows)
        self._step = step
        spec, pages = self.program.spec, step.pages
        if self.program.layers:
            self._attention_plan = build_plan(
                step.qo_indptr,
                pages.kv_indptr,
                pages.kv_indices,
                pages.kv_lens,
                (self.program.n_heads, self.program.n_kv_heads, spec.head_dim),
                self.storage.page_size,
                kv_layout="NHD",
                causal=True,
                window_left=-1 if spec.window is None else spec.window - 1,
                logits_soft_cap=spec.logits_soft_cap or 0.0,
                sm_scale=spec.sm_scale,
            )
        bound = self._bound.get((n_tokens, n_logits)) or self._bind(n_tokens, n_logits)
        if self.seconds is not None:
            self._run_timed(bound, self.seconds)
            return
        for _, call, _ in bound:
            call()

    @staticmethod
    def _run_timed(bound: list[BoundOp], seconds: defaultdict[str, float]) -> None:
        for kind, call, captured in bound:
            started = time.perf_counter()
            call()
            spent = time.perf_counter() - started
            seconds[kind] += spent
            if captured:
                count_kernel_seconds(spent)

    # ---- binding ------------------------------------------------------------------------------

    def _bind(self, n_tokens: int, n_logits: int) -> list[BoundOp]:
        self._reserve(n_tokens, n_logits)
        if len(self._bound) >= MAX_BOUND:
            self._bound.clear()
        bound: list[BoundOp] = []
        for index, op in enumerate(self.program.ops):
            buffer = self.program.buffers.get(op.out)
            if n_logits == 0 and buffer is not None and buffer.rows == "logits":
                continue
            view = functools.partial(self._view, n_tokens=n_tokens, n_logits=n_logits)
            call = getattr(self, f"_bind_{op.kind}")(op, index, view)
            if op.kind in CAPTURED:
                bound.append((op.kind, *_captured(call)))
            else:
                bound.append((op.kind, call, False))
        self._bound[n_tokens, n_logits] = bound
        return bound

    def _reserve(self, n_tokens: int, n_logits: int) -> None:
        """Make the buffers large enough."""
        for name, buffer in self.program.buffers.items():
            rows = n_tokens if buffer.rows == "tokens" else n_logits
            have = self._buffers.get(name)
            if buffer.base is None and (have is None or len(have) < rows):
                self._buffers[name] = np.zeros((max(rows, 8), buffer.width), np.float32)
                self._bound.clear()

    def _view(self, name: str, n_tokens: int, n_logits: int) -> np.ndarray:
        buffer = self.program.buffers[name]
        rows = n_tokens if buffer.rows == "tokens" else n_logits
        if buffer.base is None:
            return self._buffers[name][:rows]
        columns = slice(buffer.offset, buffer.offset + buffer.width)
        return self._buffers[buffer.base][:rows, columns]

    def _heads(self, view: np.ndarray) -> np.ndarray:
        return view.reshape(len(view), -1, self.program.spec.head_dim)

    def _bind_embedding(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.embedding import cpu

        (table,), out = self._weights.operands[index], view(op.out)
        return lambda: cpu.embedding(self._now.ids, table, out)

    def _bind_norm(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.norm import cpu

        x, out, eps = view(op.inputs[0]), view(op.out), op.attrs["eps"]
        operands = self._weights.operands[index]
        if op.attrs["norm"] == "rms":
            return functools.partial(cpu.rmsnorm, x, operands[0], eps, 0.0, out)
        return functools.partial(cpu.layernorm, x, operands[0], operands[1], eps, out)

    def _bind_linear(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.matmul import cpu
        from nbflow_kernels.qmatmul import cpu as quantized

        (weight,), bias = self._weights.operands[index], self._weights.bias[index]
        matmul = quantized.matmul if isinstance(weight, QuantTensor) else cpu.matmul
        accumulate = bool(op.attrs.get("accumulate", False))
        return functools.partial(matmul, view(op.inputs[0]), weight, bias, accumulate, view(op.out))

    def _bind_rope(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.position import cpu

        q, k = (self._heads(view(name)) for name in op.inputs)
        is_neox = self.program.spec.rope.style == "half"
        return lambda: cpu.apply_rope_with_cos_sin_cache_inplace(
            self._now.positions, q, k, self._cos_sin, is_neox
        )

    def _bind_append_kv(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.kvcache import cpu
        from nbflow_kernels.kvcache.rows import F16, F32

        k, v = (self._heads(view(name)) for name in op.inputs)
        layers, layer = self.storage.layers, op.layer or 0

        def call() -> None:
            step, (keys, values) = self._now, layers[layer]
            cpu.append_paged_kv_cache(
                k,
                v,
                step.batch_indices,
                step.positions,
                keys,
                values,
                step.pages.kv_indices,
                step.pages.kv_indptr,
                "NHD",
                F32 if keys.itemsize == 4 else F16,
            )

        return call

    def _bind_attention(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.attention import cpu

        q, out = self._heads(view(op.inputs[0])), self._heads(view(op.out))
        lse = np.empty(q.shape[:2], np.float32)
        layers, layer = self.storage.layers, op.layer or 0

        def call() -> None:
            keys, values = layers[layer]
            cpu.batch_attention(self._attention_plan, q, keys, values, out, lse)

        return call

    def _bind_activation(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.activation import cpu

        function = getattr(cpu, op.attrs["activation"])
        return functools.partial(function, view(op.inputs[0]), view(op.out))

    def _bind_gate(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        from nbflow_kernels.activation import cpu

        function = getattr(cpu, f"{op.attrs['activation']}_and_mul")
        (both,) = op.inputs  # the programs given to this executor are fused
        return functools.partial(function, view(both), view(op.out))

    def _bind_add(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        x, out = view(op.inputs[0]), view(op.out)
        return functools.partial(np.add, out, x, out)

    def _bind_take_rows(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        x, out = view(op.inputs[0]), view(op.out)
        return lambda: np.take(x, self._now.logit_rows, axis=0, out=out, mode="clip")

    # ---- communication ------------------------------------------------------------------------

    def _bind_all_reduce(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        return functools.partial(self._groups[op.attrs["ranks"]].Allreduce, view(op.out))

    def _bind_all_gather(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        group = self._groups[op.attrs["ranks"]]
        return functools.partial(
            group.Allgather_columns, view(op.inputs[0]), view(op.out), op.attrs["widths"]
        )

    def _bind_send(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        x = view(op.inputs[0])
        peers = [self._numbers.index(rank) for rank in op.attrs["peers"]]

        def call() -> None:
            for peer in peers:
                self._comm.Send(x, peer)

        return call

    def _bind_recv(self, op: Op, index: int, view: Any) -> Callable[[], Any]:
        peer = self._numbers.index(op.attrs["peer"])
        return functools.partial(self._comm.Recv, view(op.out), peer)

    @property
    def _now(self) -> Step:
        assert self._step is not None
        return self._step

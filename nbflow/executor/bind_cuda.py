"""Bind ops to launches of CUDA kernels: the differences from the CPU binder.

Outside CUDA graphs a launcher runs in every step: it computes a grid and launches kernels without
synchronizing.  Index arrays are copied to the device once per step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.executor.attention_plans import ATTENTIONS, LayerAttention
from nbflow.executor.bind import Binder, BoundOp, PythonOp, with_status
from nbflow.executor.bind_cuda_fused import bind_fused
from nbflow.executor.bind_cuda_moe import bind_experts
from nbflow.executor.cuda_communication import StagedComm
from nbflow.executor.cuda_fusion import AnyFusion, ExpertFusion
from nbflow.executor.cuda_graphs import CollectiveOp, HostOp, attention_limits
from nbflow.executor.cuda_moe import MoERunner
from nbflow.executor.executor import Executor
from nbflow.executor.expert_bias import expert_biases
from nbflow.executor.sparse_attention import SparseAttention, select_keys
from nbflow.executor.step_buffers import CudaStepArrays, StepArrays
from nbflow.program.cost import sends_q8
from nbflow.program.records import Op, kv_layer
from nbflow_kernels.attention.cuda.plan import StaticPlanBuffers, device_plan, partial_floats
from nbflow_kernels.attention.plan_layout import KEY_BIAS, SINKS
from nbflow_kernels.cuda import device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.formats.cuda_gather import gather, shard_rows
from nbflow_kernels.gating.cuda import gated_product
from nbflow_kernels.matmul import cuda as floats
from nbflow_kernels.quantized_matmul import cuda as quantized

COLLECTIVES = ("all_reduce", "all_gather")


class CudaMatmulOp:
    """Matrix products of one activation matrix, see `nbflow.executor.bind.MatmulOp`."""

    def __init__(self, x: Any, executor: Executor) -> None:
        self._x, self._activations = x, executor.activations

    def launch(self, weight: Any, bias: Any, accumulate: bool, out: Any) -> None:
        """Launch the product with one weight."""
        if isinstance(weight, QuantTensor):
            quantized.qmatmul(self._x, weight, bias, accumulate, self._activations, out)
        else:
            floats.matmul(self._x, weight, bias, accumulate, out)


class CudaBinder(Binder):
    """Binds the ops of an executor's program to one shape of step."""

    variant = "cuda"
    matmul_op = CudaMatmulOp

    def __init__(
        self,
        executor: Executor,
        host: StepArrays,
        rows_each: int,
        fusions: Mapping[int, Sequence[AnyFusion]],
    ) -> None:
        super().__init__(executor, host)  # the attention scheduler runs on the host
        self._host = host
        self._fusions = fusions
        self.tables: list[StaticPlanBuffers] = []
        """Static attention plans of steps that may become graphs: those with `rows_each`."""
        self.workspaces: list[Any] = []
        """Split-KV workspaces of these plans, shared with other steps."""
        if rows_each and self.attention is not None:
            self.tables = [self._static_plan(kind, rows_each) for kind in self.attention.kinds]
        device = executor.device.for_purpose("the index arrays of a step")
        self.arrays = CudaStepArrays(host, device, self.tables)
        self._scales: dict[tuple[int, float], tuple[Any, Any]] = {}
        self.scratch: list[Any] = []
        """Scratch arrays and constants of ops."""

    def _static_plan(self, kind: LayerAttention, rows_each: int) -> StaticPlanBuffers:
        """Give a kind of attention static plan buffers, which its launches read from now on."""
        like = self.view(next(iter(self.executor.program.buffers)))
        device, heads = device_of(like), kind.plan.heads
        limits = attention_limits(heads, rows_each, device.n_sms)
        tables = StaticPlanBuffers(kind.plan, device, len(self._host.ids), rows_each, **limits)
        size = tables.max_partials * partial_floats(heads) + 4  # room to align the first
        kind.plan.workspace = workspace(device, "attention partials", size, np.float32)
        self.workspaces.append(kind.plan.workspace)
        device_plan(kind.plan, device).fix(tables)
        tables.fill()
        return tables

    def ops(self) -> Iterator[tuple[Op, BoundOp]]:
        """Yield each op, or the first op of a fusion, with its bound form."""
        ops, index = self.executor.program.ops, 0
        while index < len(ops):
            op, last = ops[index], index
            if not self._is_idle(op):
                made, last = self._fused(index)
                yield op, made or getattr(self, f"_{op.kind}")(op, index)
            index = last + 1

    def _fused(self, index: int) -> tuple[PythonOp | None, int]:
        """Return the launch of the largest fusion that starts at an op, and its last op."""
        for fusion in self._fusions.get(index, ()):
            if isinstance(fusion, ExpertFusion):
                made = bind_experts(self, fusion)
            else:
                made = bind_fused(self, fusion)
            if made is not None:
                return made, fusion.last
        return None, index

    def _to_device(self, array: np.ndarray) -> Any:
        return self.executor.device.put(array)

    # ---- kinds of op --------------------------------------------------------------------------

    def _embedding(self, op: Op, index: int) -> PythonOp:
        (table,) = self.executor.weights.operands[index]
        rows, out = getattr(self.arrays, op.attrs.get("index", "ids")), self.view(op.out)
        kernels, scale = self._kernels("embedding"), op.attrs.get("scale", 1.0)
        if "rows" in op.attrs:
            known = self.constant(np.zeros(len(rows), np.int32))
            look_up = self._look_up_known(op, rows, table, known, out)
            return PythonOp(op.kind, look_up, is_fixed=True)
        if "first_row" not in op.attrs:
            return self._captured(op, kernels.embedding, rows, table, scale, out)
        first = op.attrs["first_row"]
        return self._captured(op, kernels.embedding_shard, rows, table, scale, first, out)

    def _look_up_known(
        self, op: Op, ids: Any, table: Any, known: Any, out: Any
    ) -> Callable[[], None]:
        """Return the look-up in a table, or a shard, of which unknown ids take the first row."""
        kernels, scale = self._kernels("embedding"), op.attrs.get("scale", 1.0)

        def look_up() -> None:
            shard_rows(ids, 0, op.attrs["rows"], known, other=0)
            if "first_row" in op.attrs:
                kernels.embedding_shard(known, table, scale, op.attrs["first_row"], out)
            else:
                kernels.embedding(known, table, scale, out)

        return look_up

    def _take_rows(self, op: Op, index: int) -> PythonOp:
        x, out = self.view(op.inputs[0]), self.view(op.out)
        look_up = self._kernels("embedding").embedding
        return self._captured(op, look_up, self.arrays.logit_rows, x, 1.0, out)

    def _heads_linear(self, op: Op, index: int) -> PythonOp:
        weights = self.executor.weights.operands[index]
        stack = weights[0] if len(weights[0].shape) == 3 else None  # all heads in one tensor
        matrices = weights if stack is None else stack.matrices()
        n_rows, n_columns = matrices[0].shape
        x = self._heads(op.inputs[0], op.attrs["head"])[:, :, :n_columns]
        out = self.view(op.out).reshape(len(x), len(matrices), -1)[:, :, :n_rows]
        activations = self.executor.activations

        def launch() -> None:
            if stack is None or not self._kernels("quantized_matmul").batched(
                x, stack, activations, out
            ):
                for h, weight in enumerate(matrices):
                    CudaMatmulOp(x[:, h], self.executor).launch(weight, None, False, out[:, h])

        return PythonOp(op.kind, launch)

    def _copy_heads(self, op: Op, index: int) -> PythonOp:
        n = op.attrs["columns"]
        x = self._heads(op.inputs[0], op.attrs["head"])
        out = self.view(op.out).reshape(len(x), x.shape[1], -1)

        def copy() -> None:
            out[..., -n:] = x[..., -n:]

        return PythonOp(op.kind, copy)

    def _attention(self, op: Op, index: int) -> PythonOp:
        assert self.attention is not None
        step = self.attention.of(op)
        _, _, D_qk, D_vo = step.plan.heads
        q, out = self._heads(op.inputs[0], D_qk), self._heads(op.out, D_vo)
        keys, values = step.storage.layers[kv_layer(op)]
        attend, kinds = self._kernels("attention").attend, step.storage.kinds_of(kv_layer(op))
        sinks = self.executor.weights.bias[index]
        key_bias = self.executor.weights.operands[index][0] if op.attrs.get("key_bias") else None

        def launch(*args: Any) -> None:
            for field, array in ((SINKS, sinks), (KEY_BIAS, key_bias)):
                if array is not None:  # they differ by layer, the plan is shared
                    step.plan.set_table(field, array)
            attend(*args)

        return self._captured(op, launch, step.plan, q, keys, values, out, None, kinds)

    _cross_attention = _attention

    def _select_keys(self, op: Op, index: int) -> PythonOp:
        launcher, *args = select_keys(self, op)
        size = len(args[0]) * len(self.arrays.kv_indices) * self.executor.storage.page_size
        self.workspaces.append(workspace(device_of(args[0]), "key scores", size, np.float32))
        return self._captured(op, launcher, *args, self.workspaces[-1])

    def _sparse_attention(self, op: Op, index: int) -> PythonOp:
        return HostOp(op.kind, SparseAttention(self, self._host, op).run_on_device)

    def _input(self, op: Op, index: int) -> PythonOp:
        out, executor = self.view(op.out), self.executor

        def copy_in() -> None:
            rows = np.ascontiguousarray(executor.external_rows)
            (out if len(rows) == len(out) else out[: len(rows)]).set(rows)  # the rest is padding

        return HostOp(op.kind, copy_in)

    def _experts(self, op: Op, index: int) -> PythonOp:
        spec, weights = self._spec.moe, self.executor.weights
        assert spec is not None
        x, router = (self.view(name) for name in op.inputs)
        bias, options = expert_biases(op, self._spec, weights.bias[index]), spec.routing
        out, held = self.view(op.out), op.attrs["experts"]
        # fused layers multiply experts in float32 with int8 activations, too
        arithmetic = "bf16" if self.executor.activations == "bf16" else "f32"
        runner = MoERunner(x, weights.operands[index], held, spec.top_k, op, out, bias, arithmetic)
        self.workspaces += runner.workspaces
        self.scratch += runner.constants

        factors = None if bias.scale is None else bias.scale.reshape(-1, 1)
        of_pairs = self.constant(np.zeros((len(x) * spec.top_k, 1), np.float32))

        def call() -> None:
            scores, chosen = nk.moe_routing(router, correction_bias=bias.choice, **options)
            if factors is not None:
                gather(chosen.reshape(-1), factors, 1.0, of_pairs)
                column = scores.reshape(-1, 1)
                gated_product(of_pairs, column, "identity", column)
            runner.run(scores, chosen)

        return (HostOp if runner.waits else PythonOp)(op.kind, call)

    def _scaled_add(self, x: Any, scale: float, accumulate: bool, out: Any) -> None:
        """Launch the scaled copy or sum with constants made at binding."""
        scales, rows = self._scales_of(len(x), scale)
        self._kernels("moe").combine(x, scales, rows, accumulate, out)

    def _scales_of(self, n: int, scale: float) -> tuple[Any, Any]:
        """Return a column of n equal scales and a column of row numbers."""
        if (n, scale) not in self._scales:
            rows = np.arange(n, dtype=np.int32).reshape(-1, 1)
            found = self._to_device(np.full((n, 1), scale, np.float32)), self._to_device(rows)
            self._scales[n, scale] = found
            self.scratch += found
        return self._scales[n, scale]

    def constant(self, array: np.ndarray) -> Any:
        """See `Binder.constant`."""
        self.scratch.append(self._to_device(array))
        return self.scratch[-1]

    def _captured(self, op: Op, launcher: Callable[..., Any], *args: Any) -> PythonOp:
        if launcher == self._scaled_add:
            self._scales_of(len(args[0]), args[1])
        is_fixed = bool(self.tables) or op.kind not in ATTENTIONS
        return PythonOp(op.kind, functools.partial(launcher, *args), is_fixed)

    # ---- communication ------------------------------------------------------------------------

    @staticmethod
    def _communication(op: Op, comm: Any, call: Callable[[], Any]) -> PythonOp:
        """Return a communication op that reports its state.

        Graphs may hold collectives on the stream, and no messages between stages: these are at the
        ends of a step, and the graphs of a sender and its receiver would have to be alike.
        """
        is_captured = comm.on_stream and op.kind in COLLECTIVES
        return (CollectiveOp if is_captured else HostOp)(op.kind, with_status(op, call))

    def _world(self) -> Any:
        return self.executor.device_comms.comm or StagedComm(self.executor, self.executor.comm)

    def _group(self, op: Op) -> Any:
        ranks = op.attrs["ranks"]
        comm = self.executor.device_comms.groups.get(ranks)
        if comm is None or sends_q8(op):  # q8 is for slow networks
            return StagedComm(self.executor, self.executor.groups[ranks])
        return comm

"""Bind ops to compiled calls: one method per kind of op.

A launcher of `nbflow_kernels` chooses a kernel and its arguments.  It runs once per shape of step,
and its choice is captured (`nbflow_kernels.cpu.parallel_for.capture`).  Communication ops stay
Python.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.executor.attention_plans import AttentionPlanGroup
from nbflow.executor.executor import Executor
from nbflow.executor.expert_bias import expert_biases, moe_arguments
from nbflow.executor.matmul_op import MatmulOp
from nbflow.executor.plugin_ops import plugin_call
from nbflow.executor.retrieval import retrieval_launch
from nbflow.executor.sparse_attention import SparseAttention, append_index, select_keys
from nbflow.executor.step_buffers import StepArrays
from nbflow.kv_cache.storage import LAYOUT
from nbflow.program.cost import sends_q8
from nbflow.program.records import COMMUNICATION, Op, kv_layer, state_key
from nbflow.utils.rank_status import WAITING, WORKING, status
from nbflow_kernels import op_registry
from nbflow_kernels.activation.xielu import xielu_numbers
from nbflow_kernels.attention.plan_layout import KEY_BIAS, SINKS
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.graph import GraphNode
from nbflow_kernels.cpu.parallel_for import capture
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.formats.cpu_dequantize import gather


@dataclass(frozen=True)
class PythonOp:
    """Op that runs as a Python call."""

    kind: str
    call: Callable[[], Any]
    is_fixed: bool = False
    """True if it launches the same CUDA kernels with the same arguments in every step."""

    @property
    def is_communication(self) -> bool:
        """True for communication between ranks."""
        return self.kind in COMMUNICATION


BoundOp = list[GraphNode] | PythonOp
"""Result of binding an op: captured calls, or Python."""


def with_status(op: Op, call: Callable[[], Any]) -> Callable[[], None]:
    """Wrap a communication call so that it reports its state to the hang watchdog."""

    def communicate() -> None:
        status.set(WAITING, op.kind, op.layer)
        call()
        status.set(WORKING, op.kind, op.layer)

    return communicate


@jit.kernel
def _set_word(header: Any, index: Any, word: Any, start: Any, stop: Any) -> None:
    """Write a word of a plan's header."""
    header[index] = word


class Binder:
    """Binder of an executor's program to one shape of step.

    An op of kind "linear" is bound by the method `_linear`; `nbflow.program.records` has the kinds.
    """

    variant = "cpu"
    """Kernels are those of ``nbflow_kernels/<family>/<variant>.py``."""
    matmul_op: Any = MatmulOp

    def __init__(self, executor: Executor, arrays: StepArrays) -> None:
        self.executor: Any = executor
        self.arrays: Any = arrays
        """Index arrays of the step, in the memory of the kernels."""
        self._spec = executor.program.spec
        self.attention = AttentionPlanGroup(executor, arrays) if executor.program.layers else None

    def ops(self) -> Iterator[tuple[Op, BoundOp]]:
        """Yield each op with its bound form."""
        for index, op in enumerate(self.executor.program.ops):
            if not self._is_idle(op):
                yield op, getattr(self, f"_{op.kind}")(op, index)

    def _is_idle(self, op: Op) -> bool:
        """Return True for an op without rows to compute."""
        buffer = self.executor.program.buffers.get(op.out)
        if buffer is None or buffer.rows == "tokens":
            return False
        n_rows: int = buffer.n_rows(*self.arrays.size)
        return n_rows == 0

    def view(self, name: str) -> Any:
        """Return the rows of a buffer that the step uses."""
        return self.executor.view(name, *self.arrays.size)

    def _heads(self, name: str, head_dim: int | None = None) -> Any:
        view = self.view(name)
        return view.reshape(len(view), -1, head_dim or self._spec.head_dim)

    def _kernels(self, family: str) -> Any:
        return op_registry.load(family, self.variant)

    @property
    def _sharded_norm(self) -> Any:
        """Kernels of norms over the heads of several ranks."""
        return importlib.import_module(f"nbflow_kernels.norm.{self.variant}_tensor_parallel")

    def _to_device(self, array: np.ndarray) -> Any:
        """Return an array in the memory of the kernels."""
        return array

    def _captured(self, op: Op, launcher: Callable[..., Any], *args: Any) -> BoundOp:
        """Capture the compiled calls of a launcher; keep the launcher if it also runs Python."""
        with capture() as captured:
            launcher(*args)
        return captured.calls if captured.complete else PythonOp(op.kind, lambda: launcher(*args))

    # ---- kinds of op --------------------------------------------------------------------------

    def _embedding(self, op: Op, index: int) -> BoundOp:
        from nbflow_kernels.embedding.gather import gather_rows, known_rows

        (table,) = self.executor.weights.operands[index]
        given = getattr(self.arrays, op.attrs.get("index", "ids"))
        out, scale, n_rows = self.view(op.out), op.attrs.get("scale", 1.0), op.attrs.get("rows")
        rows = given if n_rows is None else np.zeros_like(given)

        def look_up(ids: np.ndarray) -> None:
            if n_rows is not None and ids is rows:
                known_rows(given, n_rows, rows)
            if isinstance(table, QuantTensor):
                gather(table, ids, out)
            else:
                gather_rows(ids, table, out)
            if scale != 1.0:
                self._scaled_add(out, scale, False, out)

        def look_up_shard() -> None:
            known = given if n_rows is None else np.where(given < n_rows, given, 0)
            local = known - np.int32(op.attrs["first_row"])
            others = (local < 0) | (local >= table.shape[0])
            look_up(np.where(others, np.int32(0), local))
            out[others] = 0.0

        if "first_row" in op.attrs:
            return PythonOp(op.kind, look_up_shard)
        return self._captured(op, look_up, rows)

    def _take_rows(self, op: Op, index: int) -> BoundOp:
        from nbflow_kernels.embedding.gather import gather_rows

        x, out = self.view(op.inputs[0]), self.view(op.out)
        return self._captured(op, gather_rows, self.arrays.logit_rows, x, out)

    def _norm(self, op: Op, index: int) -> BoundOp:
        kernels = self._kernels("norm")
        x, out, eps = self.view(op.inputs[0]), self.view(op.out), op.attrs["eps"]
        if op.attrs.get("per_head"):
            head = op.attrs.get("head")
            x, out = self._heads(op.inputs[0], head), self._heads(op.out, head)
        if "columns" in op.attrs:
            x, out = x[:, : op.attrs["columns"]], out[:, : op.attrs["columns"]]
        weight, bias = (*self.executor.weights.operands[index], None, None)[:2]
        if len(op.inputs) > 1:
            sums = self.view(op.inputs[1])[:, op.attrs["column"]]
            offset, width = op.attrs.get("offset", 0.0), op.attrs["width"]
            scaled = self._sharded_norm.rmsnorm_with_sums
            return self._captured(op, scaled, x, sums, weight, width, eps, offset, out)
        if op.attrs["norm"] == "rms":
            offset = op.attrs.get("offset", 0.0)
            return self._captured(op, kernels.rmsnorm, x, weight, eps, offset, out)
        return self._captured(op, kernels.layernorm, x, weight, bias, eps, out)

    def _sum_squares(self, op: Op, index: int) -> BoundOp:
        out, sum_squares = self.view(op.out), self._sharded_norm.sum_squares

        def launch() -> None:
            for column, (name, counts) in enumerate(
                zip(op.inputs, op.attrs["counts"], strict=True)
            ):
                sum_squares(self.view(name), counts, out[:, column])

        return self._captured(op, launch)

    def _linear(self, op: Op, index: int) -> BoundOp:
        weights = self.executor.weights
        accumulate = bool(op.attrs.get("accumulate", False))
        x, out, bias = self.view(op.inputs[0]), self.view(op.out), weights.bias[index]
        x = x[: len(out)]  # the head skips hidden states without logits
        matrices = weights.operands[index]

        def launch() -> None:
            product, start = self.matmul_op(x, self.executor), 0
            for weight in matrices:  # stacked rows: each matrix writes a slice of columns
                columns = slice(start, start + weight.shape[0])
                start = columns.stop
                weight_bias = None if bias is None else bias[columns]
                product.launch(weight, weight_bias, accumulate, out[:, columns])

        return self._captured(op, launch)

    def _heads_linear(self, op: Op, index: int) -> BoundOp:
        weights = self.executor.weights.operands[index]
        x = self._heads(op.inputs[0], op.attrs["head"])
        out = self.view(op.out).reshape(len(x), len(weights), -1)

        def launch() -> None:
            for h, weight in enumerate(weights):
                n_rows, n_columns = weight.shape
                product = MatmulOp(x[:, h, :n_columns], self.executor)
                product.launch(weight, None, False, out[:, h, :n_rows])

        return self._captured(op, launch)

    def _copy_heads(self, op: Op, index: int) -> BoundOp:
        from nbflow_kernels.attention.cpu.copy_heads import copy_heads

        n = op.attrs["columns"]
        x = self._heads(op.inputs[0], op.attrs["head"])
        out = self.view(op.out).reshape(len(x), x.shape[1], -1)
        return self._captured(op, copy_heads, x[..., -n:], out[..., -n:])

    def _rope(self, op: Op, index: int) -> BoundOp:
        kernels = self._kernels("position")
        rope, first = op.attrs["rope"], op.attrs.get("first", 0)
        head = op.attrs.get("head", self._spec.cached_dim)
        q, *keys = (self._heads(name, head)[..., first:] for name in op.inputs)
        k = keys[0] if keys else q[:, :0]  # of an earlier layer, or rotated as attention reads them
        return self._captured(
            op, kernels.apply_rope_with_cos_sin_cache_inplace, self.arrays.rope_rows, q, k,
            self.executor.rope_table(rope), rope.style == "half",
        )  # fmt: skip

    def _clip(self, op: Op, index: int) -> BoundOp:
        return self._in_place(op, self._kernels("gating").clip, op.attrs["limit"])

    def _hadamard(self, op: Op, index: int) -> BoundOp:
        return self._in_place(op, self._kernels("hadamard").hadamard_transform, op.attrs["block"])

    def _in_place(self, op: Op, change: Callable[..., Any], number: Any) -> BoundOp:
        """Return the change of each input by a function of (x, number, out)."""
        arrays = [self.view(name) for name in op.inputs]

        def launch() -> None:
            for array in arrays:
                change(array, number, array)

        return self._captured(op, launch)

    def _extend_keys(self, op: Op, index: int) -> BoundOp:
        (rate,), kernels = self.executor.weights.operands[index], self._kernels("gating")
        first, n, x = op.attrs["first"], len(rate), self._heads(op.inputs[0])
        out = self.view(op.out).reshape(len(x), n, -1)
        numbers = self.view(op.inputs[1])[:, first : first + n]
        zeros = self.constant(np.zeros(n, np.float32))

        def launch() -> None:
            kernels.log_decay(numbers, rate, zeros, numbers)
            kernels.extend_heads(x, numbers, True, out)

        return self._captured(op, launch)

    def _extend_queries(self, op: Op, index: int) -> BoundOp:
        x = self._heads(op.inputs[0])
        numbers = self.constant(np.full(x.shape[:2], op.attrs["number"], np.float32))
        extend, out = self._kernels("gating").extend_heads, self.view(op.out)
        return self._captured(op, extend, x, numbers, False, out.reshape(*x.shape[:2], -1))

    def _temperature(self, op: Op, index: int) -> BoundOp:
        scale_queries = self._kernels("position").apply_attention_temperature_inplace
        numbers = (op.attrs[name] for name in ("scale", "floor", "offset"))
        queries = self._heads(op.out, self.executor.program.heads_of(op.layer).key_dim)
        return self._captured(op, scale_queries, self.arrays.positions, queries, *numbers)

    def _append_kv(self, op: Op, index: int) -> BoundOp:
        kernels = self._kernels("kv_cache")
        heads = self.executor.program.heads_of(op.layer or 0)
        k = self._heads(op.inputs[0], heads.key_dim)
        v = k[..., :0]  # MLA: the values are columns of the latent vectors
        if len(op.inputs) == 2:
            v = self._heads(op.inputs[1], heads.value_dim)
        storage, arrays = self.executor.storage, self.arrays
        keys, values = storage.layers[op.layer or 0]
        return self._captured(
            op, kernels.append_paged_kv_cache, k, v, arrays.batch_indices, arrays.positions, keys,
            values, arrays.kv_indices, arrays.kv_indptr, LAYOUT, storage.kinds_of(op.layer),
        )  # fmt: skip

    def _attention(self, op: Op, index: int) -> BoundOp:
        from nbflow_kernels.attention.cpu import launch

        assert self.attention is not None
        step = self.attention.of(op)
        _, _, D_qk, D_vo = step.plan.heads
        q, out = self._heads(op.inputs[0], D_qk), self._heads(op.out, D_vo)
        keys, values = step.storage.layers[kv_layer(op)]
        kinds = step.storage.kinds_of(kv_layer(op))
        sinks, int8 = self.executor.weights.bias[index], self.executor.activations == "int8"
        with capture() as attends:
            launch.attend(step.plan, q, keys, values, out, None, kinds, sinks is not None, int8)
        calls = [dataclasses.replace(c, n_rows=step.n_shares) for c in attends.calls]
        if step.merges:
            with capture() as merges:
                launch.merge_splits(step.plan, out, None)
            calls += [dataclasses.replace(c, n_rows=step.n_merges) for c in merges.calls]
        key_bias = self.executor.weights.operands[index][0] if op.attrs.get("key_bias") else None
        for field, array in ((SINKS, sinks), (KEY_BIAS, key_bias)):
            if array is not None:  # they differ by layer, the plan is shared
                args = step.plan.header, np.int64(field), np.int64(address_of(array))
                calls = [GraphNode(_set_word, args, 1, 1.0), *calls]
        return calls

    _cross_attention = _attention

    def _append_index(self, op: Op, index: int) -> BoundOp:
        return self._captured(op, *append_index(self, op))

    def _select_keys(self, op: Op, index: int) -> BoundOp:
        return self._captured(op, *select_keys(self, op))

    def _sparse_attention(self, op: Op, index: int) -> BoundOp:
        sparse = SparseAttention(self, self.arrays, op)
        return PythonOp(op.kind, sparse.run_on_cpu)

    def _input(self, op: Op, index: int) -> BoundOp:
        out, executor = self.view(op.out), self.executor
        return PythonOp(op.kind, lambda: np.copyto(out, executor.external_rows))

    def _activation(self, op: Op, index: int) -> BoundOp:
        x, out = self.view(op.inputs[0]), self.view(op.out)
        if op.attrs["activation"] == "xielu":
            *alphas, beta, eps = xielu_numbers(*self.executor.weights.operands[index])
            xielu = functools.partial(nk.xielu, beta=beta, eps=eps, out=out)
            return self._captured(op, xielu, x, *alphas)
        elementwise = self._kernels("activation").elementwise
        return self._captured(op, elementwise, x, op.attrs["activation"], out)

    def _gate(self, op: Op, index: int) -> BoundOp:
        kernels, activation = self._kernels("activation"), op.attrs["activation"]
        views, out = [self.view(name) for name in op.inputs], self.view(op.out)
        if len(views) == 1:
            return self._captured(op, kernels.glu, *views, activation, True, out)
        gated_product = self._kernels("gating").gated_product
        return self._captured(op, gated_product, *views, activation, out)

    def _log_decay(self, op: Op, index: int) -> BoundOp:
        rate, bias = self.executor.weights.operands[index]
        log_decay = self._kernels("gating").log_decay
        return self._captured(op, log_decay, self.view(op.inputs[0]), rate, bias, self.view(op.out))

    def _sigmoid(self, op: Op, index: int) -> BoundOp:
        x, out = self.view(op.inputs[0]), self.view(op.out)
        scale = self._to_device(np.full(x.shape, op.attrs["scale"], np.float32))
        gated_product = self._kernels("gating").gated_product
        return self._captured(op, gated_product, x, scale, "sigmoid", out)

    def _delta_rule(self, op: Op, index: int) -> BoundOp:
        head, arrays = op.attrs["head"], self.arrays
        q, k = (self._heads(name, head) for name in op.inputs[:2])
        v, out = (self._heads(name, op.attrs["state"][-1]) for name in (op.inputs[2], op.out))
        decay, beta = (self.view(name) for name in op.inputs[3:])
        if op.attrs["decay"] == "channel":
            decay = self._heads(op.inputs[3], head)
        return self._captured(
            op, self._kernels("delta_rule").gated_delta_rule, q, k, v, decay, beta,
            self.executor.states.arrays[state_key(op)], arrays.qo_indptr, arrays.state_rows,
            arrays.start_positions, head**-0.5, True, True, out,
        )  # fmt: skip

    def _lightning(self, op: Op, index: int) -> BoundOp:
        D = op.attrs["state"][-1]
        q, k, v, out = (self._heads(name, D) for name in (*op.inputs, op.out))
        slopes = self._to_device(np.array(op.attrs["slopes"], np.float32))
        return self._captured(
            op, self._kernels("linear_attention").lightning_attention, q, k, v, slopes,
            self.executor.states.arrays[state_key(op)], self.arrays.qo_indptr,
            self.arrays.state_rows, 1.0, out,
        )  # fmt: skip

    def _mamba1(self, op: Op, index: int) -> BoundOp:
        rate, dt_bias, skip = self.executor.weights.operands[index]
        x, dt, b, c = (self.view(name) for name in op.inputs)
        return self._captured(
            op, self._kernels("state_space").mamba1_scan, x, dt, rate, b, c,
            self.executor.states.arrays[state_key(op)], self.arrays.qo_indptr,
            self.arrays.state_rows, skip, dt_bias, True, self.view(op.out),
        )  # fmt: skip

    def _mamba2(self, op: Op, index: int) -> BoundOp:
        rate, dt_bias, skip = self.executor.weights.operands[index]
        _, width, n = op.attrs["state"]
        x, out = self._heads(op.inputs[0], width), self._heads(op.out, width)
        b, c = (self._heads(name, n) for name in op.inputs[2:])
        return self._captured(
            op, self._kernels("state_space").mamba2_scan, x, self.view(op.inputs[1]), rate, b, c,
            self.executor.states.arrays[state_key(op)], self.arrays.qo_indptr,
            self.arrays.state_rows, skip, dt_bias, True, op.attrs["dt_limits"], out,
        )  # fmt: skip

    def _gated_norm(self, op: Op, index: int) -> BoundOp:
        x, gate = (self.view(name) for name in op.inputs)
        (weight,), attrs = self.executor.weights.operands[index], op.attrs
        gated_rmsnorm = importlib.import_module(
            "nbflow_kernels.norm.cpu_gated" if self.variant == "cpu" else "nbflow_kernels.norm.cuda"
        ).gated_rmsnorm
        return self._captured(
            op, gated_rmsnorm, x, gate, weight, attrs["eps"], attrs["group_size"],
            attrs["gate_first"], attrs["activation"], self.view(op.out),
        )  # fmt: skip

    def _conv(self, op: Op, index: int) -> BoundOp:
        (weight,), bias = self.executor.weights.operands[index], self.executor.weights.bias[index]
        return self._captured(
            op, self._kernels("convolution").causal_conv1d, self.view(op.inputs[0]), weight, bias,
            self.executor.states.arrays[state_key(op)], self.arrays.qo_indptr,
            self.arrays.state_rows, op.attrs["activation"] == "silu", self.view(op.out),
        )  # fmt: skip

    def _experts(self, op: Op, index: int) -> BoundOp:
        spec, weights = self._spec.moe, self.executor.weights
        assert spec is not None
        x, router = (self.view(name) for name in op.inputs)
        out, matrices = self.view(op.out), weights.operands[index]
        bias = expert_biases(op, self._spec, weights.bias[index])
        first, end = op.attrs["experts"]
        arguments, options = moe_arguments(op, matrices, bias), spec.routing
        activations = self.executor.activations
        layer = self.executor.expert_layer(index)
        if layer.can_capture(len(x) * options["top_k"]):
            scratch = self.executor.scratch
            return self._captured(
                op, layer.launch, x, router, options, bias.choice, bias.scale, first, scratch, out
            )

        def call() -> None:  # the products depend on the router's choice
            scores, chosen = nk.moe_routing(router, correction_bias=bias.choice, **options)
            if bias.scale is not None:
                scores *= bias.scale[chosen]
            chosen -= np.int32(first)
            chosen[(chosen < 0) | (chosen >= end - first)] = -1  # an expert of another rank
            nk.fused_moe(
                x, topk_weights=scores, topk_ids=chosen, activations=activations, out=out,
                **arguments,
            )  # fmt: skip

        return PythonOp(op.kind, call)

    def _retrieve(self, op: Op, index: int) -> BoundOp:
        return self._captured(op, retrieval_launch(self, op, index))

    def _plugin(self, op: Op, index: int) -> BoundOp:
        x, out = self.view(op.inputs[0]), self.view(op.out)
        operands = self.executor.weights.operands[index]
        return PythonOp(op.kind, plugin_call(op, x, operands, self.executor, self.arrays, out))

    def _scale_rows(self, op: Op, index: int) -> BoundOp:
        (gate,), x = self.executor.weights.operands[index], self.view(op.inputs[0])
        return self._captured(op, self._kernels("moe").scale_rows, x, gate, self.view(op.out))

    def _add(self, op: Op, index: int) -> BoundOp:
        x, out = self.view(op.inputs[0]), self.view(op.out)
        return self._captured(op, self._scaled_add, x, op.attrs.get("scale", 1.0), True, out)

    def _scale(self, op: Op, index: int) -> BoundOp:
        x, out = self.view(op.inputs[0]), self.view(op.out)
        return self._captured(op, self._scaled_add, x, op.attrs["scale"], False, out)

    def _scale_columns(self, op: Op, index: int) -> BoundOp:
        (weight,), x = self.executor.weights.operands[index], self.view(op.inputs[0])
        multiply = self._kernels("gating").gated_product
        return self._captured(op, multiply, weight, x, "identity", self.view(op.out))

    def _match_rms(self, op: Op, index: int) -> BoundOp:
        (x, like), out = (self.view(name) for name in op.inputs), self.view(op.out)
        scaled = self._kernels("row_statistics").match_rms
        return self._captured(op, scaled, x, like, op.attrs["least"], out)

    def _mix(self, op: Op, index: int) -> BoundOp:
        width, out = op.attrs["width"], self.view(op.out)
        source, weights = (self.view(name) for name in op.inputs)
        n_tokens, n_out, n_in = len(out), out.shape[1] // width, source.shape[1] // width
        streams, result = source.reshape(-1, width), out.reshape(-1, width)
        first = np.arange(n_tokens, dtype=np.int32).repeat(n_out)[:, None] * np.int32(n_in)
        rows = self.constant(first + np.arange(n_in, dtype=np.int32))
        factors, combine = weights.reshape(-1, n_in), self._kernels("moe").combine
        offset = op.attrs.get("offset", 0.0)
        same = self.constant(np.full(rows.shape, offset, np.float32)) if offset else None

        def launch() -> None:
            combine(streams, factors, rows, True, result)
            if same is not None:
                combine(streams, same, rows, True, result)

        return self._captured(op, launch)

    def constant(self, array: np.ndarray) -> Any:
        """Return an array that bound calls hold, in the memory of the kernels."""
        return self._to_device(array)

    def _row_moments(self, op: Op, index: int) -> BoundOp:
        row_moments = self._kernels("row_statistics").row_moments
        return self._captured(op, row_moments, self.view(op.inputs[0]), self.view(op.out))

    def _gaussian_topk(self, op: Op, index: int) -> BoundOp:
        x, moments = (self.view(name) for name in op.inputs)
        cut, attrs = self._kernels("row_statistics").gaussian_topk, op.attrs
        numbers = attrs["width"], attrs["deviations"]
        return self._captured(op, cut, x, moments, *numbers, self.view(op.out))

    def _scaled_add(self, x: Any, scale: float, accumulate: bool, out: Any) -> None:
        """Launch ``out = scale * x`` or ``out += scale * x`` as an expert combine of one row."""
        scales = np.full((len(x), 1), scale, np.float32)
        rows = np.arange(len(x), dtype=np.int32).reshape(-1, 1)
        combine = self._kernels("moe").combine
        combine(x, self._to_device(scales), self._to_device(rows), accumulate, out)

    def _soft_cap(self, op: Op, index: int) -> BoundOp:
        x, out = self.view(op.inputs[0]), self.view(op.out)
        return self._captured(op, self._kernels("logits").soft_cap, x, op.attrs["cap"], out)

    # ---- communication ------------------------------------------------------------------------

    @staticmethod
    def _communication(op: Op, comm: Any, call: Callable[[], Any]) -> BoundOp:
        """Return a communication op, a call of `comm`, that reports its state."""
        return PythonOp(op.kind, with_status(op, call))

    def _world(self) -> Any:
        """Return the communicator of all ranks for the arrays of the step."""
        return self.executor.comm

    def _group(self, op: Op) -> Any:
        """Return the communicator of the op's ranks for the arrays of the step."""
        return self.executor.groups[op.attrs["ranks"]]

    def _all_reduce(self, op: Op, index: int) -> BoundOp:
        group, out = self._group(op), self.view(op.out)
        if sends_q8(op):
            return self._communication(op, group, functools.partial(group.Allreduce_q8, out))
        call = group.captured_all_reduce(out) if self.variant == "cpu" else None
        if call is not None:
            return [call]
        return self._communication(op, group, functools.partial(group.Allreduce, out))

    def _all_gather(self, op: Op, index: int) -> BoundOp:
        group = self._group(op)
        arrays = self.view(op.inputs[0]), self.view(op.out), op.attrs["widths"]
        call = group.captured_all_gather(*arrays) if self.variant == "cpu" else None
        if call is not None:
            return [call]
        return self._communication(op, group, functools.partial(group.Allgather_columns, *arrays))

    def _send(self, op: Op, index: int) -> BoundOp:
        x, comm = self.view(op.inputs[0]), self._world()
        peers = [self.executor.numbers.index(rank) for rank in op.attrs["peers"]]
        return self._communication(op, comm, functools.partial(comm.send_all, x, peers))

    def _recv(self, op: Op, index: int) -> BoundOp:
        out, comm = self.view(op.out), self._world()
        peer = self.executor.numbers.index(op.attrs["peer"])
        return self._communication(op, comm, functools.partial(comm.Recv, out, peer))

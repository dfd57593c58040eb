"""Memory and time per step of pipeline stages.

One layer of each kind is costed and multiplied by its count.  The ranks of a stage wait for each
other at every all-reduce: in between, the slowest rank counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import nbflow_kernels as nk
from nbflow.distributed.plan import Plan, RankPlan
from nbflow.distributed.quantized_all_reduce import q8_packed_bytes
from nbflow.planner.machine import Device, Machine
from nbflow.planner.memory import WeightBytes, buffer_bytes, weight_bytes
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.rates import cache_rates
from nbflow.program import fuse, partition
from nbflow.program.cost import (
    FLOAT32_BYTES,
    OpCost,
    StepShape,
    kv_layer_bytes,
    op_bytes_sent,
    op_cost,
    sends_q8,
)
from nbflow.program.records import COMMUNICATION, Op, Program, mask_of, state_of
from nbflow.spec.kv_formats import parse_kv


@dataclass(frozen=True)
class RunConfig:
    """Formats and placement of a run."""

    kv: str = "f16"
    """Element format of the key/value cache."""
    activations: str | None = None
    """Arithmetic of matrix products; None for the device's first."""
    max_step_tokens: int = 512
    """Tokens per step at most (chunked prefill)."""
    kv_host: float = 0.0
    """Share of the KV cache in host memory, 0..1."""
    embedding_on_host: bool = False
    """Keep the token embedding in host memory."""
    all_reduce: str = "f32"
    """Payload of all-reduces, "f32" or "q8": see `nbflow.distributed.make_plan`."""


MATRIX_OPS = ("linear", "heads_linear", "experts")
ATTENTION_OPS = ("attention", "cross_attention", "sparse_attention")


@dataclass(frozen=True)
class OpWork:
    """Work of one op in a step."""

    kind: str
    cost: OpCost
    formats: tuple[tuple[str, float], ...] = ()
    """Formats of its weights, each with its share of them."""
    quantized: float = 0.0
    """Activations that it quantizes, if the arithmetic is int8."""
    written_bytes: float = 0.0
    """Results of its products."""
    sides: tuple[tuple[str, float, int], ...] = ()
    """Keys and values of attention and `append_kv`: cache format, rows read or written (a row is a
    token of a head), and elements of a row."""
    items: float = 0.0
    """Sequences times KV heads, for attention."""
    vectors: float = 0.0
    """Tokens times query heads, for attention."""


class RankWork:
    """Work and memory of one rank."""

    def __init__(self, model: PlannedModel, plan: RankPlan, program: Program | None = None) -> None:
        self.plan = plan
        self._model = model
        all_layers = dataclasses.replace(plan, layers=(0, model.spec.n_layers))
        self.program = fuse(partition(program or model.program, all_layers))
        mine = range(*plan.layers)
        self._members = {layer: [i for i in mine if i in kind] for layer, kind in model.kinds}
        self.counts = {layer: len(members) for layer, members in self._members.items()}
        sources = {model.spec.kv_source(i) for i in mine}
        self._carried = sorted(sources - set(mine))
        """Layers of earlier stages whose keys and values the rank stores, too."""

    @property
    def n_kv_layers(self) -> int:
        """Number of layers whose keys and values the rank stores."""
        own = sum(self.counts[layer] for layer in self.program.kv_layers)
        return own + len(self._carried)

    def count(self, op: Op) -> int:
        """Return the number of ops of the rank that an op of the program stands for."""
        return 1 if op.layer is None else self.counts[op.layer]

    def weight_bytes(self, on_device: bool = False) -> WeightBytes:
        """Return the bytes of the rank's weights in the layout of its kernels."""
        return weight_bytes(self.program, self._model, on_device, counts=self.counts)

    def kv_token_bytes(self, kv: str) -> int:
        """Return the KV cache bytes per token."""
        own = sum(sum(self._kv_layers_bytes(layer, kv)) for layer in self.program.kv_layers)
        return own + sum(kv_layer_bytes(self.program, kv, layer) for layer in self._carried)

    def _kv_layers_bytes(self, layer: int, kv: str) -> list[int]:
        """Return the KV cache bytes per token of each layer of a kind."""
        members = self._members[layer]
        if not parse_kv(kv).entries:  # layers of a kind have the same heads
            return [kv_layer_bytes(self.program, kv, layer)] * len(members)
        return [kv_layer_bytes(self.program, kv, member) for member in members]

    def _kv_ratio(self, layer: int, kv: str) -> float:
        """Return the mean cache bytes of the layers of a kind over those of its first."""
        sizes = self._kv_layers_bytes(layer, kv)
        return sum(sizes) / max(1, len(sizes) * kv_layer_bytes(self.program, kv, layer))

    def state_bytes(self) -> int:
        """Return the bytes of the recurrent states of one sequence."""
        ops = [op for op in self.program.ops if "state" in op.attrs]
        return sum(self.count(op) * state_of(op, self.program.spec).n_bytes for op in ops)

    def workspace_bytes(
        self, step: StepShape, activations: str = "f32", on_device: bool = False
    ) -> int:
        """Return the bytes of the buffers and rotary tables for steps of this size."""
        tokens, logits = step.n_tokens, step.n_logits
        return buffer_bytes(
            self.program, self._model, activations, tokens, logits, logits, on_device
        )

    def sent_bytes(self, step: StepShape) -> int:
        """Return the payload bytes that the rank sends in a step."""
        tokens, logits = step.n_tokens, step.n_logits
        return sum(
            self.count(op) * op_bytes_sent(self.program, op, self.plan.rank, tokens, logits)
            for op in self.program.ops
        )

    def segments(self, step: StepShape, kv: str) -> Iterator[tuple[int, Op, list[OpWork]]]:
        """Yield (count, last op, works) of the segments between communication ops.

        The last op is the communication op itself, where one ends the segment.
        """
        works: list[OpWork] = []
        for op, following in zip(self.program.ops, (*self.program.ops[1:], None), strict=True):
            if op.kind not in COMMUNICATION:
                works.append(self._work(op, step, kv))
            ends = following is None or following.layer != op.layer
            if op.kind in COMMUNICATION or ends:
                yield self.count(op), op, works
                works = []

    def read_bytes(self, step: StepShape, kv: str) -> float:
        """Return the bytes of weights and cache that a step reads."""
        return sum(
            n * (work.cost.weight_bytes + work.cost.kv_bytes)
            for n, _, works in self.segments(step, kv)
            for work in works
        )

    def _work(self, op: Op, step: StepShape, kv: str) -> OpWork:
        """Return the work of one op."""
        cost = op_cost(self.program, op, step, self._model.bits, kv)
        if op.kind in ("append_kv", "attention"):
            ratio = self._kv_ratio(op.layer or 0, kv)
            cost = dataclasses.replace(cost, kv_bytes=ratio * cost.kv_bytes)
        work = OpWork(op.kind, cost)
        if op.kind in MATRIX_OPS:
            return dataclasses.replace(work, **self._matrices(op, step))
        if op.kind in (*ATTENTION_OPS, "append_kv"):
            return dataclasses.replace(work, **self._sides(op, step, kv))
        return work

    def _matrices(self, op: Op, step: StepShape) -> dict[str, Any]:
        """Return the formats of an op's matrices, and the activations quantized for them."""
        sizes: dict[str, float] = {}
        for operand in op.weights:
            format = self._model.format_of(operand.name)
            shape = operand.shape(self._model.spec.shape_of(operand.name))
            sizes[format] = sizes.get(format, 0.0) + math.prod(shape)
        whole = sum(sizes.values())
        buffer = self.program.buffers.get(op.inputs[0])
        rows = step.n_logits if buffer is None or buffer.rows != "tokens" else step.n_tokens
        blocks = any(nk.FORMATS[format].block_size > 1 for format in sizes)
        out = self.program.buffers.get(op.out)
        written = 0.0 if out is None else float(FLOAT32_BYTES * rows * out.width)
        return {
            "formats": tuple((format, n / whole) for format, n in sizes.items()),
            "written_bytes": written,
            "quantized": float(rows * buffer.width) if buffer is not None and blocks else 0.0,
        }

    def _sides(self, op: Op, step: StepShape, kv: str) -> dict[str, Any]:
        """Return rows of keys and values that an op reads or writes."""
        layer, spec = op.layer or 0, self.program.spec
        heads = self.program.heads_of(layer)
        if op.kind == "append_kv":
            tokens = step.n_tokens
        elif op.kind == "sparse_attention":
            assert spec.indexer is not None
            tokens = step.n_tokens * min(step.context, spec.indexer.top_k)
        else:
            seen = step
            if op.kind == "cross_attention":
                seen = dataclasses.replace(step, context=step.encoder_tokens)
            tokens = seen.keys(mask_of(op))
        formats = parse_kv(kv).of(layer, spec.n_layers)
        widths = heads.key_dim, heads.value_dim if spec.latent is None else 0
        rows = float(tokens * heads.n_kv_heads)
        sides = zip(formats, widths, strict=True)
        return {
            "sides": tuple((format.name, rows, width) for format, width in sides if width),
            "items": float(step.n_sequences * heads.n_kv_heads),
            "vectors": float(step.n_tokens * self.program.n_heads),
        }


def seconds_of(
    work: OpWork, device: Device, config: RunConfig, alone: bool, cached: float = 0.0
) -> float:
    """Return the time of one op on a device.

    Where kernels have been measured, an op takes what they took; else the longer of the times of
    its bytes and of its operations (roofline).

    Parameters
    ----------
    work : OpWork
        The op.
    device : Device
        The device.
    config : RunConfig
        Arithmetic and placement.
    alone : bool
        No other rank reads memory.
    cached : float
        Share of weights and cache in the processor's caches, 0..1.
    """
    if work.formats and device.formats:
        taken = _products_s(work, device, config, alone, cached)
    elif work.sides and device.kv_formats and not config.kv_host:
        taken = _attention_s(work, device, alone, cached)
    else:
        taken = _roofline_s(work.cost, work, device, config, alone)
    return device.op_s + taken


def _products_s(
    work: OpWork, device: Device, config: RunConfig, alone: bool, cached: float
) -> float:
    """Return the time of matrix products, of quantizing activations, and of writing results."""
    cost, arithmetic = work.cost, device.arithmetic(config.activations)
    seconds = sum(
        device.matrix_s(
            share * cost.weights, share * cost.operations, format, arithmetic, cached, alone
        )
        for format, share in work.formats
    )
    if device.buffer_bytes_per_s:  # products are measured with a long row for each result
        seconds += work.written_bytes / device.buffer_bytes_per_s
    return seconds + (work.quantized * device.quantize_s if arithmetic == "int8" else 0.0)


def _attention_s(work: OpWork, device: Device, alone: bool, cached: float) -> float:
    """Return the time to append keys and values, or to attend to them.

    Rows are read, then decoded and multiplied: the times of the memory and of the arithmetic add
    up, because one head's rows are too short for the processor to read ahead.
    """
    operations = device.attention_operations_per_s or device.operations(None)
    seconds = 0.0
    for format, rows, width in work.sides:
        rates = cache_rates(format, device.kv_formats)
        if work.kind == "append_kv":
            seconds += rows * width * rates.write_s
        else:
            seconds += rates.read_s(rows, width)
    if work.kind == "append_kv":
        return seconds
    return (
        seconds
        + device.read_s(work.cost.kv_bytes, cached, alone)
        + work.cost.attention_operations / operations
        + work.items * device.attention_item_s
        + work.vectors * device.attention_vector_s
    )


def _roofline_s(
    cost: OpCost, work: OpWork, device: Device, config: RunConfig, alone: bool
) -> float:
    """Return the longer of the times of an op's bytes and of its operations."""
    on_host = cost.kv_bytes * config.kv_host
    reading = device.read_s(cost.weight_bytes + cost.kv_bytes - on_host, alone=alone)
    if on_host:
        reading += on_host / device.host_read_bytes_per_s
    if device.buffer_bytes_per_s:
        reading += cost.buffer_bytes / device.buffer_bytes_per_s
    else:
        reading += device.read_s(cost.buffer_bytes, alone=alone)
    arithmetic = device.arithmetic(config.activations)
    computing = cost.attention_operations / device.operations(arithmetic)
    if work.formats:
        computing += device.computing_s(cost.weights, cost.operations, arithmetic)
    return max(reading, computing)


class Stage:
    """Pipeline stage: the tensor parallel ranks that share its layers."""

    def __init__(
        self,
        model: PlannedModel,
        plans: Sequence[RankPlan],
        machine: Machine,
        only: bool,
        program: Program | None = None,
    ) -> None:
        self.ranks = [RankWork(model, plan, program) for plan in plans]
        self._devices = [machine.devices[plan.rank] for plan in plans]
        self._link = machine.link([p.rank for p in plans]) if len(plans) > 1 else None
        self._multi_step_s = self._devices[0].burst_step_s if only and len(plans) == 1 else 0.0
        self._takes_turns = machine.join_s > 0.0  # threads, which share Python's lock
        # Equal shards on equal devices cost the same: keep one of each.
        unique = {}
        for work, device in zip(self.ranks, self._devices, strict=True):
            unique[_sizes(work.plan), id(device)] = (work, device)
        self._unique = list(unique.values())

    def seconds(self, step: StepShape, config: RunConfig, alone: bool) -> tuple[float, float]:
        """Return the time of the stage for a step, and its communication time."""
        ranks = [list(work.segments(step, config.kv)) for work, _ in self._unique]
        shares = [
            0.0 if device.cached is None else device.cached.of(work.read_bytes(step, config.kv))
            for work, device in self._unique
        ]
        in_multi_step = self._multi_step_s and step.n_new == 1
        total = self._multi_step_s if in_multi_step else self._host_s(step, min(shares))
        communication = 0.0
        for segment in zip(*ranks, strict=True):
            n, op, _ = segment[0]
            slowest = max(
                sum(seconds_of(work, device, config, alone, cached) for work in works)
                for (_, _, works), (_, device), cached in zip(
                    segment, self._unique, shares, strict=True
                )
            )
            sending = self._communication_s(op, step)
            total += n * (slowest + sending)
            communication += n * sending
        return total, communication

    def _host_s(self, step: StepShape, cached: float) -> float:
        """Return the time of a step's host code until the last rank has run it."""
        times = [device.host_s(step.n_sequences, cached) for device in self._devices]
        return sum(times) if self._takes_turns else max(times)

    def _communication_s(self, op: Op, step: StepShape) -> float:
        if self._link is None or op.kind not in ("all_reduce", "all_gather"):
            return 0.0
        buffers = self.ranks[0].program.buffers
        source = buffers[op.inputs[0] if op.inputs else op.out]
        rows = step.n_tokens if source.rows == "tokens" else step.n_logits
        if op.kind == "all_reduce":
            size = source.width * rows
            n_bytes = q8_packed_bytes(size) if sends_q8(op) else size * FLOAT32_BYTES
            return self._link.all_reduce_s(len(self.ranks), n_bytes)
        n_bytes = max(op.attrs["widths"]) * rows * FLOAT32_BYTES
        return self._link.all_gather_s(len(self.ranks), n_bytes)


def _sizes(plan: RankPlan) -> tuple[int, ...]:
    ranges = (
        plan.layers, plan.heads, plan.kv_heads, plan.ffn, plan.vocab, plan.experts, plan.shared,
        plan.channels, plan.linear_heads, plan.ssm_heads,
    )  # fmt: skip
    return tuple(b - a for a, b in ranges)


def make_stages(
    model: PlannedModel, plan: Plan, machine: Machine, program: Program | None = None
) -> list[Stage]:
    """Return the stages of a plan on a machine, for the model's program or the given one."""
    n = plan.ranks[-1].stage + 1
    return [
        Stage(model, [r for r in plan.ranks if r.stage == s], machine, n == 1, program)
        for s in range(n)
    ]

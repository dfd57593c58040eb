"""Memory and time per step of pipeline stages.

One layer of each kind is costed and multiplied by its count.  The ranks of a stage wait for each
other at every all-reduce: in between, the slowest rank counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbflow.distributed.plan import Plan, RankPlan
from nbflow.distributed.quantized_all_reduce import q8_packed_bytes
from nbflow.planner.machine import Device, Machine
from nbflow.planner.memory import WeightBytes, buffer_bytes, weight_bytes
from nbflow.planner.planned_model import PlannedModel
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
from nbflow.program.records import COMMUNICATION, Op, Program, state_of


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


Costs = tuple[OpCost, str]
"""Cost of an op, and the format of its weights; empty without weights."""


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
        own = sum(
            kv_layer_bytes(self.program, kv, member)
            for layer in self.program.kv_layers
            for member in self._members[layer]
        )
        return own + sum(kv_layer_bytes(self.program, kv, layer) for layer in self._carried)

    def _kv_ratio(self, layer: int, kv: str) -> float:
        """Return the mean cache bytes of the layers of a kind over those of its first."""
        sizes = [kv_layer_bytes(self.program, kv, member) for member in self._members[layer]]
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

    def segments(self, step: StepShape, kv: str) -> Iterator[tuple[int, Op, list[Costs]]]:
        """Yield (count, last op, costs) of the segments between communication ops.

        The last op is the communication op itself, where one ends the segment.
        """
        costs: list[Costs] = []
        for op, following in zip(self.program.ops, (*self.program.ops[1:], None), strict=True):
            if op.kind not in COMMUNICATION:
                cost = op_cost(self.program, op, step, self._model.bits, kv)
                if op.kind in ("append_kv", "attention"):
                    ratio = self._kv_ratio(op.layer or 0, kv)
                    cost = dataclasses.replace(cost, kv_bytes=ratio * cost.kv_bytes)
                format = self._model.format_of(op.weights[0].name) if op.weights else ""
                costs.append((cost, format))
            ends = following is None or following.layer != op.layer
            if op.kind in COMMUNICATION or ends:
                yield self.count(op), op, costs
                costs = []


def seconds_of(costs: Costs, device: Device, config: RunConfig, alone: bool) -> float:
    """Return the roofline time of one op on a device."""
    cost, format = costs
    rate = device.read_bytes_per_s
    if alone and device.read_alone_bytes_per_s:
        rate = device.read_alone_bytes_per_s
    on_host = cost.kv_bytes * config.kv_host
    reading = (cost.weight_bytes + cost.kv_bytes - on_host + cost.buffer_bytes) / rate
    if on_host:
        reading += on_host / device.host_read_bytes_per_s
    arithmetic = device.arithmetic(config.activations)
    computing = cost.attention_operations / device.operations(arithmetic)
    if cost.weights:
        computing += device.product_s(cost.weights, cost.operations, format, arithmetic)
    return device.op_s + max(reading, computing)


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
        self._host_s = max(device.step_s for device in self._devices)
        self._multi_step_s = self._devices[0].burst_step_s if only and len(plans) == 1 else 0.0
        # Equal shards on equal devices cost the same: keep one of each.
        unique = {}
        for work, device in zip(self.ranks, self._devices, strict=True):
            unique[_sizes(work.plan), id(device)] = (work, device)
        self._unique = list(unique.values())

    def seconds(self, step: StepShape, config: RunConfig, alone: bool) -> tuple[float, float]:
        """Return the time of the stage for a step, and its communication time."""
        ranks = [list(work.segments(step, config.kv)) for work, _ in self._unique]
        in_multi_step = self._multi_step_s and step.n_new == 1
        total, communication = self._multi_step_s if in_multi_step else self._host_s, 0.0
        for segment in zip(*ranks, strict=True):
            n, op, _ = segment[0]
            slowest = max(
                sum(seconds_of(cost, device, config, alone) for cost in costs)
                for (_, _, costs), (_, device) in zip(segment, self._unique, strict=True)
            )
            sending = self._communication_s(op, step)
            total += n * (slowest + sending)
            communication += n * sending
        return total, communication

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
        plan.channels, plan.linear_heads,
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

"""What each stage of a partition holds, and how long it works on a step.

Layers of one kind cost the same, so that one of each kind is looked at and counted as often as it
is there.  Ranks of one stage wait for each other at every exchange: between two of them the slowest
one counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nbflow.distributed.plan import Plan, RankPlan
from nbflow.distributed.quantized_all_reduce import q8_packed_bytes
from nbflow.planner.machine import Device, Machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.program import fuse, partition
from nbflow.program.cost import (
    FLOAT32_BYTES,
    OpCost,
    StepShape,
    held_bytes,
    is_rounded,
    kv_token_bytes,
    op_bytes_sent,
    op_cost,
    workspace_bytes,
)
from nbflow.program.records import COMMUNICATION, Op, Operand, Program


@dataclass(frozen=True)
class RunConfig:
    """How the model is run."""

    kv: str = "f16"
    """Element format of the key/value cache."""
    activations: str | None = None
    """Arithmetic of the products; None for the device's first."""
    max_step_tokens: int = 512
    """Most tokens in one step; longer prompts are run in pieces."""
    kv_host: float = 0.0
    """Share of the cache that is kept in the host's memory, 0..1."""
    embedding_on_host: bool = False
    """Whether the token embedding is kept in the host's memory."""
    exchange: str = "f32"
    """How partial sums are sent: see `nbflow.distributed.make_plan`."""


Costs = tuple[OpCost, str]
"""What an op costs, and the format of its weights; empty if it has none."""


class RankWork:
    """The part of one rank.

    Parameters
    ----------
    model : PlannedModel
        The model.
    plan : RankPlan
        What the rank holds of it.
    program : Program, optional
        What runs, with one layer of each kind; by default the model's.
    """

    def __init__(self, model: PlannedModel, plan: RankPlan, program: Program | None = None) -> None:
        self.plan = plan
        self._bits, self._format_of = model.bits, model.format_of
        all_layers = dataclasses.replace(plan, layers=(0, model.spec.n_layers))
        self.program = fuse(partition(program or model.program, all_layers))
        mine = range(*plan.layers)
        self.counts = {layer: sum(i in of_kind for i in mine) for layer, of_kind in model.kinds}

    @property
    def n_layers(self) -> int:
        """Number of its layers."""
        return self.plan.layers[1] - self.plan.layers[0]

    def count(self, op: Op) -> int:
        """Return how often an op of the program stands for one of the rank."""
        return 1 if op.layer is None else self.counts[op.layer]

    def weight_bytes(self) -> int:
        """Return the bytes of its weights."""
        total, shared = 0, set[Operand]()
        for layer, n in ((None, 1), *self.counts.items()):
            ops = tuple(op for op in self.program.ops if op.layer == layer)
            if layer is not None and n:  # what all layers use, e.g. a bias by distance, counts once
                whole = {w for op in ops for w in op.weights if not w.name.startswith("layers.")}
                total += self._held([Op("linear", "", weights=tuple(whole - shared))])
                shared |= whole
                kept = (tuple(w for w in op.weights if w not in whole) for op in ops)
                ops = tuple(
                    dataclasses.replace(op, weights=weights)
                    for op, weights in zip(ops, kept, strict=True)
                )
            total += n * self._held(ops)
        return total

    def _held(self, ops: Iterable[Op]) -> int:
        return held_bytes(dataclasses.replace(self.program, ops=tuple(ops)), self._bits)

    def embedding_bytes(self) -> int:
        """Return the bytes of its token embedding, if no head uses it too."""
        tables = [op for op in self.program.ops if op.kind == "embedding" and op.weights[:1]]
        others = {w for op in self.program.ops if op.kind != "embedding" for w in op.weights}
        ops = tuple(op for op in tables if op.weights[0] not in others)
        return self._held(ops)

    def kv_token_bytes(self, kv: str) -> int:
        """Return the bytes of its cache for one token."""
        return self.n_layers * kv_token_bytes(self.program, kv)

    def workspace_bytes(self, step: StepShape) -> int:
        """Return the bytes of its buffers."""
        return workspace_bytes(self.program, step.n_tokens, step.n_logits)

    def sent_bytes(self, step: StepShape) -> int:
        """Return the bytes it sends in a step."""
        tokens, logits = step.n_tokens, step.n_logits
        return sum(
            self.count(op) * op_bytes_sent(self.program, op, self.plan.rank, tokens, logits)
            for op in self.program.ops
        )

    def pieces(self, step: StepShape, kv: str) -> Iterator[tuple[int, Op, list[Costs]]]:
        """Yield the ops that lie between exchanges: how often, the exchange behind them, costs.

        The op is the last of its piece where no exchange follows.  Beside the costs of each is the
        format of its weights.
        """
        waiting: list[Costs] = []
        for op, following in zip(self.program.ops, (*self.program.ops[1:], None), strict=True):
            if op.kind not in COMMUNICATION:
                cost = op_cost(self.program, op, self.plan.rank, step, self._bits, kv)
                waiting.append((cost, self._format_of(op.weights[0].name) if op.weights else ""))
            ends = following is None or following.layer != op.layer
            if op.kind in COMMUNICATION or ends:
                yield self.count(op), op, waiting
                waiting = []


def seconds_of(costs: Costs, device: Device, setting: RunConfig, alone: bool) -> float:
    """Return how long a device works on one op: as long as its slowest part (the roofline)."""
    cost, format = costs
    rate = device.read_bytes_per_s
    if alone and device.read_alone_bytes_per_s:
        rate = device.read_alone_bytes_per_s
    on_host = cost.kv_bytes * setting.kv_host
    reading = (cost.weight_bytes + cost.kv_bytes - on_host + cost.buffer_bytes) / rate
    if on_host:
        reading += on_host / device.host_read_bytes_per_s
    arithmetic = device.arithmetic(setting.activations)
    computing = cost.attention_operations / device.operations(arithmetic)
    if cost.weights:
        computing += device.product_s(cost.weights, cost.operations, format, arithmetic)
    return device.op_s + max(reading, computing)


class Stage:
    """The ranks that share a layer."""

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
        self._burst_s = self._devices[0].burst_step_s if only and len(plans) == 1 else 0.0
        # Equal parts on equal devices cost the same: one of them is enough.
        seen = {}
        for work, device in zip(self.ranks, self._devices, strict=True):
            seen[_sizes(work.plan), id(device)] = (work, device)
        self._different = list(seen.values())

    def seconds(self, step: StepShape, setting: RunConfig, alone: bool) -> tuple[float, float]:
        """Return how long the stage takes for a step, and how much of that is exchanges."""
        parts = [list(work.pieces(step, setting.kv)) for work, _ in self._different]
        in_burst = self._burst_s and step.n_new == 1
        total, exchanges = self._burst_s if in_burst else self._host_s, 0.0
        for piece in zip(*parts, strict=True):
            n, op, _ = piece[0]
            slowest = max(
                sum(seconds_of(cost, device, setting, alone) for cost in costs)
                for (_, _, costs), (_, device) in zip(piece, self._different, strict=True)
            )
            exchange = self._exchange_s(op, step)
            total += n * (slowest + exchange)
            exchanges += n * exchange
        return total, exchanges

    def _exchange_s(self, op: Op, step: StepShape) -> float:
        if self._link is None or op.kind not in ("all_reduce", "all_gather"):
            return 0.0
        buffers = self.ranks[0].program.buffers
        source = buffers[op.inputs[0] if op.inputs else op.out]
        rows = step.n_tokens if source.rows == "tokens" else step.n_logits
        if op.kind == "all_reduce":
            size = source.width * rows
            n_bytes = q8_packed_bytes(size) if is_rounded(op) else size * FLOAT32_BYTES
            return self._link.all_reduce_s(len(self.ranks), n_bytes)
        n_bytes = max(op.attrs["widths"]) * rows * FLOAT32_BYTES
        return self._link.all_gather_s(len(self.ranks), n_bytes)


def _sizes(plan: RankPlan) -> tuple[int, ...]:
    ranges = (
        plan.layers, plan.heads, plan.kv_heads, plan.ffn, plan.vocab, plan.experts, plan.shared,
    )  # fmt: skip
    return tuple(b - a for a, b in ranges)


def make_stages(
    model: PlannedModel, plan: Plan, machine: Machine, program: Program | None = None
) -> list[Stage]:
    """Return the stages of a plan on a machine; they run the model's program, or another one."""
    n = plan.ranks[-1].stage + 1
    return [
        Stage(model, [r for r in plan.ranks if r.stage == s], machine, n == 1, program)
        for s in range(n)
    ]

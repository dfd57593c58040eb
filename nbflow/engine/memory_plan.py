"""What a model will take of each rank's memory, known before any weight is read.

Weights, the pages of keys and values, and the buffers of a step.  Not counted are what the
interpreter, the libraries and the compiled kernels take (some 200 MB for each process), tables of
positions, and what experts use in passing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import nbflow_kernels as nk
from nbflow.engine.limits import MAX_SEQUENCES
from nbflow.parallel import make_plan, split_replicas, world
from nbflow.planner.model import PlannedModel, planned_model
from nbflow.planner.stages import RankWork
from nbflow.program.cost import workspace_bytes
from nbflow.program.records import Program
from nbflow.system import available_memory_bytes
from nbflow_kernels.errors import UsageError
from nbflow_kernels.qmatmul.activations import Int8Rows

PAGE_SIZE = 64
"""Tokens of a page of the KV cache: as many as attention takes at a time, and long enough a piece
of memory for the processor to read ahead (with 16, reading takes up to half as long again)."""


@dataclass(frozen=True)
class Placement:
    """What is to lie in the host's memory where a rank has a device of its own."""

    kv_host_percent: float = 0.0
    """Share of the keys and values, 0..100."""
    embeddings_on_host: bool = False
    """Whether the token embedding."""
    cpu_layers: int = 0
    """How many layers are computed by the host, too."""

    def __post_init__(self) -> None:
        if not 0 <= self.kv_host_percent <= 100:
            raise UsageError(f"kv_host_percent must be in 0..100, got {self.kv_host_percent:g}")
        if self.cpu_layers < 0:
            raise UsageError(f"cpu_layers must be at least 0, got {self.cpu_layers}")

    @property
    def note(self) -> str:
        """What to tell who has asked for something on a host without devices; empty for nothing."""
        asked = [
            f"{name}={value:g}" if not isinstance(value, bool) else name
            for name, value in dataclasses.asdict(self).items()
            if value
        ]
        if not asked:
            return ""
        return (
            f"everything lies in the host's memory and is computed by its processor, so that "
            f"{', '.join(asked)} change{'s' if len(asked) == 1 else ''} nothing"
        )


@dataclass(frozen=True)
class RankMemory:
    """What one rank takes."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """What a model takes, and of what."""

    partition: str
    """Which ranks hold what."""
    ranks: tuple[RankMemory, ...]
    max_sequences: int
    """Requests that run at once; with replicas on each of them."""
    kv_tokens: int
    """Tokens whose keys and values there is room for."""
    available_bytes: int
    """What the machine has left at present."""
    note: str
    """What has been asked for and changes nothing."""

    def __str__(self) -> str:
        """Return the plan as a table in MB."""
        rows = [["rank", "weights", "KV", "workspace", "total"]]
        for r in self.ranks:
            sizes = (r.weight_bytes, r.kv_bytes, r.workspace_bytes, r.total_bytes)
            rows.append([str(r.rank), *(f"{n / 1e6:,.1f}" for n in sizes)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        total = sum(r.total_bytes for r in self.ranks)
        lines.append(
            f"in MB; partition {self.partition!r}; KV for {self.kv_tokens:,} tokens, at most "
            f"{self.max_sequences} requests at once; all ranks {total / 1e6:,.1f} MB, available "
            f"on this machine {self.available_bytes / 1e6:,.1f} MB"
        )
        if total > self.available_bytes:
            lines.append("this does not fit if all ranks share this machine")
        return "\n".join(lines + ([f"note: {self.note}"] if self.note else []))


def plan_memory(
    model: str | Path,
    *,
    weights: str | None = None,
    activations: str = "f32",
    kv: str = "f16",
    partition: str = "0",
    max_context: int | None = None,
    max_step_tokens: int = 512,
    max_sequences: int = 1,
    kv_bytes: int | None = None,
    placement: Placement | None = None,
    exchange: str = "f32",
    optimize: str = "latency",
    machine: str | Path | None = None,
) -> MemoryPlan:
    """Return what a model will take of each rank's memory; reads no weights.

    Parameters
    ----------
    model : str or Path
        As for `nbflow.load`, or a ``config.json`` alone.
    weights, activations, kv, partition, max_context, max_step_tokens, exchange, optimize, machine
        As for `nbflow.load`; partition "auto" is that of the ranks mpirun has started.
    max_sequences, kv_bytes
        As for `nbflow.Engine`; without `kv_bytes`, room for `max_sequences` full contexts.
    placement : Placement, optional
        What is asked to lie in the host's memory.

    Examples
    --------
    >>> plan = plan_memory("tiny_python", weights="q4", max_sequences=2)
    >>> plan.kv_tokens, len(plan.ranks)
    (1024, 1)
    """
    planned = planned_model(model, weights)
    spec = planned.spec
    context = min(max_context or spec.max_context, spec.max_context)
    if not spec.causal or spec.encoder is not None:
        raise UsageError(f"the memory of {spec.name}, which has an encoder, cannot be planned yet")
    sequences = min(max_sequences, max_step_tokens, MAX_SEQUENCES)
    if partition == "auto":
        from nbflow.planner import Setting, choose_partition

        setting = Setting(kv=kv, activations=activations, exchange=exchange)
        partition = choose_partition(planned, world(), optimize, machine, setting)
    plans = [make_plan(spec, p, planned.block_size, exchange) for p in split_replicas(partition)]
    works = [RankWork(planned, rank) for plan in plans for rank in plan.ranks]
    pages = sequences * -(-context // PAGE_SIZE)
    page_bytes = [PAGE_SIZE * work.kv_token_bytes(kv) for work in works]
    if kv_bytes is not None:
        pages = min(kv_bytes // n for n in page_bytes)
    ranks = tuple(
        RankMemory(
            work.plan.rank,
            work.weight_bytes(),
            pages * n,
            buffer_bytes(work.program, planned, activations, max_step_tokens, sequences),
        )
        for work, n in zip(works, page_bytes, strict=True)
    )
    note = "" if placement is None else placement.note
    tokens = pages * PAGE_SIZE
    return MemoryPlan(partition, ranks, sequences, tokens, available_memory_bytes(), note)


def buffer_bytes(
    program: Program, model: PlannedModel, activations: str, n_tokens: int, n_logits: int
) -> int:
    """Return the bytes of a program's buffers for steps of this size."""
    n_tokens, n_logits = max(n_tokens, 8), max(n_logits, 8)
    total = workspace_bytes(program, n_tokens, n_logits)
    int8: dict[int, int] = {}
    for op in program.ops:
        blocks = any(nk.FORMATS[model.format_of(w.name)].block_size > 1 for w in op.weights)
        if op.kind == "linear" and activations == "int8" and blocks:
            buffer = program.buffers[op.inputs[0]]
            rows = n_tokens if buffer.rows == "tokens" else n_logits
            int8[buffer.width] = max(rows, int8.get(buffer.width, 0))
    return total + sum(Int8Rows.size(rows, columns) for columns, rows in int8.items())

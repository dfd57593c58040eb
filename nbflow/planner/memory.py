"""What a model will take of each rank's memory, known before any weight is read.

Weights in the layout they are computed from, the pages of keys and values, and the buffers of a
step with the tables of positions.  Not counted are what the interpreter, the libraries and the
compiled kernels take (some 200 MB for each process), the page tables and lists of a step, and what
experts use in passing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import nbflow_kernels as nk
from nbflow.distributed import make_plan, split_replicas, world
from nbflow.distributed.device import is_host, split_host_layers
from nbflow.distributed.plan import RankPlan
from nbflow.kv_cache.block_table import pages_after_growth
from nbflow.options import MAX_SEQUENCES, LoadOptions, OffloadConfig
from nbflow.planner.auto_partition import Measure, choose_partition
from nbflow.planner.planned_model import PlannedModel, planned_model
from nbflow.planner.stage_cost import RunConfig
from nbflow.planner.weight_bytes import weight_bytes
from nbflow.program import build, build_memory, fuse
from nbflow.program.cost import FLOAT32_BYTES, kv_token_bytes, workspace_bytes
from nbflow.program.partition import partition as cut
from nbflow.program.records import Program
from nbflow.spec.architecture import RopeSpec
from nbflow.utils.system import available_memory_bytes
from nbflow.utils.tables import text_table
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

PAGE_SIZE = 64
"""Tokens of a page of the KV cache: as many as attention takes at a time, and long enough a piece
of memory for the processor to read ahead (with 16, reading takes up to half as long again)."""


@dataclass(frozen=True)
class RankMemory:
    """What one rank takes."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    host_bytes: int = 0
    """Of the weights and the keys and values: what lies in the host's memory, beside a device."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def place_bytes(self) -> int:
        """What it takes where it computes: on its device, or of the host's memory."""
        return self.total_bytes - self.host_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """What a model takes, and of what."""

    partition: str
    """Which ranks hold what."""
    ranks: tuple[RankMemory, ...]
    devices: tuple[str, ...]
    """Where each rank computes."""
    max_sequences: int
    """Requests that run at once; with replicas on each of them."""
    kv_tokens: int
    """Tokens whose keys and values there is room for."""
    available_bytes: int
    """What the machine has left at present."""
    note: str
    """What has been asked for and changes nothing."""

    @property
    def host_bytes(self) -> int:
        """What all ranks take of the host's memory."""
        return sum(
            r.total_bytes if device == "cpu" else r.host_bytes
            for r, device in zip(self.ranks, self.devices, strict=True)
        )

    def __str__(self) -> str:
        """Return the plan as a table in MB."""
        on_devices = any(device != "cpu" for device in self.devices)
        columns = ["rank", "weights", "KV", "workspace", "total"]
        if on_devices:
            columns += ["device", "on it", "on the host"]
        rows = []
        for r, device in zip(self.ranks, self.devices, strict=True):
            sizes = [r.weight_bytes, r.kv_bytes, r.workspace_bytes, r.total_bytes]
            row = [str(r.rank), *map(_megabytes, sizes)]
            if on_devices:
                here = 0 if device == "cpu" else r.place_bytes
                row += [device, *map(_megabytes, (here, r.total_bytes - here))]
            rows.append(row)
        lines = [text_table(columns, rows)]
        total = sum(r.total_bytes for r in self.ranks)
        host = f", of that on the host {_megabytes(self.host_bytes)} MB" if on_devices else ""
        lines.append(
            f"in MB; partition {self.partition!r}; KV for {self.kv_tokens:,} tokens, at most "
            f"{self.max_sequences} requests at once; all ranks {_megabytes(total)} MB{host}, "
            f"available on this machine {_megabytes(self.available_bytes)} MB"
        )
        if self.host_bytes > self.available_bytes:
            lines.append("this does not fit if all ranks share this machine")
        return "\n".join(lines + ([f"note: {self.note}"] if self.note else []))


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f}"


def plan_memory(
    model: str | Path,
    options: LoadOptions | None = None,
    *,
    max_sequences: int = 1,
    kv_bytes: int | None = None,
    measure: Measure | None = None,
    **changes: Any,
) -> MemoryPlan:
    """Return the memory that a model takes on each rank; reads no weights.

    Parameters
    ----------
    model : str or Path
        As for `nbflow.load`, or a ``config.json`` alone.
    options, **changes
        As for `nbflow.load`.  Devices need not be there; partition "auto" is that of the ranks
        mpirun has started.
    measure
        As for `nbflow.planner.choose_partition`.
    max_sequences, kv_bytes
        As for `nbflow.LLMEngine`; without `kv_bytes`, room for `max_sequences` full contexts.  For
        an encoder: texts as long as its context, as many in a step as there is room for.

    Examples
    --------
    >>> plan = plan_memory("tiny_python", weights="q4", max_sequences=2)
    >>> plan.kv_tokens, len(plan.ranks)
    (1024, 1)
    """
    given = (options or LoadOptions()).replaced(changes)
    weights, exchange = cast(str | None, given.weights), given.exchange
    planned = planned_model(model, weights, given.spec).shortened(given.max_context)
    planned = planned.encoded_by(given.encoder)
    partition = given.partition
    if partition == "auto":
        setting = RunConfig(kv=given.kv, activations=given.activations, exchange=exchange)
        partition = choose_partition(
            planned, world(), given.optimize, given.machine, setting, measure
        )
    partition, device = split_host_layers(given, planned.spec.n_layers, partition, given.device)
    replicas = split_replicas(partition)
    plans = [make_plan(planned.spec, part, planned.block_size, exchange) for part in replicas]
    held = [rank for plan in plans for rank in plan.ranks]
    devices = _devices(device, len(held))
    sequences = min(max_sequences, given.max_step_tokens, MAX_SEQUENCES)
    counted = _Counted(planned, given, sequences)
    if kv_bytes is not None:
        counted.pages = min(kv_bytes // counted.page_bytes(r) for r in held)
    encoders: list[RankPlan] = []
    if planned.spec.encoder is not None:
        theirs = [make_plan(planned.spec.encoder, part, planned.block_size) for part in replicas]
        encoders = [rank for plan in theirs for rank in plan.ranks]
    ranks = []
    for index, (rank, on) in enumerate(zip(held, devices, strict=True)):
        here = OffloadConfig() if on == "cpu" else given.offload
        parts = [counted.rank(rank, on, here)]
        if encoders:
            parts += counted.encoded(rank, encoders[index], on, here)
        sums = [sum(numbers) for numbers in zip(*parts, strict=True)]
        ranks.append(RankMemory(rank.rank, *sums))
    note = given.unused_note if is_host(given.device) else ""
    tokens = counted.pages * PAGE_SIZE
    return MemoryPlan(
        partition, tuple(ranks), devices, sequences, tokens, available_memory_bytes(), note
    )  # fmt: skip


def _devices(device: str, n_ranks: int) -> tuple[str, ...]:
    """Return where each rank computes: "cpu", or a device's name."""
    names = [name.strip().replace("auto", "cpu") for name in device.split(",")]
    if len(names) not in (1, n_ranks):
        raise UsageError(
            f"device={device!r} names {len(names)} devices for {n_ranks} ranks; give one for all, "
            "or one for each"
        )
    return tuple(names * n_ranks if len(names) == 1 else names)


Sizes = tuple[int, int, int, int]
"""Bytes of weights, keys and values, and buffers; and what of the first two is on the host."""


class _Counted:
    """A model in the setting it is to run in."""

    def __init__(
        self,
        model: PlannedModel,
        options: LoadOptions,
        sequences: int,
    ) -> None:
        self._model, self._options, self._sequences = model, options, sequences
        max_step_tokens = options.max_step_tokens
        context = model.spec.max_context
        if model.spec.causal:
            self._rows = max_step_tokens, sequences, sequences
            self.pages = sequences * -(-context // PAGE_SIZE)
        else:  # no text is cut; all its hidden states are wanted, as of texts that are embedded
            together = self._together(model, max_step_tokens)
            self._rows = together * context, together * context, 0
            self.pages = pages_after_growth(together * -(-context // PAGE_SIZE))

    def page_bytes(self, rank: RankPlan) -> int:
        """Return the bytes of a page of a rank's layers."""
        return self._page_bytes(cut(build(self._model.spec), rank))

    def rank(self, rank: RankPlan, device: str, offload: OffloadConfig) -> Sizes:
        """Return what a rank takes of the model itself."""
        program = fuse(cut(build(self._model.spec), rank))
        return self._sizes(program, self._model, self.pages, self._rows, device, offload)

    def encoded(
        self, rank: RankPlan, encoder: RankPlan, device: str, offload: OffloadConfig
    ) -> list[Sizes]:
        """Return what it takes of the encoder, and of what is kept of the encoder's output."""
        model = self._model.encoder
        assert model is not None
        context = model.spec.max_context
        theirs = _Counted(model, self._options, self._sequences)
        program = fuse(cut(build_memory(self._model.spec), rank))
        pages = pages_after_growth(self._sequences * -(-context // PAGE_SIZE))
        rows = self._together(model, self._options.max_step_tokens) * context, 0, 0
        kept = self._sizes(program, self._model, pages, rows, device, offload)
        return [theirs.rank(encoder, device, offload), kept]

    def _together(self, model: PlannedModel, most: int) -> int:
        """Return how many texts of full length go into a step; a longer one runs alone."""
        return max(1, min(self._sequences, most // model.spec.max_context))

    def _page_bytes(self, program: Program) -> int:
        return PAGE_SIZE * len(program.layers) * kv_token_bytes(program, self._options.kv)

    def _sizes(
        self,
        program: Program,
        model: PlannedModel,
        pages: int,
        rows: tuple[int, int, int],
        device: str,
        offload: OffloadConfig,
    ) -> Sizes:
        held = weight_bytes(program, model, device != "cpu", self._options.outliers)
        kv = pages * self._page_bytes(program)
        n_layers = len(program.layers)
        far = kv * offload.host_layers(n_layers) // n_layers if n_layers else 0
        far += held.table_bytes if offload.embeddings_on_host else 0
        buffers = buffer_bytes(program, model, self._options.activations, *rows, device)
        return held.n_bytes, kv, buffers, far


def buffer_bytes(
    program: Program,
    model: PlannedModel,
    activations: str,
    n_tokens: int,
    n_states: int,
    n_logits: int,
    device: str = "cpu",
) -> int:
    """Return the bytes of a program's buffers for steps of this size, and of its rotations."""
    size = max(n_tokens, 8), max(n_states, 8), max(n_logits, 8)
    total = workspace_bytes(program, size[0], size[2], size[1])
    ropes: set[RopeSpec] = {op.attrs["rope"] for op in program.ops if op.kind == "rope"}
    total += FLOAT32_BYTES * sum(program.spec.rope_lengths) * sum(rope.dim for rope in ropes)
    int8: dict[int, int] = {}
    for op in program.ops:
        blocks = any(nk.FORMATS[model.format_of(w.name)].block_size > 1 for w in op.weights)
        if op.kind == "linear" and activations == "int8" and blocks and device == "cpu":
            out, width = program.buffers[op.out], program.buffers[op.inputs[0]].width
            if out.n_rows(n_tokens, n_states, n_logits):
                int8[width] = max(out.n_rows(*size), int8.get(width, 0))
    for columns, rows in int8.items():
        total += int(Int8Rows.size(rows, columns))
    return total

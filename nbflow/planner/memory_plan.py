"""Memory plan: bytes that a model takes on each rank, before any weight is read.

Not counted are the interpreter, libraries and compiled kernels (some 200 MB per process), block
tables, and on the CPU the index arrays of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from nbflow.distributed import make_plan, split_replicas, world
from nbflow.distributed.device import check_names, is_host, split_host_layers
from nbflow.distributed.plan import RankPlan
from nbflow.kv_cache.block_table import pages_after_growth
from nbflow.options import MAX_SEQUENCES, LoadOptions, OffloadConfig
from nbflow.planner.auto_partition import Measure, choose_partition
from nbflow.planner.memory import PAGE_SIZE, buffer_bytes, weight_bytes
from nbflow.planner.planned_model import PlannedModel, planned_model
from nbflow.planner.stage_cost import RunConfig
from nbflow.planner.step_memory import COMMUNICATOR_BYTES, StepBytes, StepShape, step_bytes
from nbflow.program import build, build_cross_kv, fuse
from nbflow.program.cost import kv_layer_bytes, kv_token_bytes, state_row_bytes
from nbflow.program.partition import partition as shard
from nbflow.program.records import Program
from nbflow.utils.system import available_memory_bytes
from nbflow.utils.tables import text_table


@dataclass(frozen=True)
class RunSize:
    """Sequences that `LLM.generate_batch` runs together; pages and buffers grow as they need."""

    batch: int
    prompt: int
    """Prompt tokens of each sequence."""
    decode: int
    """Tokens decoded after them."""

    @property
    def used_pages(self) -> int:
        """Pages of the KV cache that are used."""
        return self.batch * -(-(self.prompt + self.decode) // PAGE_SIZE)

    @property
    def pages(self) -> int:
        """Pages of the KV cache that are allocated."""
        return pages_after_growth(self.used_pages)

    def rows(self, program: Program, most: int, stages: int, device: str) -> tuple[int, int, int]:
        """Return the tokens, hidden states and logits of the largest step.

        Stages of a pipeline work on equal shares of the sequences; steps have `most` tokens at
        most.  On a device, decode steps are padded to their graph's size.
        """
        together = -(-self.batch // stages)
        decoded = min(together, most)
        if device != "cpu":
            from nbflow.executor.cuda import UNPADDED_OPS  # late: loads the CUDA kernels' launchers
            from nbflow.executor.cuda_graphs import batch_bucket

            is_padded = not any(op.kind in UNPADDED_OPS for op in program.ops)
            decoded = batch_bucket(decoded) if is_padded else decoded
        return max(min(together * self.prompt, most), decoded), decoded, decoded


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    host_bytes: int = 0
    """Weights and KV cache that a device rank keeps in host memory."""
    step_bytes: int = 0
    """Index arrays, attention plans, kernel workspaces and graphs of steps on a device."""
    graph_bytes: int = 0
    """CUDA graphs, a part of `step_bytes`."""
    communicator_bytes: int = 0
    """NCCL communicators."""

    @property
    def total_bytes(self) -> int:
        """Weights, KV cache and buffers, and on devices steps and communicators."""
        held = self.weight_bytes + self.kv_bytes + self.workspace_bytes
        return held + self.step_bytes + self.communicator_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes in the memory of its device; for a CPU rank, the host's."""
        return self.total_bytes - self.host_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a model by rank."""

    partition: str
    ranks: tuple[RankMemory, ...]
    devices: tuple[str, ...]
    max_sequences: int
    """Requests that run at once, per replica."""
    kv_tokens: int
    available_bytes: int
    """Memory that is available on this machine."""
    note: str
    """Options that have no effect here; empty for none."""

    @property
    def host_bytes(self) -> int:
        """Host memory of all ranks."""
        return sum(
            r.total_bytes if device == "cpu" else r.host_bytes
            for r, device in zip(self.ranks, self.devices, strict=True)
        )

    def __str__(self) -> str:
        """Return the plan as a table in MB."""
        on_devices = any(device != "cpu" for device in self.devices)
        columns = ["rank", "weights", "KV", "workspace", "total"]
        if on_devices:
            columns[4:] = ["steps", "graphs", "NCCL", "total", "device", "on it", "on the host"]
        rows = []
        for r, device in zip(self.ranks, self.devices, strict=True):
            sizes = [r.weight_bytes, r.kv_bytes, r.workspace_bytes, r.total_bytes]
            if on_devices:
                sizes[3:3] = [r.step_bytes - r.graph_bytes, r.graph_bytes, r.communicator_bytes]
            row = [str(r.rank), *map(_megabytes, sizes)]
            if on_devices:
                on_device = 0 if device == "cpu" else r.device_bytes
                row += [device, *map(_megabytes, (on_device, r.total_bytes - on_device))]
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
    prefix_states: int = 0,
    run: RunSize | None = None,
    measure: Measure | None = None,
    **changes: Any,
) -> MemoryPlan:
    """Return the memory that a model takes on each rank, from its header alone.

    Parameters
    ----------
    model : str or Path
        As for `nbflow.load`, or a ``config.json`` alone.
    options, **changes
        As for `nbflow.load`.  Devices need not exist; partition "auto" is chosen for the ranks that
        mpirun has started.
    measure
        As for `nbflow.planner.choose_partition`.
    max_sequences, kv_bytes, prefix_states
        As for `nbflow.LLMEngine`; by default the cache holds `max_sequences` full contexts, and no
        states are kept.  For an encoder: texts as long as its context, as many as fit into a step.
    run : RunSize, optional
        Sequences of `LLM.generate_batch` instead, without an engine.

    Examples
    --------
    >>> plan = plan_memory("tiny_python", weights="q4", max_sequences=2)
    >>> plan.kv_tokens, len(plan.ranks)
    (1024, 1)
    """
    given = (options or LoadOptions()).replaced(changes)
    weights, all_reduce = cast(str | None, given.weights), given.all_reduce
    planned = planned_model(model, weights, given.spec).shortened(given.max_context)
    planned = planned.quantized_by(given.quantizer).with_state_format(given.state)
    partition = given.partition
    if partition == "auto":
        config = RunConfig(kv=given.kv, activations=given.activations, all_reduce=all_reduce)
        partition = choose_partition(
            planned, world(), given.optimize, given.machine, config, measure
        )
    partition, device = split_host_layers(given, planned.spec.n_layers, partition, given.device)
    replicas = split_replicas(partition)
    plans = [make_plan(planned.spec, part, planned.block_size, all_reduce) for part in replicas]
    held = [rank for plan in plans for rank in plan.ranks]
    devices = _devices(device, len(held))
    if run is not None:  # replicas share the sequences
        run = replace(run, batch=-(-run.batch // len(replicas)))
        max_sequences = run.batch
    sequences = min(max_sequences, given.max_step_tokens, MAX_SEQUENCES)
    memory = _ModelMemory(planned, given, sequences, run, plans[0].ranks[-1].stage + 1)
    memory.n_states += prefix_states
    if kv_bytes is not None:
        memory.pages = min(memory.n_pages(kv_bytes, r) for r in held)
    encoders: list[RankPlan] = []
    if planned.spec.encoder is not None:
        encoder_plans = [
            make_plan(planned.spec.encoder, part, planned.block_size) for part in replicas
        ]
        encoders = [rank for plan in encoder_plans for rank in plan.ranks]
    ranks = []
    for index, (rank, on) in enumerate(zip(held, devices, strict=True)):
        offload = OffloadConfig() if on == "cpu" else given.offload
        parts = [memory.rank(rank, on, offload)]
        if encoders:
            parts += memory.encoded(rank, encoders[index], on, offload)
        sums = [sum(numbers) for numbers in zip(*parts, strict=True)]
        communicators = _communicator_bytes(rank, held, devices)
        ranks.append(replace(RankMemory(rank.rank, *sums), communicator_bytes=communicators))
    note = given.unused_note if is_host(given.device) else ""
    tokens = memory.pages * PAGE_SIZE
    return MemoryPlan(
        partition, tuple(ranks), devices, sequences, tokens, available_memory_bytes(), note
    )  # fmt: skip


def _devices(device: str, n_ranks: int) -> tuple[str, ...]:
    """Return the device of each rank: "cpu", or the name of a device."""
    return tuple(name.replace("auto", "cpu") for name in check_names(device, n_ranks))


def _communicator_bytes(rank: RankPlan, ranks: list[RankPlan], devices: tuple[str, ...]) -> int:
    """Return the bytes of NCCL communicators: of the whole model, and of the rank's stage."""
    if len(ranks) == 1 or not all(device.startswith("cuda") for device in devices):
        return 0
    n_in_stage = sum(other.stage == rank.stage for other in ranks)
    return (1 + (n_in_stage > 1)) * COMMUNICATOR_BYTES


Sizes = tuple[int, int, int, int, int, int]
"""Bytes of weights, KV cache and buffers, the part of the first two in host memory, and bytes of
steps on a device and of their graphs."""


class _ModelMemory:
    """Memory of a model with its load options."""

    def __init__(
        self,
        model: PlannedModel,
        options: LoadOptions,
        sequences: int,
        run: RunSize | None = None,
        stages: int = 1,
    ) -> None:
        self._model, self._options, self._sequences = model, options, sequences
        self._run, self._stages = run, stages
        self.n_states = sequences
        """Recurrent states of sequences and of the prefix cache."""
        max_step_tokens = options.max_step_tokens
        context = model.spec.max_context
        self._most = sequences
        if model.spec.causal:
            self._rows = max_step_tokens, sequences, sequences
            self.pages = run.pages if run else sequences * -(-context // PAGE_SIZE)
        else:  # texts stay whole, and embeddings need all hidden states
            texts = self._texts_per_step(model, max_step_tokens)
            self._rows = texts * context, texts * context, 0
            self.pages = pages_after_growth(texts * -(-context // PAGE_SIZE))

    def n_pages(self, kv_bytes: int, rank: RankPlan) -> int:
        """Return the pages of a rank that fit besides the recurrent states."""
        program = shard(build(self._model.spec), rank)
        left = kv_bytes - self.n_states * state_row_bytes(program)
        page_bytes = self._page_bytes(program)
        return max(0, left) // page_bytes if page_bytes else self.pages

    def rank(self, rank: RankPlan, device: str, offload: OffloadConfig) -> Sizes:
        """Return the bytes of a rank's shard of the model itself."""
        program = fuse(shard(build(self._model.spec), rank))
        rows, most = self._rows, self._options.max_step_tokens
        if self._run is not None and self._model.spec.causal:
            rows = self._run.rows(program, most, self._stages, device)
        return self._sizes(program, self._model, self.pages, rows, device, offload)

    def encoded(
        self, rank: RankPlan, encoder: RankPlan, device: str, offload: OffloadConfig
    ) -> list[Sizes]:
        """Return the bytes of a rank's shard of the encoder, and of its cross-attention."""
        model = self._model.encoder
        assert model is not None
        context = model.spec.max_context
        encoder_memory = _ModelMemory(model, self._options, self._sequences)
        program = fuse(shard(build_cross_kv(self._model.spec), rank))
        pages = pages_after_growth(self._sequences * -(-context // PAGE_SIZE))
        rows = self._texts_per_step(model, self._options.max_step_tokens) * context, 0, 0
        kept = self._sizes(program, self._model, pages, rows, device, offload)
        return [encoder_memory.rank(encoder, device, offload), kept]

    def _texts_per_step(self, model: PlannedModel, max_tokens: int) -> int:
        """Return the number of texts of full length in a step, at least one."""
        return max(1, min(self._sequences, max_tokens // model.spec.max_context))

    def _page_bytes(self, program: Program) -> int:
        return PAGE_SIZE * kv_token_bytes(program, self._options.kv)

    def _sizes(
        self,
        program: Program,
        model: PlannedModel,
        pages: int,
        rows: tuple[int, int, int],
        device: str,
        offload: OffloadConfig,
    ) -> Sizes:
        weights = weight_bytes(program, model, device != "cpu", self._options.outliers)
        kv = pages * self._page_bytes(program)
        n_layers = len(program.kv_layers)
        last = program.kv_layers[n_layers - offload.host_layers(n_layers) :]
        of_last = (kv_layer_bytes(program, self._options.kv, layer) for layer in last)
        host = pages * PAGE_SIZE * sum(of_last)
        kv += self.n_states * state_row_bytes(program)
        host += weights.table_bytes if offload.embeddings_on_host else 0
        activations = self._options.activations
        buffers = buffer_bytes(program, model, activations, *rows, device != "cpu")
        steps = StepBytes(0, 0)
        if device != "cpu":
            shapes = self._shapes(program, pages, rows)
            steps = step_bytes(
                program, model, activations, shapes, PAGE_SIZE, device, self._options.graphs
            )
        return weights.n_bytes, kv, buffers, host, steps.n_bytes, steps.graph_bytes

    def _shapes(
        self, program: Program, pages: int, rows: tuple[int, int, int]
    ) -> tuple[StepShape, ...]:
        """Return the largest decode step and the longest prompt."""
        from nbflow.executor.cuda_graphs import batch_bucket, page_bucket  # late, as above

        if self._run is not None:
            pages = min(pages, self._run.used_pages)
        n_pages, n_sequences = page_bucket(pages), max(1, min(self._most, rows[0]))
        if not program.spec.causal:
            return (StepShape(*rows, n_sequences, n_pages, rows[0]),)
        n = rows[1] if self._run is not None else batch_bucket(n_sequences)
        decode = StepShape(n, n, n, n, n_pages, 1)
        if rows[0] <= n:
            return (decode,)
        return decode, StepShape(*rows, n_sequences, n_pages, rows[0])

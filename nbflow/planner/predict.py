"""Predict speed and memory of a partition on a machine.

A step of one pipeline stage takes the time of its ops (measured, else the roofline's), of the
communication among its ranks, and of its host code.  Batches are divided into micro-batches and
long prompts into chunks, so that all stages are busy.  With stage times t_s, time d of the messages
between stages and m micro-batches, a decode step takes

    max(sum(t_s) + d, m * max(t_s)),

the latency of one micro-batch, or the work of the slowest stage on all of them.  Threads of one
process end each step together (`Machine.join_s`), so that a pipeline fills and drains in each step:

    sum(t_s) + d + (m - 1) * max(t_s).

While it begins to fill and has almost drained only one stage works, which has the memory alone: the
first and the last stage count once with the time that they take alone.

A prompt of n chunks takes as long as a step of n micro-batches.  The remaining time of the stages
is the bubble.

Models with an encoder are predicted in `nbflow.planner.encoder_models`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from nbflow.distributed import Plan, make_plan, split_replicas
from nbflow.planner.encoder_models import predict_encoder
from nbflow.planner.machine import Device, Machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.prediction import Prediction, Workload, kind_of, rank_prediction
from nbflow.planner.stage_cost import RunConfig, make_stages
from nbflow.program.cost import FLOAT32_BYTES, StepShape
from nbflow_kernels.errors import UsageError


def predict(
    model: PlannedModel,
    partition: str,
    machine: Machine,
    workload: Workload | None = None,
    config: RunConfig | None = None,
    micro_batches: int | None = None,
) -> Prediction:
    """Predict a partition.

    Parameters
    ----------
    model : PlannedModel
        The model.
    partition : str
        Partition string.
    machine : Machine
        The machine; it must describe every rank of the partition.
    workload : Workload, optional
        Batch and lengths.
    config : RunConfig, optional
        Formats and placement.
    micro_batches : int, optional
        Micro-batches of a batch; by default one per stage, as in `nbflow.engine.pipeline`.

    Raises
    ------
    UsageError
        If the partition does not fit the model, the machine has too few ranks, or the context is
        too short.

    Examples
    --------
    >>> from nbflow.planner import load_machine, planned_model, predict
    >>> model = planned_model("llama2_7b", "q4")
    >>> machine = load_machine("v100x4_nvlink")
    >>> predict(model, "0&1", machine).decode_s < predict(model, "0", machine).decode_s
    True
    """
    workload, config = workload or Workload(), config or RunConfig()
    _check(model, workload)
    replica_workloads = _split_batch(partition, workload)
    only = min(len(replica_workloads), workload.batch) == 1  # the other replicas are idle
    replicas = [
        _replica(model, part, machine, share, config, micro_batches, only)
        for part, share in replica_workloads
    ]
    slowest = max(replicas, key=lambda r: r.request_s)
    kind = slowest.kind if len(replicas) == 1 else f"replicas {slowest.kind}"
    return Prediction(
        "/".join(r.partition for r in replicas),
        kind,
        workload,
        slowest.micro_batches,
        max(r.prefill_s for r in replicas),
        max(r.decode_s for r in replicas),
        slowest.all_reduce_share,
        slowest.bubble,
        tuple(rank for r in replicas for rank in r.ranks),
    )


def _check(model: PlannedModel, workload: Workload) -> None:
    """Raise if a workload exceeds the context of the model."""
    spec = model.spec
    wanted = {spec.name: workload.kv_tokens}
    if spec.encoder is not None:
        wanted = {"the encoder": workload.prompt, spec.name: workload.generate + 1}
    elif not spec.causal:
        wanted = {spec.name: workload.prompt}
    for (name, needed), part in zip(wanted.items(), (spec.encoder or spec, spec), strict=False):
        if needed > part.max_context:
            raise UsageError(
                f"prompt, answer and cache need {needed} tokens, but the context of {name} holds "
                f"{part.max_context}; plan for less (--prompt, --generate, --context)"
            )


def _split_batch(partition: str, workload: Workload) -> list[tuple[str, Workload]]:
    """Return each replica with its share of the batch, at least one sequence."""
    parts = split_replicas(partition)
    n, more = divmod(workload.batch, len(parts))
    batches = [max(1, n + (i < more)) for i in range(len(parts))]
    return [
        (part, Workload(batch, workload.prompt, workload.generate, workload.context))
        for part, batch in zip(parts, batches, strict=True)
    ]


def _replica(
    model: PlannedModel,
    partition: str,
    machine: Machine,
    workload: Workload,
    config: RunConfig,
    micro_batches: int | None,
    only: bool,
) -> Prediction:
    """Predict one replica; `only` if no other one is busy."""
    plan = make_plan(model.spec, partition, model.block_size, config.all_reduce)
    if max(plan.numbers) >= len(machine.devices):
        raise UsageError(
            f"partition {partition!r} names rank {max(plan.numbers)}, but machine "
            f"{machine.name!r} has {len(machine.devices)} ranks; describe more ranks"
        )
    for rank in plan.numbers:
        _check_host(machine.devices[rank], config)
    if model.spec.encoder is not None or not model.spec.causal:
        return predict_encoder(model, plan, machine, workload, config)
    pipeline = _Pipeline(model, plan, machine, config, only)
    decode = pipeline.decode(workload, micro_batches)
    prefill_s, largest = pipeline.prefill(workload)
    step = StepShape(1, max(largest.n_tokens, workload.batch), 1, workload.batch)
    decoding = StepShape(workload.batch, 1, workload.kv_tokens, workload.batch)
    ranks = tuple(
        rank_prediction(
            [(work, workload.kv_tokens * workload.batch, step)],
            machine.devices[work.plan.rank],
            config,
            work.sent_bytes(decoding) / workload.batch,
        )
        for stage in pipeline.stages
        for work in stage.ranks
    )
    return Prediction(
        plan.partition,
        kind_of(pipeline.stages),
        workload,
        decode.micro_batches,
        prefill_s,
        decode.seconds,
        decode.all_reduce_share,
        decode.bubble,
        ranks,
    )


def _check_host(device: Device, config: RunConfig) -> None:
    if device.host_read_bytes_per_s:
        return
    for given, name in ((config.kv_host, "a KV cache"), (config.embedding_on_host, "an embedding")):
        if given:
            raise UsageError(
                f"device {device.name} has no host_read_bytes_per_s, which {name} in host memory "
                "needs; add it to the machine's file, or keep it on the device"
            )


@dataclass(frozen=True)
class _Decode:
    """Time of a decode step."""

    seconds: float
    micro_batches: int
    all_reduce_share: float
    bubble: float


class _Pipeline:
    """Pipeline stages of one replica."""

    def __init__(
        self, model: PlannedModel, plan: Plan, machine: Machine, config: RunConfig, only: bool
    ) -> None:
        self.stages = make_stages(model, plan, machine)
        self._config = config
        self._row_bytes = model.spec.hidden_size * FLOAT32_BYTES
        self._links = [
            machine.link([before.ranks[-1].plan.rank, after.ranks[-1].plan.rank])
            for before, after in itertools.pairwise(self.stages)
        ]
        # The rank with the head samples, and broadcasts the tokens before the next step.
        several = len(plan.numbers) > 1
        self._broadcast_s = machine.link(plan.numbers).latency_s if several else 0.0
        self._join_s = machine.join_s if several else 0.0
        self._one_rank_reads = only and all(len(stage.ranks) == 1 for stage in self.stages)

    def _step_times(self, step: StepShape, alone: bool) -> tuple[list[float], float, float]:
        """Return the stage times of a step, the message time, and the share of communication.

        `alone`: no other step is in flight.
        """
        alone = alone and self._one_rank_reads
        times = [stage.seconds(step, self._config, alone) for stage in self.stages]
        between = sum(link.send_s(step.n_tokens * self._row_bytes) for link in self._links)
        slowest, communication = max(times)
        return [t for t, _ in times], between, communication / slowest

    def decode(self, workload: Workload, micro_batches: int | None) -> _Decode:
        """Return the time of a decode step."""
        m = min(workload.batch, len(self.stages) if micro_batches is None else micro_batches)
        if m < 1:
            raise UsageError(f"micro_batches must be at least 1, got {micro_batches}")
        size = -(-workload.batch // m)
        context = min(workload.prompt + (workload.generate + 1) // 2, workload.kv_tokens)
        step = StepShape(size, 1, context, size)
        times, between, share = self._step_times(step, m == 1)
        if self._join_s:
            first = self._filling(times, self._step_times(step, True)[0])
            seconds = sum(first) + between + (m - 1) * max(times) + self._join_s
        else:
            seconds = max(sum(times) + between, m * max(times))
        seconds += self._broadcast_s
        bubble = 1.0 - m * sum(times) / (len(times) * seconds) if len(times) > 1 else 0.0
        return _Decode(seconds, m, share, max(0.0, bubble))

    @staticmethod
    def _filling(times: list[float], alone: list[float]) -> list[float]:
        """Return the stage times of the steps that fill and drain the pipeline."""
        if len(times) == 1:
            return times
        return [alone[0], *times[1:-1], alone[-1]]

    def prefill(self, workload: Workload) -> tuple[float, StepShape]:
        """Return the time of the prefill, and its largest step."""
        budget = self._config.max_step_tokens
        share = -(-workload.batch // len(self.stages))  # of a stage, as in `Pipeline`
        together = max(1, min(share, budget // workload.prompt))
        n_new = min(workload.prompt, budget)
        ends = [*range(n_new, workload.prompt, n_new), workload.prompt]
        steps = [
            StepShape(together, end - start, end, together if end == workload.prompt else 0)
            for start, end in itertools.pairwise([0, *ends])
        ]
        rounds = workload.batch / together
        times = [self._step_times(step, len(steps) * rounds == 1) for step in steps]
        first, between, _ = times[0]
        slowest = sum(max(stage_times) for stage_times, _, _ in times)
        seconds = sum(first) + between + rounds * slowest - max(first)
        return seconds + self._broadcast_s + self._join_s, max(
            steps, key=lambda step: step.n_tokens
        )

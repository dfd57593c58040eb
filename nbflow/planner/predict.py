"""How fast a partition runs a model on a machine, and whether it fits.

A step of one stage takes the time of its ops (each as long as its slowest part: reading memory or
computing), of the exchanges among its ranks, and of its host code.  Stages work on a step one after
the other.  Several steps on the way keep them all busy: a batch that generates is divided into
micro-batches, a long prompt into pieces.  With stage times t_s, the time d of the messages between
stages and m micro-batches, a token for every sequence takes

    max(sum(t_s) + d, m * max(t_s)),

the way of one micro-batch, or the work of the slowest stage on all of them; a prompt of n pieces
takes sum(t_s) + d + (n - 1) * max(t_s).  What is left of the stages' time is the bubble.

An encoder reads whole texts, step by step, and every rank is told the hidden states; a decoder with
an encoder then makes keys and values of them and begins with one token
(`nbflow.planner.encoder_models`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from nbflow.distributed import Plan, make_plan, split_replicas
from nbflow.planner.encoder_models import predict_encoder
from nbflow.planner.machine import Device, Machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.prediction import Prediction, Steps, Workload, kind_of, predicted_rank
from nbflow.planner.stage_cost import RunConfig, make_stages
from nbflow.program.cost import FLOAT32_BYTES, StepShape
from nbflow_kernels.errors import UsageError


def predict(
    model: PlannedModel,
    partition: str,
    machine: Machine,
    workload: Workload | None = None,
    setting: RunConfig | None = None,
    micro_batches: int | None = None,
) -> Prediction:
    """Return what a partition can do.

    Parameters
    ----------
    model : PlannedModel
        The model.
    partition : str
        Partition string.
    machine : Machine
        The machine; it must have every rank that the partition names.
    workload : Workload, optional
        What is asked of it.
    setting : Setting, optional
        Formats, and what is kept on the host.
    micro_batches : int, optional
        Parts in which a batch goes through the stages; by default as many as there are stages, as
        in `nbflow.engine.pipeline`.

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
    workload, setting = workload or Workload(), setting or RunConfig()
    _check(model, workload)
    shared = _shared_out(partition, workload)
    only = min(len(shared), workload.batch) == 1  # the others have nothing to do
    replicas = [
        _replica(model, part, machine, share, setting, micro_batches, only)
        for part, share in shared
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
        slowest.exchange_share,
        slowest.bubble,
        tuple(rank for r in replicas for rank in r.ranks),
    )


def _check(model: PlannedModel, workload: Workload) -> None:
    """Raise unless a model has room for what is asked of it."""
    spec = model.spec
    wanted = {spec.name: workload.room}
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


def _shared_out(partition: str, workload: Workload) -> list[tuple[str, Workload]]:
    """Return the replicas with the sequences that each gets; those that get none stay idle."""
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
    setting: RunConfig,
    micro_batches: int | None,
    only: bool,
) -> Prediction:
    """Return what one replica can do; whether it is the only one that works."""
    plan = make_plan(model.spec, partition, model.block_size, setting.exchange)
    if max(plan.numbers) >= len(machine.devices):
        raise UsageError(
            f"partition {partition!r} names rank {max(plan.numbers)}, but machine "
            f"{machine.name!r} has {len(machine.devices)} ranks; describe more of them"
        )
    for rank in plan.numbers:
        _check_host(machine.devices[rank], setting)
    if model.spec.encoder is not None or not model.spec.causal:
        return predict_encoder(model, plan, machine, workload, setting)
    pipeline = _Pipeline(model, plan, machine, setting, only)
    decode = pipeline.decode(workload, micro_batches)
    prefill_s, largest = pipeline.prefill(workload)
    steps = Steps(max(largest.n_tokens, workload.batch), workload.batch)
    decoding = StepShape(workload.batch, 1, workload.room, workload.batch)
    ranks = tuple(
        predicted_rank(
            [(work, workload.room * workload.batch, steps)],
            machine.devices[work.plan.rank],
            setting,
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
        decode.exchange_share,
        decode.bubble,
        ranks,
    )


def _check_host(device: Device, setting: RunConfig) -> None:
    if setting.kv_host and not device.host_read_bytes_per_s:
        raise UsageError(
            f"device {device.name} has no host_read_bytes_per_s, so it cannot read a cache that is "
            "kept on the host; add it to the machine's file, or keep the cache on the device"
        )


@dataclass(frozen=True)
class _Decode:
    """A token for every sequence."""

    seconds: float
    micro_batches: int
    exchange_share: float
    bubble: float


class _Pipeline:
    """The stages of one replica, one behind the other."""

    def __init__(
        self, model: PlannedModel, plan: Plan, machine: Machine, setting: RunConfig, only: bool
    ) -> None:
        self.stages = make_stages(model, plan, machine)
        self._setting = setting
        self._row_bytes = model.spec.hidden_size * FLOAT32_BYTES
        self._links = [
            machine.link([before.ranks[-1].plan.rank, after.ranks[-1].plan.rank])
            for before, after in itertools.pairwise(self.stages)
        ]
        # The rank with the head draws the tokens, and all others must know them before they go on.
        several = len(plan.numbers) > 1
        self._told_s = machine.link(plan.numbers).latency_s if several else 0.0
        self._one_at_a_time = only and all(len(stage.ranks) == 1 for stage in self.stages)

    def _way(self, step: StepShape, busy: bool) -> tuple[list[float], float, float]:
        """Return the stages' times of a step, that of the messages, and the share of exchanges.

        The stages are `busy` if several steps are on the way.
        """
        alone = self._one_at_a_time and not busy
        times = [stage.seconds(step, self._setting, alone) for stage in self.stages]
        between = sum(link.send_s(step.n_tokens * self._row_bytes) for link in self._links)
        slowest, exchanges = max(times)
        return [t for t, _ in times], between, exchanges / slowest

    def decode(self, workload: Workload, micro_batches: int | None) -> _Decode:
        """Return what it takes to give every sequence a token."""
        m = min(workload.batch, len(self.stages) if micro_batches is None else micro_batches)
        if m < 1:
            raise UsageError(f"micro_batches must be at least 1, got {micro_batches}")
        size = -(-workload.batch // m)
        context = min(workload.prompt + (workload.generate + 1) // 2, workload.room)
        times, between, share = self._way(StepShape(size, 1, context, size), m > 1)
        seconds = max(sum(times) + between, m * max(times)) + self._told_s
        bubble = 1.0 - m * sum(times) / (len(times) * seconds) if len(times) > 1 else 0.0
        return _Decode(seconds, m, share, max(0.0, bubble))

    def prefill(self, workload: Workload) -> tuple[float, StepShape]:
        """Return the time to read all prompts, and the largest step."""
        budget = self._setting.max_step_tokens
        together = max(1, min(workload.batch, budget // workload.prompt))
        n_new = min(workload.prompt, budget)
        ends = [*range(n_new, workload.prompt, n_new), workload.prompt]
        steps = [
            StepShape(together, end - start, end, together if end == workload.prompt else 0)
            for start, end in itertools.pairwise([0, *ends])
        ]
        rounds = workload.batch / together
        ways = [self._way(step, len(steps) * rounds > 1) for step in steps]
        first, between, _ = ways[0]
        slowest = sum(max(times) for times, _, _ in ways)
        seconds = sum(first) + between + rounds * slowest - max(first)
        return seconds + self._told_s, max(steps, key=lambda step: step.n_tokens)

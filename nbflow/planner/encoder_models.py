"""How fast a partition runs an encoder, alone or in front of a decoder, and whether it fits.

Texts are whole in a step, because every token sees all others, and share steps as far as these have
room; a step waits for the one before, and its hidden states are told to every rank
(`nbflow.engine.evaluator`).  A decoder's ranks make keys and values of them, each for its layers
and heads (`nbflow.engine.cross_attention`), then the decoder runs step by step, without
micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nbflow.distributed import Plan, make_plan
from nbflow.planner.machine import Machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.prediction import Prediction, Steps, Workload, kind_of, predicted_rank
from nbflow.planner.stage_cost import RankWork, RunConfig, Stage, make_stages
from nbflow.program.cost import FLOAT32_BYTES, StepShape


def predict_encoder(
    model: PlannedModel, plan: Plan, machine: Machine, workload: Workload, setting: RunConfig
) -> Prediction:
    """Return what one replica of a model with an encoder, or of an encoder, can do.

    Parameters are those of `nbflow.planner.predict`; `Workload.prompt` is the length of a text,
    `Workload.generate` what the decoder draws.
    """
    timer = _Timer(plan, machine, setting)
    encoder = model.encoder
    if encoder is None:
        stages = make_stages(model, plan, machine)
        read_s, largest = timer.read(stages, workload, model.spec.hidden_size)
        parts = [(stages, largest, Steps(largest, largest))]
        return _prediction(parts, plan, machine, workload, setting, read_s, 0.0, 0.0, 0.0)
    of_encoder = make_plan(encoder.spec, plan.partition, plan.block_size, setting.exchange)
    encoding = make_stages(encoder, of_encoder, machine)
    remembering = make_stages(model, plan, machine, model.memory_program)
    decoding = make_stages(model, plan, machine)
    read_s, largest = timer.read(encoding, workload, encoder.spec.hidden_size)
    remember_s = timer.remember(remembering, workload)
    batch, context = workload.batch, (workload.generate + 1) // 2
    step = StepShape(batch, 1, context, batch, workload.prompt)
    decode_s, bubble, share = timer.decode(decoding, step, model.spec.hidden_size)
    held = batch * workload.prompt  # keys and values of the encoder's states
    parts = [
        (decoding, batch * (workload.generate + 1), Steps(batch, batch)),
        (encoding, largest, Steps(largest, largest)),
        (remembering, held, Steps(max(largest, workload.prompt), 0)),
    ]
    read_s += remember_s + decode_s  # the first token comes with the decoder's first step
    return _prediction(parts, plan, machine, workload, setting, read_s, decode_s, bubble, share)


class _Timer:
    """Times of steps that run one after the other."""

    def __init__(self, plan: Plan, machine: Machine, setting: RunConfig) -> None:
        self._machine, self._setting, self._plan = machine, setting, plan
        self._alone = len(plan.numbers) == 1
        several = len(plan.numbers) > 1
        self._link = machine.link(plan.numbers) if several else None

    def _step(self, stages: Sequence[Stage], step: StepShape, hidden: int) -> tuple[float, float]:
        """Return the time of a step that goes through all stages, and of exchanges in stages."""
        times = [stage.seconds(step, self._setting, self._alone) for stage in stages]
        total = sum(t for t, _ in times)
        for before, after in itertools.pairwise(stages):
            link = self._machine.link([before.ranks[-1].plan.rank, after.ranks[-1].plan.rank])
            total += link.send_s(step.n_tokens * hidden * FLOAT32_BYTES)
        return total, sum(exchanges for _, exchanges in times)

    def _told_s(self, n_bytes: int) -> float:
        """Return how long it takes to tell every rank what the head has."""
        return 0.0 if self._link is None else self._link.send_s(n_bytes)

    def read(self, stages: Sequence[Stage], workload: Workload, hidden: int) -> tuple[float, int]:
        """Return the time to read all texts, and the tokens of the largest step."""
        together, rest = _texts(workload, self._setting)
        seconds = 0.0
        for n_texts, n_steps in together, rest:
            n_tokens = n_texts * workload.prompt
            step = StepShape(n_texts, workload.prompt, workload.prompt, n_tokens)
            if n_steps:
                told = self._told_s(n_tokens * hidden * FLOAT32_BYTES)
                seconds += n_steps * (self._step(stages, step, hidden)[0] + told)
        return seconds, together[0] * workload.prompt

    def remember(self, stages: Sequence[Stage], workload: Workload) -> float:
        """Return the time to make keys and values: every stage works on its own layers."""
        seconds = 0.0
        for n_texts, n_steps in _texts(workload, self._setting):
            step = StepShape(n_texts, workload.prompt, workload.prompt, 0)
            if n_steps:
                times = [stage.seconds(step, self._setting, self._alone)[0] for stage in stages]
                seconds += n_steps * max(times)
        return seconds

    def decode(
        self, stages: Sequence[Stage], step: StepShape, hidden: int
    ) -> tuple[float, float, float]:
        """Return the time of a token for every sequence, the bubble and the exchanges' share."""
        seconds, exchanges = self._step(stages, step, hidden)
        seconds += self._told_s(0)
        busy = sum(stage.seconds(step, self._setting, self._alone)[0] for stage in stages)
        bubble = 1.0 - busy / (len(stages) * seconds) if len(stages) > 1 else 0.0
        return seconds, max(0.0, bubble), exchanges / seconds


def _texts(workload: Workload, setting: RunConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many texts are in a step, and how many such steps; then the same of the rest."""
    together = min(workload.batch, max(1, setting.max_step_tokens // workload.prompt))
    n_steps, rest = divmod(workload.batch, together)
    return (together, n_steps), (rest, 1 if rest else 0)


def _prediction(
    parts: Sequence[tuple[list[Stage], int, Steps]],
    plan: Plan,
    machine: Machine,
    workload: Workload,
    setting: RunConfig,
    prefill_s: float,
    decode_s: float,
    bubble: float,
    exchange_share: float,
) -> Prediction:
    """Return the times and what each rank holds of all parts."""
    ranks = []
    for rank in plan.numbers:
        mine: list[tuple[RankWork, int, Steps]] = [
            (work, tokens, steps)
            for stages, tokens, steps in parts
            for stage in stages
            for work in stage.ranks
            if work.plan.rank == rank
        ]
        step = StepShape(workload.batch, 1, 1, workload.batch, workload.prompt)
        sent = mine[0][0].sent_bytes(step) / workload.batch if decode_s else 0.0
        ranks.append(predicted_rank(mine, machine.devices[rank], setting, sent))
    return Prediction(
        plan.partition, kind_of(parts[0][0]), workload, 1, prefill_s, decode_s, exchange_share,
        bubble, tuple(ranks),
    )  # fmt: skip

"""Predict speed and memory of encoders and of encoder-decoder models.

Attention is bidirectional, so texts stay whole and share steps up to the token limit.  Steps do not
overlap, and hidden states are broadcast to every rank (`nbflow.engine.evaluator`).  A decoder's
ranks compute keys and values of their layers and heads (`nbflow.engine.cross_attention`); then it
runs step by step, without micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nbflow.distributed import Plan, make_plan
from nbflow.planner.machine import Machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.prediction import Prediction, Workload, kind_of, rank_prediction
from nbflow.planner.stage_cost import RunConfig, Stage, make_stages
from nbflow.program.cost import FLOAT32_BYTES, StepShape


def predict_encoder(
    model: PlannedModel, plan: Plan, machine: Machine, workload: Workload, config: RunConfig
) -> Prediction:
    """Predict one replica of an encoder or encoder-decoder model.

    Parameters as in `nbflow.planner.predict`; `Workload.prompt` is the length of a text,
    `Workload.generate` the tokens that the decoder generates.
    """
    timer = _Timer(plan, machine, config)
    encoder = model.encoder
    if encoder is None:
        stages = make_stages(model, plan, machine)
        read_s, largest = timer.read(stages, workload, model.spec.hidden_size)
        parts = [(stages, largest, StepShape(1, largest, 1, largest))]
        return _prediction(parts, plan, machine, workload, config, read_s, 0.0, 0.0, 0.0)
    encoder_plan = make_plan(encoder.spec, plan.partition, plan.block_size, config.all_reduce)
    encoding = make_stages(encoder, encoder_plan, machine)
    cross_kv = make_stages(model, plan, machine, model.cross_kv_program)
    decoding = make_stages(model, plan, machine)
    read_s, largest = timer.read(encoding, workload, encoder.spec.hidden_size)
    cross_kv_s = timer.cross_kv(cross_kv, workload)
    batch, context = workload.batch, (workload.generate + 1) // 2
    step = StepShape(batch, 1, context, batch, workload.prompt)
    decode_s, bubble, share = timer.decode(decoding, step, model.spec.hidden_size)
    held = batch * workload.prompt  # encoder tokens with cached keys and values
    parts = [
        (decoding, batch * (workload.generate + 1), StepShape(1, batch, 1, batch)),
        (encoding, largest, StepShape(1, largest, 1, largest)),
        (cross_kv, held, StepShape(1, max(largest, workload.prompt), 1, 0)),
    ]
    read_s += cross_kv_s + decode_s  # the first token needs one step of the decoder
    return _prediction(parts, plan, machine, workload, config, read_s, decode_s, bubble, share)


class _Timer:
    """Timer of steps that run one after the other."""

    def __init__(self, plan: Plan, machine: Machine, config: RunConfig) -> None:
        self._machine, self._config = machine, config
        self._alone = len(plan.numbers) == 1
        self._link = None if self._alone else machine.link(plan.numbers)

    def _step(self, stages: Sequence[Stage], step: StepShape, hidden: int) -> tuple[float, float]:
        """Return the time of a step through all stages, and its tensor parallel communication."""
        times = [stage.seconds(step, self._config, self._alone) for stage in stages]
        total = sum(t for t, _ in times)
        for before, after in itertools.pairwise(stages):
            link = self._machine.link([before.ranks[-1].plan.rank, after.ranks[-1].plan.rank])
            total += link.send_s(step.n_tokens * hidden * FLOAT32_BYTES)
        return total, sum(communication for _, communication in times)

    def _broadcast_s(self, n_bytes: int) -> float:
        """Return the time of a broadcast from the last stage."""
        return 0.0 if self._link is None else self._link.send_s(n_bytes)

    def read(self, stages: Sequence[Stage], workload: Workload, hidden: int) -> tuple[float, int]:
        """Return the time to encode all texts, and the tokens of the largest step."""
        together, rest = _texts(workload, self._config)
        seconds = 0.0
        for n_texts, n_steps in together, rest:
            n_tokens = n_texts * workload.prompt
            step = StepShape(n_texts, workload.prompt, workload.prompt, n_tokens)
            if n_steps:
                broadcast = self._broadcast_s(n_tokens * hidden * FLOAT32_BYTES)
                seconds += n_steps * (self._step(stages, step, hidden)[0] + broadcast)
        return seconds, together[0] * workload.prompt

    def cross_kv(self, stages: Sequence[Stage], workload: Workload) -> float:
        """Return the time to compute keys and values: stages run in parallel on their layers."""
        seconds = 0.0
        for n_texts, n_steps in _texts(workload, self._config):
            step = StepShape(n_texts, workload.prompt, workload.prompt, 0)
            if n_steps:
                times = [stage.seconds(step, self._config, self._alone)[0] for stage in stages]
                seconds += n_steps * max(times)
        return seconds

    def decode(
        self, stages: Sequence[Stage], step: StepShape, hidden: int
    ) -> tuple[float, float, float]:
        """Return the time of a decode step, the bubble and the communication share."""
        seconds, communication = self._step(stages, step, hidden)
        seconds += self._broadcast_s(0)
        busy = sum(stage.seconds(step, self._config, self._alone)[0] for stage in stages)
        bubble = 1.0 - busy / (len(stages) * seconds) if len(stages) > 1 else 0.0
        return seconds, max(0.0, bubble), communication / seconds


def _texts(workload: Workload, config: RunConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (texts per step, number of steps) of full steps, then of the last one."""
    together = min(workload.batch, max(1, config.max_step_tokens // workload.prompt))
    n_steps, rest = divmod(workload.batch, together)
    return (together, n_steps), (rest, 1 if rest else 0)


def _prediction(
    parts: Sequence[tuple[list[Stage], int, StepShape]],
    plan: Plan,
    machine: Machine,
    workload: Workload,
    config: RunConfig,
    prefill_s: float,
    decode_s: float,
    bubble: float,
    all_reduce_share: float,
) -> Prediction:
    """Return the prediction with the memory of each rank over all programs."""
    ranks = []
    for rank in plan.numbers:
        mine = [
            (work, tokens, steps)
            for stages, tokens, steps in parts
            for stage in stages
            for work in stage.ranks
            if work.plan.rank == rank
        ]
        step = StepShape(workload.batch, 1, 1, workload.batch, workload.prompt)
        sent = mine[0][0].sent_bytes(step) / workload.batch if decode_s else 0.0
        ranks.append(rank_prediction(mine, machine.devices[rank], config, sent))
    return Prediction(
        plan.partition, kind_of(parts[0][0]), workload, 1, prefill_s, decode_s, all_reduce_share,
        bubble, tuple(ranks),
    )  # fmt: skip

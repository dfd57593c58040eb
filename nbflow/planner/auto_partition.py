"""The partition for the ranks that are there, when the user leaves it to the planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nbflow.distributed import Comm
from nbflow.planner.machine import Machine, load_machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.prediction import Workload
from nbflow.planner.search import AIMS, best, candidates, compare
from nbflow.planner.stage_cost import RunConfig
from nbflow_kernels.errors import UsageError, unknown_name

BATCH = {"latency": 1, "throughput": 32}
"""Sequences at once that each aim stands for."""
PROMPT, GENERATE = 512, 128
"""Tokens of a prompt and of an answer, where the context holds them."""
PROBE_BYTES = 32 << 20

Measure = Callable[[Comm, int, Sequence[str], Sequence[str]], Machine | None]
"""Measures ranks with so many bytes in these formats and arithmetics; only the first returns it."""


def choose_partition(
    model: PlannedModel,
    comm: Comm,
    aim: str = "latency",
    machine: str | Path | None = None,
    setting: RunConfig | None = None,
    measure: Measure | None = None,
) -> str:
    """Return the partition string that is predicted to be best; every rank must call it.

    For throughput replicas are among those that are looked at: each holds the whole model, and gets
    its share of the sequences.

    Parameters
    ----------
    model : PlannedModel
        The model.
    comm : Comm
        The ranks there are; with a single one, it holds the model.
    aim : {"latency", "throughput"}
        The time of a token of one sequence, or the tokens per second of 32.
    machine : str or Path, optional
        Description of the machine (`nbflow.planner.load_machine`).  Without one the ranks are
        measured, which takes some seconds; ``nbflow plan --measure -o FILE`` does it once.
    setting : Setting, optional
        Formats.
    measure : callable, optional
        Measures the ranks where no `machine` is given (`nbflow.planner.measure_machine`).

    Raises
    ------
    UsageError
        If nothing fits into the memory, the machine has fewer ranks, or there is neither `machine`
        nor `measure`.
    """
    if aim not in AIMS:
        raise unknown_name("aim to optimize for", aim, AIMS)
    if comm.size == 1:
        if machine is not None:
            load_machine(machine)  # a wrong name or file shows with one rank, too
        return "0"
    described = _machine(comm, machine, model, setting or RunConfig(), measure)
    chosen: str | UsageError = ""
    if comm.rank == 0:
        try:
            chosen = _chosen(model, described, aim, setting)
        except UsageError as error:
            chosen = error
    chosen = comm.bcast_object(chosen)
    if isinstance(chosen, UsageError):
        raise chosen
    return chosen


def _machine(
    comm: Comm,
    machine: str | Path | None,
    model: PlannedModel,
    setting: RunConfig,
    measure: Measure | None,
) -> Machine:
    """Return the machine, measured as far as the model needs it if it is not described."""
    if machine is not None:
        return load_machine(machine).with_ranks(comm.size)
    if measure is None:
        raise UsageError("partition 'auto' on several ranks needs a description: give machine=")
    arithmetics = [setting.activations or "f32"]
    measured = measure(comm, PROBE_BYTES, sorted(model.matrix_formats), arithmetics)
    result: Machine = comm.bcast_object(measured)
    return result


def _chosen(model: PlannedModel, machine: Machine, aim: str, setting: RunConfig | None) -> str:
    workload = _workload(model, BATCH[aim])
    texts = list(candidates(len(machine.devices), replicas=aim == "throughput"))
    predictions, _ = compare(model, machine, workload, setting, texts)
    return best(predictions, "latency" if aim == "latency" else "throughput").partition


def _workload(model: PlannedModel, batch: int) -> Workload:
    """Return what stands for the model's requests."""
    room, encoder = model.spec.max_context, model.spec.encoder
    if not model.spec.causal:
        return Workload(batch, min(PROMPT, room))
    if encoder is not None:
        return Workload(batch, min(PROMPT, encoder.max_context), min(GENERATE, room - 1))
    prompt = min(PROMPT, max(1, room // 2))
    return Workload(batch, prompt, max(1, min(GENERATE, room - prompt)))

"""Choice of the partition for the ranks of a communicator (``partition="auto"``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nbflow.distributed import Comm
from nbflow.planner.machine import Machine, load_machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.prediction import fitting_workload
from nbflow.planner.search import OBJECTIVES, best, candidates, compare
from nbflow.planner.stage_cost import RunConfig
from nbflow_kernels.errors import UsageError, unknown_name

BATCH = {"latency": 1, "throughput": 32}
"""Batch size that represents each objective."""
PROBE_BYTES = 64 << 20
"""Bytes that a measurement of memory bandwidth reads."""

Measure = Callable[[Comm, int, Sequence[str], Sequence[str]], Machine | None]
"""(comm, probe bytes, weight formats, arithmetics) -> machine on rank 0, None elsewhere."""


def choose_partition(
    model: PlannedModel,
    comm: Comm,
    aim: str = "latency",
    machine: str | Path | None = None,
    config: RunConfig | None = None,
    measure: Measure | None = None,
) -> str:
    """Return the partition with the best prediction; every rank must call it.

    For throughput, candidates include replicas, which share the sequences.

    Parameters
    ----------
    model : PlannedModel
        The model.
    comm : Comm
        All ranks.
    aim : {"latency", "throughput"}
        Time per token of one sequence, or tokens per second of 32.
    machine : str or Path, optional
        Description of the machine (`nbflow.planner.load_machine`).  By default the ranks
        are measured, which takes some seconds; ``nbflow plan --measure -o FILE`` does it once.
    config : RunConfig, optional
        Formats.
    measure : callable, optional
        Measures the ranks where no `machine` is given (`nbflow.planner.measure_machine`).

    Raises
    ------
    UsageError
        If no partition fits, the machine has fewer ranks, or `machine` and `measure` are missing.
    """
    if aim not in OBJECTIVES:
        raise unknown_name("objective", aim, OBJECTIVES)
    if comm.size == 1:
        if machine is not None:
            load_machine(machine)  # refuse a wrong name or file with one rank, too
        return "0"
    described = _machine(comm, machine, model, config or RunConfig(), measure)
    chosen: str | UsageError = ""
    if comm.rank == 0:
        try:
            chosen = _chosen(model, described, aim, config)
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
    config: RunConfig,
    measure: Measure | None,
) -> Machine:
    """Load the machine, or measure what the model needs of it."""
    if machine is not None:
        return load_machine(machine).with_ranks(comm.size)
    if measure is None:
        raise UsageError("partition 'auto' on several ranks needs a description: give machine=")
    arithmetics = [config.activations or "f32"]
    measured = measure(comm, PROBE_BYTES, sorted(model.matrix_formats), arithmetics)
    result: Machine = comm.bcast_object(measured)
    return result


def _chosen(model: PlannedModel, machine: Machine, aim: str, config: RunConfig | None) -> str:
    workload = fitting_workload(model.spec, BATCH[aim])
    texts = list(candidates(len(machine.devices), replicas=aim == "throughput"))
    predictions, _ = compare(model, machine, workload, config, texts)
    return best(predictions, "latency" if aim == "latency" else "throughput").partition

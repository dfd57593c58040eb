"""Search for the best partition: predict all candidates, take the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from nbflow.distributed import make_plan, split_replicas
from nbflow.distributed.partition_notation import RankShare, format_stages, parse_replicas
from nbflow.options import Objective
from nbflow.planner.machine import Machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.predict import predict
from nbflow.planner.prediction import Prediction, Workload
from nbflow.planner.stage_cost import RunConfig
from nbflow_kernels.errors import UsageError

OBJECTIVES: tuple[str, ...] = get_args(Objective)


def candidates(n_ranks: int, replicas: bool = True) -> Iterator[str]:
    """Yield partition strings of up to `n_ranks` ranks: replicas x stages x ranks of a stage.

    The ranks of a stage are consecutive, so that they share a host where possible.  Every product
    of divisors that divides the number of ranks is a candidate.

    Examples
    --------
    >>> list(candidates(2))
    ['0', '0&1', '0;1', '0/1']
    """
    divisors = [d for d in range(1, n_ranks + 1) if n_ranks % d == 0]
    for copies in divisors if replicas else [1]:
        for n_stages in divisors:
            for width in divisors:
                if n_ranks % (copies * n_stages * width) == 0:
                    yield _written(copies, n_stages, width)


def _written(copies: int, n_stages: int, width: int) -> str:
    numbers = iter(range(copies * n_stages * width))
    return "/".join(
        ";".join("&".join(str(next(numbers)) for _ in range(width)) for _ in range(n_stages))
        for _ in range(copies)
    )


def compare(
    model: PlannedModel,
    machine: Machine,
    workload: Workload | None = None,
    config: RunConfig | None = None,
    partitions: Sequence[str] | None = None,
) -> tuple[list[Prediction], dict[str, str]]:
    """Predict partitions of a machine.

    Parameters
    ----------
    model, machine, workload, config
        As in `predict`.
    partitions : sequence of str, optional
        Partitions to predict; all `candidates` of the machine's ranks by default.

    Returns
    -------
    predictions : list of Prediction
        Valid partitions, including those that do not fit into memory.
    refused : dict
        Invalid partition -> reason.
    """
    predictions, refused = [], {}
    for partition in partitions or candidates(len(machine.devices)):
        try:
            for part in split_replicas(partition):
                for spec in model.spec.parts:
                    make_plan(spec, part, model.block_size)
        except UsageError as error:
            refused[partition] = str(error)
        else:
            predictions.append(predict(model, partition, machine, workload, config))
    return predictions, refused


def best(predictions: Sequence[Prediction], aim: Objective) -> Prediction:
    """Return the best partition for an objective among those that fit.

    Parameters
    ----------
    predictions : sequence of Prediction
        Predictions of `compare`, of one workload.
    aim : {"latency", "throughput"}
        Minimize the time of a decode step, or of whole requests with their prompts; for an encoder,
        both are the time of its texts.  Ties go to fewer ranks.

    Raises
    ------
    UsageError
        If none fits.
    """
    fitting = [p for p in predictions if p.fits]
    if not fitting:
        least = max(predictions, key=lambda p: min(r.free_bytes for r in p.ranks), default=None)
        shortage = "" if least is None else (
            f"; closest is {least.partition!r}, where a rank lacks "
            f"{-min(r.free_bytes for r in least.ranks) / 1e9:.1f} GB"
        )  # fmt: skip
        raise UsageError(
            f"no partition of this machine fits into its memory{shortage}; use a smaller weight "
            "format, cache format or context, or keep part of the cache on the host"
        )

    def cost(prediction: Prediction) -> tuple[float, int]:
        latency = prediction.decode_s or prediction.prefill_s
        seconds = latency if aim == "latency" else prediction.request_s
        return seconds, len(prediction.ranks)

    return min(fitting, key=cost)


def with_shares(partition: str, machine: Machine, by: Literal["speed", "memory"]) -> str:
    """Return a partition with shares proportional to the devices' speed or memory.

    Parameters
    ----------
    partition : str
        Partition string; its shares are replaced.
    machine : Machine
        The machine.
    by : {"speed", "memory"}
        Memory bandwidth, or memory size.

    Examples
    --------
    >>> from nbflow.planner import Device, Machine, with_shares
    >>> devices = tuple(Device("gpu", n * 1e9, n * 1e11, {"f16": 1e13}) for n in (24, 8))
    >>> with_shares("0;1", Machine("two", devices, 2), "memory")
    '0:3;1'
    """

    def share(rank: int) -> float:
        device = machine.devices[rank]
        return device.memory_bytes if by == "memory" else device.read_bytes_per_s

    replicas = []
    for stages in parse_replicas(partition):
        least = min(share(m.rank) for stage in stages for m in stage)
        replicas.append(
            format_stages(
                tuple(
                    tuple(RankShare(m.rank, round(share(m.rank) / least, 2)) for m in stage)
                    for stage in stages
                )
            )
        )
    return "/".join(replicas)

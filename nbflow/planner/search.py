"""Which partition is best: every sensible one is predicted, and the fastest that fits is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from nbflow.distributed import make_plan, split_replicas
from nbflow.distributed.partition_notation import Member, parse_replicas, written
from nbflow.options import Objective
from nbflow.planner.machine import Machine
from nbflow.planner.planned_model import PlannedModel
from nbflow.planner.predict import predict
from nbflow.planner.prediction import Prediction, Workload
from nbflow.planner.stage_cost import RunConfig
from nbflow_kernels.errors import UsageError

Aim = Objective
AIMS: tuple[str, ...] = get_args(Objective)


def candidates(n_ranks: int, replicas: bool = True) -> Iterator[str]:
    """Yield partition strings of up to `n_ranks` ranks: replicas x stages x ranks of a stage.

    The ranks of a stage follow each other, so that they lie on one host where they can; all
    products that divide the number of ranks are there.

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
    setting: RunConfig | None = None,
    partitions: Sequence[str] | None = None,
) -> tuple[list[Prediction], dict[str, str]]:
    """Predict partitions of a machine.

    Parameters
    ----------
    model, machine, workload, setting
        As in `predict`.
    partitions : sequence of str, optional
        Those to look at; by default all `candidates` of the machine's ranks.

    Returns
    -------
    predictions : list of Prediction
        Those that can be made, whether they fit into the memory or not.
    refused : dict
        Partition to the reason why it cannot be made.
    """
    predictions, refused = [], {}
    for partition in partitions or candidates(len(machine.devices)):
        try:
            for part in split_replicas(partition):
                for spec in filter(None, (model.spec, model.spec.encoder)):
                    make_plan(spec, part, model.block_size)
        except UsageError as error:
            refused[partition] = str(error)
        else:
            predictions.append(predict(model, partition, machine, workload, setting))
    return predictions, refused


def best(predictions: Sequence[Prediction], aim: Aim) -> Prediction:
    """Return the partition that serves an aim best, among those that fit.

    Parameters
    ----------
    predictions : sequence of Prediction
        As from `compare`, all of one workload.
    aim : {"latency", "throughput"}
        The time in which every sequence gets a token, or the tokens of requests per second with
        their prompts; for a model that only reads both are the time of its texts.  Of equals the
        one with fewer ranks is taken.

    Raises
    ------
    UsageError
        If none fits.
    """
    fitting = [p for p in predictions if p.fits]
    if not fitting:
        least = max(predictions, key=lambda p: min(r.free_bytes for r in p.ranks), default=None)
        short = "" if least is None else (
            f"; closest is {least.partition!r}, where a rank lacks "
            f"{-min(r.free_bytes for r in least.ranks) / 1e9:.1f} GB"
        )  # fmt: skip
        raise UsageError(
            f"no partition of this machine fits into its memory{short}; use a smaller weight "
            "format, cache format or context, or keep a part of the cache on the host"
        )

    def cost(prediction: Prediction) -> tuple[float, int]:
        latency = prediction.decode_s or prediction.prefill_s
        seconds = latency if aim == "latency" else prediction.request_s
        return seconds, len(prediction.ranks)

    return min(fitting, key=cost)


def with_shares(partition: str, machine: Machine, by: Literal["speed", "memory"]) -> str:
    """Return a partition with shares that suit the machine's devices.

    Parameters
    ----------
    partition : str
        Partition string; shares in it are replaced.
    machine : Machine
        The machine.
    by : {"speed", "memory"}
        Rate of reading memory, or its size.

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
            written(
                tuple(
                    tuple(Member(m.rank, round(share(m.rank) / least, 2)) for m in stage)
                    for stage in stages
                )
            )
        )
    return "/".join(replicas)

"""Describe this machine by measuring it: its ranks are those that mpirun started, or threads.

All ranks work at the same time, as they do when they run a model, so that what they share (memory,
caches, cores) is in the numbers.  What is timed several times (the median of what memory decides,
as it is shared with others; the fastest of everything else):

- reading memory, all ranks at once and each alone (`nbflow_kernels.benchmarks.roofline`);
- products in formats of each kind: with one row, each rank alone, how fast weights come from the
  memory and are decoded; with 8 rows and with 256, all at once, how fast they are multiplied;
- steps of the bundled model on each rank, in bursts and one by one: the difference is the host code
  of a step, what is left of the first besides the products is the start of its ops;
- an all-reduce of 16 KB and of 4 MB over all ranks: latency and rate of the exchange.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.distributed import Comm, SelfComm, world
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow.planner.machine import FEW_ROWS, Device, Link, Machine, Rates
from nbflow.utils import system
from nbflow_kernels.benchmarks.roofline import ReadProbe
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.cpu.thread_pool import available_cores
from nbflow_kernels.errors import UsageError

ARITHMETICS = ("f32", "bf16", "int8")
FORMATS = ("f16", "q8_0", "q4_0", "q4_b32t1a", "q3h_b64t1", "q6_k", "q4_k")
"""Measured formats, the most used of each kind; `nbflow.planner.machine.like` maps the others."""
BASE = "q8_0"
"""Fallback for formats without a measured format of their kind."""
PROBE_BYTES = 128 << 20
"""Bytes that each rank reads in a pass."""
SHAPE = (1024, 4096)
"""Rows and columns of the weight matrix.  It fits into the cache; the column count is typical of
models, since a narrow matrix would fit into the L1 cache together with the activations."""
STREAMED_BYTES = 64 << 20
"""Size of the matrix with as many columns for batches of one and few rows, streamed from DRAM."""
MANY_ROWS = 256
SMALL_BYTES, LARGE_BYTES = 16 << 10, 4 << 20
MINIMUM_S = 1e-7
"""Lower bound of measured times; 0 would mean unknown."""
STEPS = 48
"""Steps of the bundled model that are timed."""


Load = Callable[..., Any]
"""`nbflow.load`: the caller gives it, as the planner lies below the engine."""


def measure_machine(
    load: Load,
    n_ranks: int | None = None,
    probe_bytes: int = PROBE_BYTES,
    formats: Sequence[str] = FORMATS,
) -> Machine | None:
    """Measure the ranks that mpirun started, or `n_ranks` threads of this process.

    Parameters
    ----------
    load : callable
        `nbflow.load`, for the bundled model.
    n_ranks : int, optional
        Without mpirun: the number of ranks, by default 1.  Under mpirun it must be left out.
    probe_bytes : int
        Bytes that each rank reads in a pass; several times the caches.
    formats : sequence of str
        Weight formats whose products are timed.

    Returns
    -------
    Machine or None
        The machine, on rank 0; None on the others.

    Raises
    ------
    UsageError
        If the number of ranks contradicts mpirun.
    """
    comm = world()
    if comm.size > 1:
        if n_ranks is not None and n_ranks != comm.size:
            raise UsageError(
                f"mpirun started {comm.size} ranks, and all of them are measured; leave --ranks "
                f"{n_ranks} out or start as many"
            )
        return measure_ranks(load, comm, probe_bytes, formats)
    n = 1 if n_ranks is None else n_ranks
    if n == 1:
        return _machine([_measure_rank(load, comm, probe_bytes, formats)], "process")
    team = ThreadRanks(n)
    try:
        measured = team.run(lambda mine: _measure_rank(load, mine, probe_bytes, formats))
        return _machine(measured, "threads")
    finally:
        team.close()


def measure_ranks(
    load: Load,
    comm: Comm,
    probe_bytes: int = PROBE_BYTES,
    formats: Sequence[str] = FORMATS,
    arithmetics: Sequence[str] = ARITHMETICS,
) -> Machine | None:
    """Measure the ranks of a communicator; the first one returns the machine, others None.

    Products are timed in these formats and arithmetics.
    """
    found = comm.gather_object(_measure_rank(load, comm, probe_bytes, formats, arithmetics))
    return None if found is None else _machine(found, "ranks")


def _machine(ranks: list[tuple[Device, Link | None, str]], what: str) -> Machine:
    """Put what the ranks have measured together."""
    hosts = [host for _, _, host in ranks]
    n, per_host = len(ranks), hosts.count(hosts[0])
    links = [link for _, link, _ in ranks if link is not None]
    if links:  # an exchange has ended when the last rank has it
        slowest = Link(max(x.latency_s for x in links), min(x.bytes_per_s for x in links), "gather")
    devices = tuple(device for device, _, _ in ranks)
    return Machine(
        name=f"{hosts[0]}-{n}",
        devices=devices,
        ranks_per_host=per_host,
        links={"host" if per_host == n else "network": slowest} if links else {},
        description=f"{n} {what} of {devices[0].name}, {per_host} on each host",
        sources=("measured by nbflow plan --measure (nbflow/planner/measure_machine.py)",),
    )


def _measure_rank(
    load: Load,
    comm: Comm,
    probe_bytes: int,
    formats: Sequence[str],
    arithmetics: Sequence[str] = ARITHMETICS,
) -> tuple[Device, Link | None, str]:
    hosts = comm.bcast_object(comm.gather_object(platform.node()))
    here = hosts.count(platform.node())
    threads = max(1, available_cores() // here)
    set_num_threads(threads)
    probe = ReadProbe(probe_bytes, threads)
    together = _at_once(comm, probe.seconds, statistics.median)
    alone = _in_turn(comm, probe.seconds)
    operations, weights, products = {}, {}, {}
    for arithmetic in dict.fromkeys(("f32", *arithmetics)):  # the first one stands for unstated
        one, _, many = products[BASE, arithmetic] = _products(comm, BASE, arithmetic)
        row_s = max(many - one, 0.1 * many) / (MANY_ROWS - 1)
        operations[arithmetic] = 2.0 / row_s
        weights[arithmetic] = 1.0 / max(one - row_s, 0.1 * one)
    rates: dict[str, dict[str, Rates]] = {}
    for format in dict.fromkeys(formats):
        for arithmetic in operations:
            if arithmetic == "int8" and nk.FORMATS[format].block_size == 1:
                continue  # it would be float32
            if (format, arithmetic) not in products:
                products[format, arithmetic] = _products(comm, format, arithmetic)
            rates.setdefault(format, {})[arithmetic] = _rates(*products[format, arithmetic])
    step_s, op_s = _step_seconds(load, comm, threads)
    memory = system.memory_bytes() or 0
    device = Device(
        name=f"{system.processor_name()}, {threads} threads",
        memory_bytes=memory / here,
        read_bytes_per_s=probe.n_bytes / together,
        operations_per_s=operations,
        weights_per_s=weights,
        formats=rates,
        read_alone_bytes_per_s=probe.n_bytes / alone,
        op_s=op_s,
        step_s=step_s,
        burst_step_s=MINIMUM_S,
    )
    return device, _link(comm) if comm.size > 1 else None, platform.node()


def _products(comm: Comm, format: str, arithmetic: str) -> tuple[float, float, float]:
    """Return the time that one weight takes in a product with one row, few and many.

    With one, each rank works alone; else all do at the same time.
    """
    matrix = _matrix(format)
    streamed = _matrix(format, -(-STREAMED_BYTES // matrix.nbytes))
    one = _in_turn(comm, _product(streamed, 1, arithmetic))
    few = _at_once(comm, _product(streamed, FEW_ROWS, arithmetic), statistics.median)
    return one, few, _at_once(comm, _product(matrix, MANY_ROWS, arithmetic))


def _matrix(format: str, copies: int = 1) -> nk.QuantTensor:
    """Return a matrix of random weights, so often one below the other."""
    rng = np.random.default_rng(0)
    data = nk.quantize(
        rng.standard_normal(SHAPE, np.float32), format, quantizer="reference"
    ).tobytes()
    return nk.QuantTensor.from_bytes(data * copies, format, (copies * SHAPE[0], SHAPE[1]))


def _product(matrix: nk.QuantTensor, rows: int, arithmetic: str) -> Callable[[], float]:
    """Return what times a product, divided by the weights; compiled."""
    n_outputs, n_columns = matrix.shape
    x = np.ones((rows, n_columns), np.float32)
    out = np.empty((rows, n_outputs), np.float32)

    def weight_s() -> float:
        started = time.perf_counter()
        nk.qmatmul(x, matrix, activations=arithmetic, out=out)
        return (time.perf_counter() - started) / (n_outputs * n_columns)

    weight_s()
    return weight_s


def _rates(one: float, few: float, many: float) -> Rates:
    """Return what the times of a weight in three products say; never that it takes no time."""
    row_s = max(few - one, 0.05 * few) / (FEW_ROWS - 1)
    more_s = max(many - few, 0.1 * many) / (MANY_ROWS - FEW_ROWS)
    return Rates(1.0 / max(one - row_s, 0.1 * one), 2.0 / row_s, 2.0 / more_s)


Pick = Callable[[list[float]], float]
"""Takes one of several times."""


def _at_once(comm: Comm, measure: Callable[[], float], pick: Pick = min) -> float:
    """Return what every rank measures while all of them do."""
    comm.barrier()
    return pick([measure() for _ in range(9)])


def _in_turn(comm: Comm, measure: Callable[[], float]) -> float:
    """Return the median of what each rank measures while the others wait."""
    result = 0.0
    for rank in range(comm.size):
        comm.barrier()
        if comm.rank == rank:
            result = statistics.median(measure() for _ in range(5))
    comm.barrier()
    return result


def _step_seconds(load: Load, comm: Comm, threads: int) -> tuple[float, float]:
    """Return the host code of a step that is not part of a burst, and the start of an op."""
    weight_s = _at_once(
        comm, _product(_matrix("f16"), 1, "f32")
    )  # as the model's, the cache holds it
    with load("tiny_python", comm=SelfComm(), threads=threads) as model:
        seconds = []
        for burst_s in (0.0, 1.0):
            _run(model, burst_s)  # compiles
            comm.barrier()
            taken = min(_run(model, burst_s) for _ in range(5))
            seconds.append(taken / STEPS)
        one_by_one, in_bursts = seconds
        work_s = model.spec.n_parameters * weight_s
        n_ops = len(model.workers[0].program.ops)
    return max(one_by_one - in_bursts, MINIMUM_S), max(in_bursts - work_s, MINIMUM_S) / n_ops


def _run(model: Any, burst_s: float) -> float:
    """Return the seconds that `STEPS` tokens of one sequence take."""
    request = model.make_request([0] * 8, STEPS, "greedy", 0, ignore_eos=True)
    request.wants_logprobs = False
    started = time.perf_counter()
    for _ in model.run_requests([request], burst_s=burst_s):
        pass
    return time.perf_counter() - started


def _link(comm: Comm) -> Link:
    """Return latency and rate of an all-reduce over all ranks."""

    def measure(n_bytes: int) -> float:
        array = np.zeros(n_bytes // 4, np.float32)
        comm.Allreduce(array)
        seconds = []
        for _ in range(5):
            comm.barrier()
            started = time.perf_counter()
            for _ in range(8):
                comm.Allreduce(array)
            seconds.append((time.perf_counter() - started) / 8)
        return statistics.median(seconds)

    small, large = measure(SMALL_BYTES), measure(LARGE_BYTES)
    others = comm.size - 1
    rate = others * (LARGE_BYTES - SMALL_BYTES) / max(large - small, 1e-9)
    return Link(max(small - others * SMALL_BYTES / rate, 1e-7), rate, "gather")

"""Describe this machine by measuring it: its ranks are those that mpirun started, or threads.

All ranks work at the same time, as they do when they run a model, so that what they share (memory,
caches, cores) is in the numbers.  Timed several times:

- reading memory, all ranks at once and each alone (`nbflow_kernels.benchmarks.roofline`);
- products in formats of each kind with 1 to 256 rows, from the caches, from memory while all ranks
  read, and alone, and products of several matrices over and over, which tell what the caches keep
  (`nbflow.planner.measure_kernels`);
- attention over cache formats, the quantization of activations, a gate;
- the host code of steps of the bundled model with 1 and 8 sequences: what is left of a step without
  its kernels, on each rank alone (threads of one process share Python's lock), from the caches and
  after other reads;
- an all-reduce of 16 KB after some work, and one of 4 MB, over all ranks: latency and rate.

Of ranks with equal devices the means count, since what differs is chance; of several rounds the
medians, so that one that other programs have disturbed does not.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.distributed import Comm, SelfComm, world
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow.planner.machine import MAX_RANKS, Device, Link, Machine
from nbflow.planner.measure_kernels import (
    MANY_ROWS,
    SHAPE,
    OpTimes,
    Ranks,
    cache_curve,
    lower_quartile,
    matrix,
    op_times,
    product_rates,
    product_timer,
)
from nbflow.planner.rates import Rates
from nbflow.utils import system
from nbflow_kernels.benchmarks.roofline import ReadProbe
from nbflow_kernels.cpu.cpu_quota import available_cores
from nbflow_kernels.cpu.graph import CpuGraph
from nbflow_kernels.cpu.parallel_for import capture, get_num_threads, run_graph, set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantized_matmul import cpu as quantized
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

ARITHMETICS = ("f32", "bf16", "int8")
FORMATS = ("f16", "q8_0", "q4_0", "q4_b32t1a", "q3h_b64t1", "q6_k", "q4_k")
"""Measured formats, the most used of each kind; `nbflow.planner.machine.like` maps the others."""
BASE = "q8_0"
"""Fallback for formats without a measured format of their kind."""
PROBE_BYTES = 128 << 20
"""Bytes that each rank reads in a pass."""
SMALL_BYTES, LARGE_BYTES = 16 << 10, 4 << 20
MINIMUM_S = 1e-7
"""Lower bound of measured times; 0 would mean unknown."""
STEPS = 48
"""Steps of the bundled model that are timed."""
BATCH = 8
"""Sequences of the steps that tell the host code of a sequence."""
EXCHANGES = 8
"""All-reduces of a repetition."""
ROUNDS = 3
"""Rounds of a measurement that is kept in a file."""
VERSION = 6
"""Version of the measurement, which goes up whenever its numbers mean something else."""

Load = Callable[..., Any]
"""`nbflow.load`: the caller gives it, as the planner lies below the engine."""


def measure_machine(
    load: Load,
    n_ranks: int | None = None,
    probe_bytes: int = PROBE_BYTES,
    formats: Sequence[str] = FORMATS,
    arithmetics: Sequence[str] = ARITHMETICS,
    rounds: int = 1,
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
    arithmetics : sequence of str
        Arithmetics of the products, of "f32", "bf16" and "int8".
    rounds : int
        Rounds, of whose numbers the medians count.

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
        return measure_ranks(load, comm, probe_bytes, formats, arithmetics, rounds)
    what = probe_bytes, formats, arithmetics, rounds
    n = 1 if n_ranks is None else n_ranks
    if not 1 <= n <= MAX_RANKS:
        raise UsageError(f"the number of ranks must be 1..{MAX_RANKS}, got {n}")
    if n == 1:
        return _machine([_measure_rank(load, comm, *what)], "process")
    team = ThreadRanks(n)
    try:
        measured = team.run(lambda mine: _measure_rank(load, mine, *what))
        return dataclasses.replace(_machine(measured, "threads"), join_s=_join_seconds(team))
    finally:
        team.close()


def measure_ranks(
    load: Load,
    comm: Comm,
    probe_bytes: int = PROBE_BYTES,
    formats: Sequence[str] = FORMATS,
    arithmetics: Sequence[str] = ARITHMETICS,
    rounds: int = 1,
) -> Machine | None:
    """Measure the ranks of a communicator; the first one returns the machine, others None.

    Products are timed in these formats and arithmetics; medians of the rounds count.
    """
    found = comm.gather_object(_measure_rank(load, comm, probe_bytes, formats, arithmetics, rounds))
    return None if found is None else _machine(found, "ranks")


def median_machine(machines: Sequence[Machine]) -> Machine:
    """Return the medians of several measurements of a machine."""
    found: Machine = _merged(machines, statistics.median)
    return found


RankFacts = tuple[Device, Link | None, str]
"""Device and host of a rank, and its link to the others."""


def _measure_rank(
    load: Load,
    comm: Comm,
    probe_bytes: int,
    formats: Sequence[str],
    arithmetics: Sequence[str],
    rounds: int,
) -> RankFacts:
    """Return the medians of rounds of measurements on this rank."""
    found = [_one_round(load, comm, probe_bytes, formats, arithmetics) for _ in range(rounds)]
    merged: RankFacts = _merged(found, statistics.median)
    return merged


def _machine(ranks: list[RankFacts], what: str) -> Machine:
    """Put what the ranks have measured together."""
    hosts = [host for _, _, host in ranks]
    n, per_host = len(ranks), hosts.count(hosts[0])
    links = [link for _, link, _ in ranks if link is not None]
    if links:  # an exchange has ended when the last rank has it
        slowest = Link(
            max(x.latency_s for x in links),
            min(x.bytes_per_s for x in links),
            "gather",
            max(x.captured_latency_s for x in links),
        )
    devices = with_means([device for device, _, _ in ranks])
    return Machine(
        name=f"{hosts[0]}-{n}",
        devices=devices,
        ranks_per_host=per_host,
        links={"host" if per_host == n else "network": slowest} if links else {},
        description=f"{n} {what} of {devices[0].name}, {per_host} on each host",
        sources=("measured by nbflow plan --measure (nbflow/planner/measure_machine.py)",),
        measurement=VERSION,
    )


ALIKE = 1.2
"""Largest ratio of the memory bandwidths of equal devices."""


def with_means(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return devices of which equal ones, by name and about by bandwidth, have equal numbers."""

    def are_alike(a: Device, b: Device) -> bool:
        rates = sorted((a.read_bytes_per_s, b.read_bytes_per_s))
        return a.name == b.name and rates[1] <= ALIKE * rates[0]

    return tuple(
        _merged([other for other in devices if are_alike(device, other)], statistics.fmean)
        for device in devices
    )


def _merged(values: Sequence[Any], merge: Callable[[Sequence[float]], float]) -> Any:
    """Return equally built values as one, with each float merged, e.g. to a mean."""
    first = values[0]
    if isinstance(first, float):
        return merge(values)
    if isinstance(first, tuple):
        return tuple(_merged(each, merge) for each in zip(*values, strict=True))
    if isinstance(first, Mapping):
        return {key: _merged([value[key] for value in values], merge) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        fields = {n: _merged([getattr(value, n) for value in values], merge) for n in names}
        return dataclasses.replace(first, **fields)
    return first


def _one_round(
    load: Load,
    comm: Comm,
    probe_bytes: int,
    formats: Sequence[str],
    arithmetics: Sequence[str],
) -> RankFacts:
    hosts = comm.bcast_object(comm.gather_object(platform.node()))
    here = hosts.count(platform.node())
    threads = max(1, available_cores() // here)
    set_num_threads(threads)
    ranks = Ranks(comm)
    probe = ReadProbe(probe_bytes, threads)
    together = ranks.at_once(probe.seconds)
    alone = ranks.in_turn(probe.seconds)
    curve, cached_rate = cache_curve(ranks, BASE, probe_bytes)
    rates: dict[str, dict[str, Rates]] = {}
    known = tuple(dict.fromkeys(("f32", *arithmetics)))  # the first one stands for unstated
    for format in dict.fromkeys((BASE, *formats)):
        # floats have no int8 products: theirs are float32
        is_float = nk.FORMATS[format].block_size == 1
        for arithmetic in known if format == BASE or is_float else arithmetics:
            if is_float and arithmetic == "int8":
                continue
            rates.setdefault(format, {})[arithmetic] = product_rates(ranks, format, arithmetic)
    operations, weights = {}, {}
    for arithmetic, base in rates[BASE].items():  # of formats unlike all measured ones
        row_s = base.cached_s[-1] / MANY_ROWS[-1]
        operations[arithmetic] = 2.0 / row_s
        weights[arithmetic] = 1.0 / max(base.cached_s[0] - row_s, 0.1 * base.cached_s[0])
    ops: OpTimes = op_times(ranks)
    step_s, cold_step_s, sequence_s = _host_seconds(load, ranks, threads, probe)
    memory = system.memory_bytes() or 0
    device = Device(
        name=f"{system.processor_name()}, {threads} threads",
        memory_bytes=memory / here,
        read_bytes_per_s=probe.n_bytes / together,
        operations_per_s=operations,
        weights_per_s=weights,
        formats={format: rates[format] for format in dict.fromkeys(formats)},
        read_alone_bytes_per_s=probe.n_bytes / alone,
        cached=curve,
        cached_bytes_per_s=cached_rate,
        **vars(ops),
        step_s=step_s,
        cold_step_s=cold_step_s,
        sequence_s=sequence_s,
        burst_step_s=MINIMUM_S,
    )
    return device, _link(comm) if comm.size > 1 else None, platform.node()


class _HostTimer:
    """Timer of the host code of decode steps: what is left of a step without its kernels."""

    def __init__(self, model: Any, probe: ReadProbe) -> None:
        worker = model.workers[0]
        worker.multi_step.can_run = lambda scheduled: False  # several ranks have no bursts
        self._model, self._probe, self._evicts = model, probe, False
        self._run, self._kernels_s = worker.executor.run, list[float]()
        worker.executor.run = self._timed_run

    def _timed_run(self, step: Any) -> None:
        started = time.perf_counter()
        self._run(step)
        if self._evicts:
            self._probe.seconds()
        self._kernels_s.append(time.perf_counter() - started)

    def seconds(self, batch: int, evicts: bool) -> float:
        """Return the seconds of a step; `evicts`: other bytes have taken its place in the caches.

        A model that is larger than the caches does this in every step.
        """
        self._evicts = evicts
        self._kernels_s.clear()
        total = _run(self._model, batch)
        return max((total - sum(self._kernels_s)) / len(self._kernels_s), MINIMUM_S)


def _host_seconds(
    load: Load, ranks: Ranks, threads: int, probe: ReadProbe
) -> tuple[float, float, float]:
    """Return the host code of a step from the caches, from memory, and of a further sequence."""
    found = []
    with load("tiny_python", comm=SelfComm(), threads=threads) as model:
        timer = _HostTimer(model, probe)
        for batch, evicts in ((1, False), (1, True), (BATCH, False)):
            _run(model, batch)  # compiles
            found.append(ranks.in_turn(functools.partial(timer.seconds, batch, evicts)))
    one, cold, several = found
    return one, max(one, cold), max(several - one, 0.0) / (BATCH - 1)


def _run(model: Any, batch: int) -> float:
    """Return the seconds that `STEPS` tokens of some sequences take."""
    requests = [
        model.make_request([0] * 8, STEPS, "greedy", 0, ignore_eos=True) for _ in range(batch)
    ]
    for request in requests:
        request.wants_logprobs = False
    started = time.perf_counter()
    for _ in model.run_requests(requests, burst_s=1.0):
        pass
    return time.perf_counter() - started


def _join_seconds(team: ThreadRanks) -> float:
    """Return the time to begin and end a step on rank threads, in addition to its work."""
    timers = team.run(lambda comm: product_timer(matrix(BASE), 1, "f32", sample_s=0.0))

    def run(comm: Comm) -> float:
        started = time.perf_counter()
        timers[comm.rank]()
        return time.perf_counter() - started

    seconds = []
    for _ in range(32):
        started = time.perf_counter()
        worked = max(team.run(run))
        seconds.append(time.perf_counter() - started - worked)
    return max(lower_quartile(seconds), MINIMUM_S)


def _link(comm: Comm) -> Link:
    """Return latency and rate of an all-reduce over all ranks, and the latency of messages.

    Ranks reach an exchange of a step after some work, in which others fall asleep or hold Python's
    lock: the latency is that of an exchange after a product, without the product.  All-reduces and
    all-gathers of threads are calls of the step's graph; messages are not.
    """
    others = comm.size - 1
    after_work = _python_exchange_s(comm, SMALL_BYTES, works=True)
    small, large = _all_reduce_s(comm, SMALL_BYTES), _all_reduce_s(comm, LARGE_BYTES)
    first, last = small, large
    if small is None or large is None:
        first, last = after_work, _python_exchange_s(comm, LARGE_BYTES, works=False)
    assert first is not None
    assert last is not None
    rate = others * (LARGE_BYTES - SMALL_BYTES) / max(last - first, 1e-9)
    sending = others * SMALL_BYTES / rate
    captured = 0.0 if small is None else max(small - sending, MINIMUM_S)
    return Link(max(after_work - sending, MINIMUM_S), rate, "gather", captured)


def _python_exchange_s(comm: Comm, n_bytes: int, works: bool) -> float:
    """Return the time of an all-reduce in Python, after some work or at once."""
    work = product_timer(matrix(BASE), 1, "f32", sample_s=0.0)
    array = np.zeros(n_bytes // 4, np.float32)
    comm.Allreduce(array)
    seconds = []
    for _ in range(9):
        comm.barrier()
        started, worked = time.perf_counter(), 0.0
        for _ in range(EXCHANGES):
            if works:
                began = time.perf_counter()
                work()
                worked += time.perf_counter() - began
            comm.Allreduce(array)
        seconds.append((time.perf_counter() - started - worked) / EXCHANGES)
    return lower_quartile(seconds)


def _all_reduce_s(comm: Comm, n_bytes: int) -> float | None:
    """Return the time of an all-reduce in a graph, after some work; None if it must be Python."""
    call = comm.captured_all_reduce(np.zeros(n_bytes // 4, np.float32))
    if call is None:
        return None
    codes, weight = Int8Rows.empty(1, SHAPE[1]), matrix(BASE)
    out = np.empty((1, SHAPE[0]), np.float32)
    with capture() as product:
        quantized.matmul_int8(codes, weight, None, False, out)
    found = []
    for calls in (product.calls, [*product.calls, call]):
        graph, seconds = CpuGraph(calls, get_num_threads()), []
        for _ in range(9):
            comm.barrier()
            started = time.perf_counter()
            run_graph(graph, repeat=EXCHANGES)
            seconds.append((time.perf_counter() - started) / EXCHANGES)
        found.append(lower_quartile(seconds))
    return max(found[1] - found[0], MINIMUM_S)

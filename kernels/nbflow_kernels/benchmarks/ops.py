"""Benchmark of the ops: check first, then time, next to the machine's measured read bandwidth.

    python -m nbflow_kernels.benchmarks [OP ...] [--threads N] [--repeats N] [--plugins FILE]
    [--json]
                                   [--out FILE] [--suite cpu|gpu] [--budget SECONDS]

OP is an op (``matmul``) or one case (``matmul-llama2_7b_decode_f16``); without any, all timed
cases run.  A case whose result differs from the reference is not timed, and the exit code is 1.

Timed is the public function with its checks and a given output, without the first call, which
compiles.  Enough copies of the inputs are used in turn that none is still in the last-level cache.
A sample fills 200 microseconds with calls; samples of a peer alternate with ours.
GB/s counts each byte that must be read or written once, so data in a cache can exceed the limit.
With ``--suite gpu`` the cases run on a CUDA device, see `nbflow_kernels.benchmarks.gpu`.
"% of peak" compares GFLOP/s with multiply-adds in registers (`nbflow_kernels.benchmarks.roofline`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import nbflow_kernels
from nbflow_kernels.benchmarks.roofline import compute_peak
from nbflow_kernels.cpu.parallel_for import get_num_threads
from nbflow_kernels.errors import unknown_name
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import all_cases
from nbflow_kernels.quantized_matmul.cases import user_cases
from nbflow_kernels.testing import checks

SAMPLE_S = 200e-6  # one sample lasts at least this long, so that the clock's 0.1 us do not matter
MAX_COPIES = 2000


@dataclass(frozen=True)
class Row:
    """One timed case."""

    op: str
    """Public function."""
    case: str
    """Name of the case."""
    threads: int
    """Threads of our kernels, and of the peer's library if it obeys the environment."""
    error_share: float
    """Greatest error against the float64 reference, as a share of the case's tolerance."""
    median_s: float
    """Median over the samples of the seconds per call."""
    min_s: float
    """Fastest sample."""
    iqr_s: float
    """Distance between the quartiles of the samples."""
    samples: int
    """Number of samples."""
    gb_per_s: float
    """1e9 bytes that must be read or written at least once, per second of the median."""
    gflop_per_s: float
    """1e9 floating-point operations per second of the median."""
    read_bandwidth_percent: float
    """`gb_per_s` in percent of the measured read bandwidth with as many threads."""
    peak_percent: float | None
    """`gflop_per_s` in percent of the measured peak of the case's arithmetic, if it states one."""
    peer: str | None
    """Peer measured in the same loop, e.g. ``numpy 2.4.6``."""
    peer_median_s: float | None
    """The peer's median seconds per call."""
    repro: str
    """Command that measures this row again."""


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first processor; 32 MB if the system is mute."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes)


def _numpy_matmul(arguments: dict[str, Any]) -> Callable[[], Any] | None:
    """Return NumPy's product for float32 weights; it has no fast one for other dtypes."""
    x, w = arguments["x"], arguments["w"]
    if w.dtype != np.float32:
        return None
    out = np.empty((x.shape[0], w.shape[0]), np.float32)
    return lambda: np.matmul(x, w.T, out=out)


def _numpy_qmatmul(arguments: dict[str, Any]) -> Callable[[], Any]:
    """Return NumPy's product with the dequantized weight, the baseline without our kernel."""
    x, w = arguments["x"], nbflow_kernels.dequantize(arguments["w"])
    out = np.empty((x.shape[0], w.shape[0]), np.float32)
    return lambda: np.matmul(x, w.T, out=out)


def _numpy_argmax(arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: np.argmax(arguments["logits"], axis=1)


def _numpy_softmax(arguments: dict[str, Any]) -> Callable[[], Any]:
    logits, temperature = arguments["logits"], np.float32(arguments["temperature"])

    def softmax() -> Any:
        e = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature)
        return e / e.sum(axis=1, keepdims=True)

    return softmax


def _numpy_top_k(arguments: dict[str, Any]) -> Callable[[], Any]:
    """Return NumPy's partial sort and the sorted top k."""
    x, k = arguments["input"], arguments["k"]

    def top_k() -> Any:
        ids = np.argpartition(x, -k, axis=1)[:, -k:]
        values = np.take_along_axis(x, ids, axis=1)
        order = np.argsort(-values, axis=1)
        return np.take_along_axis(values, order, axis=1), np.take_along_axis(ids, order, axis=1)

    return top_k


PEERS: dict[str, Callable[[dict[str, Any]], Callable[[], Any] | None]] = {
    "matmul": _numpy_matmul,
    "qmatmul": _numpy_qmatmul,
    "argmax": _numpy_argmax,
    "softmax": _numpy_softmax,
    "top_k": _numpy_top_k,
}
"""Op to a function that makes the peer's call from the arguments, or None."""


def _copies(case: OpCase) -> list[dict[str, Any]]:
    """Return as many argument sets as exceed the last-level cache twice."""
    first = checks.make_inputs(case) | checks.make_out(case)
    size = sum(int(getattr(leaf, "nbytes", 0)) for leaf in checks.leaves(first))
    n = math.ceil(2 * last_level_cache_bytes() / max(size, 1))
    more = range(min(n, MAX_COPIES) - 1)
    return [first, *(checks.make_inputs(case) | checks.make_out(case) for _ in more)]


def _sampler(calls: list[Callable[[], Any]]) -> Callable[[], float]:
    """Return a function that takes one sample: seconds per call, going on through `calls`."""
    for call in calls[:2]:
        call()  # compiles, and packs weights once
    started = time.perf_counter()
    calls[-1]()
    n_calls = max(1, math.ceil(SAMPLE_S / max(time.perf_counter() - started, 1e-7)))
    position = 0

    def sample() -> float:
        nonlocal position
        chosen = [calls[(position + i) % len(calls)] for i in range(n_calls)]
        position += n_calls
        started = time.perf_counter()
        for call in chosen:
            call()
        return (time.perf_counter() - started) / n_calls

    return sample


_compute_peak = functools.cache(compute_peak)


def _peak_percent(case: OpCase, seconds: float, threads: int) -> float | None:
    """Return the share of the processor's peak that a case's operations reach."""
    if not case.arithmetic:
        return None
    return 100.0 * case.n_flops / seconds / _compute_peak(case.arithmetic, threads)


def measure(case: OpCase, repeats: int, bandwidth: float) -> Row:
    """Check a case, then time it; `bandwidth` is in bytes per second.

    Raises
    ------
    CheckError
        If the result differs from the reference by more than the case allows.
    """
    error_share = checks.check(case)
    op = getattr(nbflow_kernels, case.op)
    copies = _copies(case)
    ours = _sampler([functools.partial(op, **arguments) for arguments in copies])
    peer_calls = [PEERS[case.op](arguments) for arguments in copies] if case.op in PEERS else []
    peers = [call for call in peer_calls if call is not None]
    theirs = _sampler(peers) if peers else None
    seconds: list[float] = []
    peer_seconds: list[float] = []
    for _ in range(repeats):
        seconds.append(ours())
        if theirs is not None:
            peer_seconds.append(theirs())
    low, median, high = (float(q) for q in np.percentile(seconds, [25, 50, 75]))
    threads = get_num_threads()
    return Row(
        op=case.op,
        case=case.name,
        threads=threads,
        error_share=error_share,
        median_s=median,
        min_s=min(seconds),
        iqr_s=high - low,
        samples=repeats,
        gb_per_s=case.n_bytes / median / 1e9,
        gflop_per_s=case.n_flops / median / 1e9,
        read_bandwidth_percent=100.0 * case.n_bytes / median / bandwidth,
        peak_percent=_peak_percent(case, median, threads),
        peer=f"numpy {np.__version__}" if peers else None,
        peer_median_s=float(np.median(peer_seconds)) if peers else None,
        repro=f"python -m nbflow_kernels.benchmarks {case.id} --threads {threads}"
        f" --repeats {repeats}",
    )


def choose(names: list[str], suite: str = "cpu") -> list[OpCase]:
    """Return the timed cases of the named ops or cases; all of the suite's for no names.

    Raises
    ------
    UsageError
        If a name is neither an op with a timed case nor such a case.
    """
    cases = (*all_cases(), *user_cases())
    timed = [case for case in cases if case.timed and (suite == "gpu" or not case.device_only)]
    available = [*dict.fromkeys(case.op for case in timed), *(case.id for case in timed)]
    for name in names:
        if name not in available:
            raise unknown_name("op or case", name, available)
    return [case for case in timed if not names or case.op in names or case.id in names]


def table(rows: list[Row]) -> str:
    """Return the rows as aligned text."""
    head = ("case", "threads", "median us", "min us", "IQR us", "GB/s", "GFLOP/s", "% of read")
    lines: list[tuple[str, ...]] = [(*head, "% of peak", "peer us", "x peer", "repro")]
    for row in rows:
        times = (row.median_s, row.min_s, row.iqr_s)
        peer = row.peer_median_s
        lines.append(
            (
                f"{row.op}-{row.case}",
                str(row.threads),
                *(f"{1e6 * s:.1f}" for s in times),
                f"{row.gb_per_s:.1f}",
                f"{row.gflop_per_s:.1f}",
                f"{row.read_bandwidth_percent:.0f}",
                f"{row.peak_percent:.0f}" if row.peak_percent is not None else "-",
                f"{1e6 * peer:.1f}" if peer is not None else "-",
                f"{peer / row.median_s:.2f}" if peer is not None else "-",
                row.repro,
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

"""Benchmark of the ops on a CUDA device: ``benchmarks --suite gpu --out FILE``.

First the device's limits: memory copies and, with cuBLAS, a float16 product.  Then each timed case
is checked against its float64 reference and timed between two events: calls over enough copies of
the inputs that none is still in the L2 cache, captured into a CUDA graph (without Python's
overhead).  An op that cannot be captured is timed call by call, as its row states.  A case that
fails, or for which no time is left, is a row with the reason.

Measuring runs in a separate process (`nbflow_kernels.benchmarks.gpu_worker`): a case that breaks or
hangs it costs one row.  The file is rewritten after every row.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import nbflow_kernels
from nbflow_kernels import cuda
from nbflow_kernels.cuda import nvrtc
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import NO_CUDA
from nbflow_kernels.testing import checks

SAMPLE_S = 1e-3  # one sample lasts about this long
MAX_CALLS = 200  # in a sample
MAX_COPIES = 64

_copy = cuda.cpp_kernel(__file__, "copy_bandwidth.cu", "copy", "f32* x, f32* out, i64 n")
Call = Callable[[], Any]


@dataclass(frozen=True)
class GpuRow:
    """One case on the device."""

    op: str
    """Public function."""
    case: str
    """Name of the case."""
    error: str | None
    """Reason for missing numbers, or None."""
    error_share: float | None = None
    """Greatest error against the float64 reference, as a share of the case's tolerance."""
    launched: str | None = None
    """Timing method: "graph", or "calls", which includes Python's overhead."""
    median_s: float | None = None
    """Median over the samples of the seconds per call."""
    min_s: float | None = None
    """Fastest sample."""
    iqr_s: float | None = None
    """Distance between the quartiles of the samples."""
    samples: int = 0
    """Number of samples."""
    gb_per_s: float | None = None
    """1e9 bytes that must be read or written at least once, per second of the median."""
    tflop_per_s: float | None = None
    """1e12 floating-point operations per second of the median."""
    copy_percent: float | None = None
    """`gb_per_s` in percent of the measured copy bandwidth."""


def in_order(cases: list[OpCase]) -> list[OpCase]:
    """Return the cases that a device has a variant for, small ones first: more of them fit."""
    found = [case for case in cases if case.op not in NO_CUDA]
    return sorted(found, key=lambda case: case.n_bytes + case.n_flops / 100)


def limits(cupy: Any, repeats: int, copy_bytes: int = 1 << 30) -> dict[str, Any]:
    """Return the device's name and its peak copy and matmul rates."""
    found: dict[str, Any] = {"device": describe(cupy)}
    bandwidth, why = _attempt(lambda: copy_bandwidth(cupy, repeats, copy_bytes))
    found["copy_bytes_per_s"], found["copy_error"] = bandwidth, why
    rate, why = _attempt(lambda: matmul_rate(cupy, repeats))
    found["matmul_f16_flop_per_s"], found["matmul_error"] = rate, why
    return found


def events(
    cases: list[OpCase], repeats: int, cupy: Any, known: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Measure the device, unless its `limits` are known, and the cases.

    Yields ``{"limits": ...}``, then for each case ``{"case": its id}`` when it begins and
    ``{"row": ...}``, a `GpuRow`, when it is done.

    Raises
    ------
    RuntimeError
        From CuPy, after a row whose case has left the device unusable for this process.
    """
    if known is None:
        known = limits(cupy, repeats)
        yield {"limits": known}
    bandwidth = known["copy_bytes_per_s"]
    for case in cases:
        yield {"case": case.id}
        row, why = _attempt(functools.partial(measure, case, repeats, cupy, bandwidth))
        yield {"row": asdict(row or GpuRow(case.op, case.name, why))}
        cupy.cuda.Device().synchronize()


def _attempt(measure: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return a measurement or the reason it failed, so that the others still run."""
    try:
        return measure(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:2000]


def describe(cupy: Any) -> dict[str, Any]:
    """Return the device, its clocks, and the versions of everything that takes part."""
    device = cuda.device_of(cupy.zeros(1, np.float32))
    found: dict[str, Any] = {"arch": device.arch, "n_sms": device.n_sms, "nvrtc": nvrtc.version()}
    found["cupy"] = cupy.__version__
    for package in ("numba", "numba-cuda", "cuda-bindings", "numpy"):
        found[package], _ = _attempt(lambda p=package: importlib.metadata.version(p))  # type: ignore[misc]
    found["l2_bytes"] = _l2_bytes(cupy)
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    asked, why = _attempt(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    )
    answer = asked.stdout.splitlines()[0].split(", ") if asked else []
    found |= dict(zip(fields.split(","), answer, strict=False)) if asked else {"nvidia-smi": why}
    return found


def _l2_bytes(cupy: Any) -> int:
    attributes = cupy.cuda.Device().attributes
    return int(attributes.get("L2CacheSize", 64 << 20))


def copy_bandwidth(cupy: Any, repeats: int, n_bytes: int) -> float:
    """Return the bytes read and written per second while copying `n_bytes`."""
    n = n_bytes // 4
    x, out = cupy.zeros(n, np.float32), cupy.zeros(n, np.float32)
    n_blocks = 16 * cuda.device_of(x).n_sms

    def copy() -> None:
        _copy(n_blocks, 512, (x, out, n // 4))

    copy()
    samples, _ = _timed(cupy, [copy], 4, repeats)
    return 2 * n_bytes / float(np.median(samples))


def matmul_rate(cupy: Any, repeats: int, size: int = 8192) -> float:
    """Return the operations per second of cuBLAS in a float16 product of squares."""
    matmul = cupy.matmul
    band = np.random.default_rng(0).standard_normal((size // 8, size)).astype(np.float16)
    a = cupy.asarray(np.tile(band, (8, 1)))
    out = cupy.empty((size, size), np.float16)

    def product() -> None:
        matmul(a, a, out=out)

    product()
    samples = _by_calls(cupy, [product], 4, repeats)  # CuPy does not let cuBLAS be captured
    return 2.0 * size**3 / float(np.median(samples))


def measure(case: OpCase, repeats: int, cupy: Any, bandwidth: float | None) -> GpuRow:
    """Check a case on the device, then time it.

    Raises
    ------
    CheckError
        If the result differs from the reference by more than the case allows.
    """
    place = checks.placer(cupy)
    arguments, out = checks.make_inputs(case), checks.make_out(case)
    error_share = checks.check(case, place, arguments)
    op = getattr(nbflow_kernels, case.op)
    calls: list[Call] = []
    for _ in range(_n_copies(arguments | out, _l2_bytes(cupy))):
        there, out_there = checks.placed(case, arguments, out, place)
        calls.append(lambda a=there, o=out_there: op(**a, **o))  # type: ignore[misc]
    for call in calls[:2]:
        call()
    once = float(np.median(_by_calls(cupy, calls, len(calls), 3)))
    n_calls = max(len(calls), min(MAX_CALLS, math.ceil(SAMPLE_S / max(once, 1e-6))))
    samples, launched = _timed(cupy, calls, n_calls, repeats)
    low, median, high = (float(q) for q in np.percentile(samples, [25, 50, 75]))
    gb_per_s = case.n_bytes / median / 1e9
    return GpuRow(
        case.op,
        case.name,
        None,
        error_share=error_share,
        launched=launched,
        median_s=median,
        min_s=min(samples),
        iqr_s=high - low,
        samples=len(samples),
        gb_per_s=gb_per_s,
        tflop_per_s=case.n_flops / median / 1e12,
        copy_percent=None if not bandwidth else 1e11 * gb_per_s / bandwidth,
    )


def _n_copies(arguments: dict[str, Any], l2_bytes: int) -> int:
    """Return how many sets of arguments exceed the L2 cache twice."""
    size = sum(int(getattr(leaf, "nbytes", 0)) for leaf in checks.leaves(arguments))
    return max(1, min(MAX_COPIES, math.ceil(2 * l2_bytes / max(size, 1))))


def _timed(cupy: Any, calls: list[Call], n_calls: int, repeats: int) -> tuple[list[float], str]:
    """Return samples of the seconds of a call, and how they were launched."""
    with _stream(cupy):  # workspaces are a stream's own, and a capture cannot make one
        calls[0]()
    samples, why_not = _attempt(lambda: _by_graph(cupy, calls, n_calls, repeats))
    if why_not is None:
        return samples, "graph"
    return _by_calls(cupy, calls, n_calls, repeats), "calls"


@functools.cache
def _stream(cupy):
    """Return the one stream of this process that calls are timed on."""
    return cupy.cuda.Stream(non_blocking=True)


def _by_graph(cupy: Any, calls: list[Call], n_calls: int, repeats: int) -> list[float]:
    """Time calls that were captured into one graph."""
    stream = _stream(cupy)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            for i in range(n_calls):
                calls[i % len(calls)]()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.end_capture()
            raise
        graph = stream.end_capture()
        return [_sample(cupy, stream, graph.launch, n_calls) for _ in range(repeats + 1)][1:]


def _by_calls(cupy: Any, calls: list[Call], n_calls: int, repeats: int) -> list[float]:
    """Time calls as they are made from Python."""
    stream = _stream(cupy)
    cupy.cuda.Device().synchronize()

    def launch() -> None:
        for i in range(n_calls):
            calls[i % len(calls)]()

    with stream:
        return [_sample(cupy, stream, launch, n_calls) for _ in range(repeats + 1)][1:]


def _sample(cupy: Any, stream: Any, launch: Callable[[], Any], n_calls: int) -> float:
    """Return the seconds of a call between two events."""
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record(stream)
    launch()
    last.record(stream)
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(first, last)) * 1e-3 / n_calls


# ---- printing -----------------------------------------------------------------------------


def line(row: GpuRow) -> str:
    """Return a row as a line of text."""
    name = f"{row.op}-{row.case}"
    if row.median_s is None:
        return f"{name}: {(row.error or '').splitlines()[0][:200]}"
    percent = "" if row.copy_percent is None else f" ({row.copy_percent:.0f} % of copy)"
    return (
        f"{name}: {1e6 * row.median_s:.1f} us, {row.gb_per_s:.0f} GB/s{percent}, "
        f"{row.tflop_per_s:.1f} TFLOP/s, {row.launched}"
    )


def table(report: dict[str, Any]) -> str:
    """Return the report as text."""
    if "device" not in report:
        return "\n".join(line(GpuRow(**row)) for row in report["rows"])
    device, copy, rate = (
        report[k] for k in ("device", "copy_bytes_per_s", "matmul_f16_flop_per_s")
    )
    lines = [
        f"{device.get('name', 'device')} ({device['arch']}, {device['n_sms']} multiprocessors)"
    ]
    lines.append(f"copy: {copy / 1e12:.2f} TB/s" if copy else f"copy: {report['copy_error']}")
    lines.append(
        f"cuBLAS float16: {rate / 1e12:.0f} TFLOP/s"
        if rate
        else f"cuBLAS float16: {report['matmul_error']}"
    )
    return "\n".join([*lines, "", *(line(GpuRow(**row)) for row in report["rows"])])

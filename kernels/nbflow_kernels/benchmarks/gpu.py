"""Benchmark of the ops on a CUDA device: ``benchmarks --suite gpu --out FILE``.

First the device's limits: memory copies and, with cuBLAS, a float16 product.  Then each timed case
is checked against its float64 reference and timed between two events: calls over enough copies of
the inputs that none is still in the L2 cache, captured into a CUDA graph (without Python's
overhead).  An op that cannot be captured is timed call by call, as its row states; for a case of
a decode step (`gpu_calls.DECODE_KINDS`) that is an error.  Calls of a process share one stream, on
which each runs before the capture, so that a graph allocates nothing.  Every case is timed twice:
the difference is the noise.  Installed libraries are timed on the same shapes (`gpu_peers`).  A
case that fails, or for which no time is left, is a row with the reason.

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
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.benchmarks import gpu_peers
from nbflow_kernels.benchmarks.gpu_calls import (
    DECODE_KINDS,
    KINDS,
    PRODUCTS,
    Call,
    kind,
    make_call,
)
from nbflow_kernels.cuda import nvrtc
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import NO_CUDA
from nbflow_kernels.testing import checks

SAMPLE_S = 1e-3  # one sample lasts about this long
MAX_CALLS = 200  # in a sample
MAX_COPIES = 64

copy_kernel = cuda.cpp_kernel(__file__, "copy_bandwidth.cu", "copy", "f32* x, f32* out, i64 n")


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
    noise_percent: float | None = None
    """Difference of the median of as many samples taken afterwards, in percent."""
    note: str | None = None
    """Reason why the calls were not captured in a graph."""
    peers: dict[str, gpu_peers.Seconds] = field(default_factory=dict)
    """Median seconds of other libraries, or the reason why there are none."""


def in_order(cases: list[OpCase]) -> list[OpCase]:
    """Return the cases that a device has a variant for, by kind, small ones of a kind first."""
    found = [case for case in cases if case.op not in NO_CUDA]
    return sorted(
        found, key=lambda case: (KINDS.index(kind(case)), case.n_bytes + case.n_flops / 100)
    )


def limits(cupy: Any, repeats: int, copy_bytes: int = 1 << 30) -> dict[str, Any]:
    """Return the device's name and its peak copy and matmul rates."""
    found: dict[str, Any] = {"device": describe(cupy)}
    pair, why = _attempt(lambda: [copy_bandwidth(cupy, repeats, copy_bytes) for _ in range(2)])
    found["copy_bytes_per_s"], found["copy_error"] = pair and pair[0], why
    found["copy_noise_percent"] = pair and _difference(*pair)
    rate, why = _attempt(lambda: matmul_rate(cupy, repeats))
    found["matmul_f16_flop_per_s"], found["matmul_error"] = rate, why
    return found


def events(
    cases: list[OpCase],
    repeats: int,
    cupy: Any,
    known: dict[str, Any] | None = None,
    max_copies: int = MAX_COPIES,
) -> Iterator[dict[str, Any]]:
    """Measure the device, unless its `limits` are known, and the cases on copies of their inputs.

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
        row, why = _attempt(functools.partial(measure, case, repeats, cupy, bandwidth, max_copies))
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
    found: dict[str, Any] = {"arch": device.arch, "n_sms": device.n_sms}
    found["nvrtc"], _ = _attempt(nvrtc.version)
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
    # random: memory and wires need less power for zeros, and the clocks rise
    some = np.random.default_rng(0).standard_normal(min(n, 1 << 22), dtype=np.float32)
    x, out = cupy.asarray(np.resize(some, n)), cupy.zeros(n, np.float32)
    n_blocks = 16 * cuda.device_of(x).n_sms

    def copy() -> None:
        copy_kernel(n_blocks, 512, (x, out, n // 4))

    copy()
    samples, _, _ = _timed(cupy, [copy], 4, repeats)
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


def measure(
    case: OpCase,
    repeats: int,
    cupy: Any,
    bandwidth: float | None,
    max_copies: int = MAX_COPIES,
) -> GpuRow:
    """Check a case on the device, then time it.

    Raises
    ------
    CheckError
        If the result differs from the reference by more than the case allows.
    """
    place = checks.placer(cupy)
    arguments, out = checks.make_inputs(case), checks.make_out(case)
    error_share = checks.check(case, place, arguments)
    calls: list[Call] = []
    for _ in range(_n_copies(arguments | out, _l2_bytes(cupy), max_copies)):
        there, out_there = checks.placed(case, arguments, out, place)
        calls.append(make_call(case, there, out_there))
    once = float(np.median(_by_calls(cupy, calls, len(calls), 3)))
    n_calls = max(len(calls), min(MAX_CALLS, math.ceil(SAMPLE_S / max(once, 1e-6))))
    samples, launched, note = _timed(cupy, calls, n_calls, repeats)
    again, _, _ = _timed(cupy, calls, n_calls, repeats)
    peers = gpu_peers.measure(case, arguments, n_calls, repeats, _l2_bytes(cupy))
    if case.op in PRODUCTS and hasattr(cupy, "matmul"):
        seconds, why = _attempt(lambda: _cublas(cupy, arguments, n_calls, repeats))
        peers["cuBLAS f16, call by call"] = why or seconds
    low, median, high = (float(q) for q in np.percentile(samples, [25, 50, 75]))
    gb_per_s = case.n_bytes / median / 1e9
    return GpuRow(
        case.op,
        case.name,
        not_a_graph(case, launched, note),
        error_share=error_share,
        launched=launched,
        median_s=median,
        min_s=min(samples),
        iqr_s=high - low,
        samples=len(samples),
        gb_per_s=gb_per_s,
        tflop_per_s=case.n_flops / median / 1e12,
        copy_percent=None if not bandwidth else 1e11 * gb_per_s / bandwidth,
        noise_percent=_difference(median, float(np.median(again))),
        note=note,
        peers=peers,
    )


def _cublas(cupy: Any, arguments: dict[str, Any], n_calls: int, repeats: int) -> float:
    """Return the seconds of cuBLAS, through CuPy, for a product of this shape in float16."""
    (T, K), N = arguments["x"].shape, arguments["w"].shape[0]
    some = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float16)
    x = cupy.asarray(np.resize(some, (T, K)))
    weights = cupy.asarray(np.resize(some, (N, K)))
    size, out = 2 * (N * K + T * K + T * N), cupy.empty((T, N), np.float16)
    n = max(1, min(gpu_peers.MAX_COPIES, math.ceil(2 * _l2_bytes(cupy) / size)))
    copies = [weights, *(weights.copy() for _ in range(n - 1))]
    calls: list[Call] = [functools.partial(cupy.matmul, x, w.T, out=out) for w in copies]
    return float(np.median(_by_calls(cupy, calls, n_calls, repeats)))


def not_a_graph(case: OpCase, launched: str, note: str | None) -> str | None:
    """Return the error of a decode case that was not timed as a graph; None for others."""
    if launched == "graph" or kind(case) not in DECODE_KINDS:
        return None
    return f"not a graph, so the time includes Python: {note}"


def _difference(first: float, second: float) -> float:
    """Return by how many percent two measurements of the same thing differ."""
    return 100 * abs(second / first - 1)


def _n_copies(arguments: dict[str, Any], l2_bytes: int, most: int = MAX_COPIES) -> int:
    """Return how many sets of arguments exceed the L2 cache twice."""
    size = sum(int(getattr(leaf, "nbytes", 0)) for leaf in checks.leaves(arguments))
    return max(1, min(most, math.ceil(2 * l2_bytes / max(size, 1))))


def _timed(
    cupy: Any, calls: list[Call], n_calls: int, repeats: int
) -> tuple[list[float], str, str | None]:
    """Return samples of the seconds of a call, how they were launched, and why by no graph."""
    with _stream(cupy):  # workspaces and free memory are a stream's own; a capture makes none
        for call in calls:
            call()
    samples, why_not = _attempt(lambda: _by_graph(cupy, calls, n_calls, repeats))
    if why_not is None:
        return samples, "graph", None
    return _by_calls(cupy, calls, n_calls, repeats), "calls", why_not


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
    noise = "" if row.noise_percent is None else f" +- {row.noise_percent:.0f} %"
    peers = "".join(
        f", {peer} {1e6 * s:.1f} us" for peer, s in row.peers.items() if isinstance(s, float)
    )
    return (
        f"{name}: {1e6 * row.median_s:.1f} us{noise}, {row.gb_per_s:.0f} GB/s{percent}, "
        f"{row.tflop_per_s:.1f} TFLOP/s, {row.launched}{peers}"
        + (f"; {row.error}"[:200] if row.error else "")
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
    noise = report.get("copy_noise_percent") or 0.0
    lines.append(
        f"copy: {copy / 1e12:.2f} TB/s +- {noise:.1f} %"
        if copy
        else f"copy: {report['copy_error']}"
    )
    lines.append(
        f"cuBLAS float16: {rate / 1e12:.0f} TFLOP/s"
        if rate
        else f"cuBLAS float16: {report['matmul_error']}"
    )
    return "\n".join([*lines, "", *(line(GpuRow(**row)) for row in report["rows"])])

"""Sections with kernels alone: one of each kind, and the benchmark of the ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.first_gpu_run.journal import Journal
from nbflow.first_gpu_run.sections import Context
from nbflow_kernels import cuda
from nbflow_kernels.benchmarks import gpu, gpu_worker
from nbflow_kernels.benchmarks.gpu_calls import kind
from nbflow_kernels.cuda import all_reduce, cache, probes
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import all_cases
from nbflow_kernels.testing import checks

SHARED_BYTES = 200 << 10
N_LAUNCHES = 5
EMULATED = {
    "gemv": ("qmatmul-q4_0_one_row",),
    "attention": ("single_decode_with_kv_cache-one_key",),
    "prompts": ("single_prefill_with_kv_cache-no_keys",),
    "other": ("rmsnorm-small",),
}
"""Small cases of each kind, for the emulated device."""
MARGIN_S = 15.0
"""Seconds before a section's limit at which its benchmark begins no further case."""


def one_of_each_kind(context: Context) -> None:
    """Run a kernel of each kind and write whether its result is right."""
    cupy = context.cupy()
    device = cuda.device_of(cupy.zeros(1))
    kinds: dict[str, Callable[[], Any]] = {
        "CUDA C++": lambda: checks.check(_case("rmsnorm-small"), checks.placer(cupy)),
        "decoder": lambda: _decodes(cupy),
        "codebook of floats": lambda: _multiplies("nf4_b64_odd", cupy),
        "trellis": lambda: _multiplies("q3t_one_row", cupy),
        "Numba": lambda: _quantizes(cupy),
        "sums of ranks": lambda: _rank_sums(cupy),
        f"graph of {N_LAUNCHES} launches": lambda: _graph(cupy),
        "200 KB of shared memory": lambda: probes.uses_shared_memory(device, SHARED_BYTES),
    }
    if probes.has_clusters(device):
        kinds["cluster"] = lambda: probes.reads_a_peer(device)
    else:
        context.emit({"kernel": "cluster", "skipped": f"{device.arch} has no clusters"})
    if device.max_shared_bytes < SHARED_BYTES:
        del kinds["200 KB of shared memory"]
        context.emit(
            {"kernel": "200 KB of shared memory", "skipped": f"{device.max_shared_bytes} bytes"}
        )
    for name, run in kinds.items():
        row: dict[str, Any] = {"kernel": name}
        try:
            found = run()
            if found is False:
                row["error"] = "wrong result"
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        context.emit(row)
        cupy.cuda.Device().synchronize()
    context.emit({"kernel": "origin of the machine code", **cache.sources})


def _multiplies(name: str, cupy: Any) -> None:
    """Check a product whose weights are looked up across the lanes of a warp."""
    checks.check(_case(f"qmatmul-{name}"), checks.placer(cupy))


def _case(name: str) -> OpCase:
    return next(case for case in all_cases() if case.id == name)


def _weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)


def _quantizes(cupy: Any) -> bool:
    """Return whether a Numba kernel quantizes to the bytes of the CPU."""
    found, wanted = (
        nk.quantize(w, "q4_0", quantizer="reference").data
        for w in (cupy.asarray(_weights()), _weights())
    )
    return bool(np.array_equal(cuda.to_host(found), wanted))


def _decodes(cupy: Any) -> bool:
    """Return whether a device decodes to the bits of the CPU."""
    qt = nk.quantize(_weights(), "q4_k", quantizer="reference")
    there = nk.dequantize(qt.to_device(cupy.zeros(1, np.uint8)))
    return bool(np.array_equal(cuda.to_host(there), nk.dequantize(qt)))


def _rank_sums(cupy: Any) -> bool:
    """Return whether sums of two ranks, both on this device, are added in order."""
    parts = np.random.default_rng(0).standard_normal((2, 1000), dtype=np.float32)
    x, out = cupy.asarray(parts), cupy.zeros(1000, np.float32)
    all_reduce.ordered_sum(x, out)
    memory = cupy.zeros((2, all_reduce.memory_bytes(4000)), np.uint8)
    bases = [cuda.address(memory[rank]) for rank in range(2)]
    reduce = all_reduce.AllReduce(bases, -1, 4000, cuda.device_of(x), n_blocks=2)
    found = (cuda.to_host(out), *cuda.to_host(reduce(x)))
    return all(np.array_equal(sums, parts[0] + parts[1]) for sums in found)


def _graph(cupy: Any) -> bool:
    """Return whether a captured graph of launches gives the result of single launches."""
    x = cupy.asarray(np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32))
    # CuPy's own kernels, such as that of `ones`, would need its compiler
    weight, outs = (
        cupy.asarray(np.ones(8, np.float32)),
        [cupy.zeros((3, 8), np.float32) for _ in range(2)],
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def launch(out: Any) -> None:
        nk.rmsnorm(x, weight, eps=1e-5, out=out)
        for _ in range(N_LAUNCHES - 1):
            nk.rmsnorm(out, weight, eps=1e-5, out=out)

    with stream:
        launch(outs[0])
        stream.begin_capture()
        launch(outs[1])
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    return bool(np.array_equal(cuda.to_host(outs[0]), cuda.to_host(outs[1])))


def benchmark(context: Context, chosen: str) -> None:
    """Run the timed cases of a kind; the device's limits are measured by the first such section."""
    context.cupy()
    known = next(
        (
            row["limits"] for rows in Journal(context.folder).sections.values() for row in rows
            if "limits" in row
        ),
        None,
    )  # fmt: skip
    if context.emulator:
        cases = [replace(_case(name), timed=True, n_bytes=1000) for name in EMULATED[chosen]]
        known = known or {"copy_bytes_per_s": None}
    else:
        cases = [case for case in all_cases() if case.timed and kind(case) == chosen]
    wrote_limits = known is not None

    def each(report: dict[str, Any]) -> None:
        nonlocal wrote_limits
        if not wrote_limits and "copy_bytes_per_s" in report:
            wrote_limits = True
            limits = {k: v for k, v in report.items() if k not in ("seconds", "rows")}
            context.emit({"limits": limits})
        context.emit({"benchmark": report["rows"][-1]})

    gpu_worker.supervise(
        gpu.in_order(cases), 1 if context.emulator else 20, each,
        budget_s=max(context.limit_s - MARGIN_S, 1.0), known=known,
        max_copies=1 if context.emulator else gpu.MAX_COPIES,
        command=(*gpu_worker.COMMAND, context.arrays),
    )  # fmt: skip

#!/usr/bin/env python3
"""Measure the int8 GEMV of weight formats: instructions, speed in the cache, share of the read.

    python tools/measure/gemv.py results/gemv/MACHINE [FORMAT ...]

For each format: the vector and scalar instructions of the innermost loop, counted in the assembly
that Numba emits, per 512 weights (16 rows x 32 columns); the bytes of weights per second that one
thread multiplies from its second-level cache, the kernel's bound where memory is faster; and the
share of the read bandwidth that two threads reach with a matrix of 512 MB, median of pairs: each
product between two passes that read the same bytes.  Needs a quiet machine, for about a minute.

With --f32 it appends the speed of the float32 GEMV in the cache alone, of all formats in turn: the
least of many repetitions, which other processes disturb little.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from published_rows import append, conditions

from nbflow_kernels.benchmarks.roofline import ReadProbe
from nbflow_kernels.cpu import huge_pages, jit
from nbflow_kernels.cpu.parallel_for import parallel_for, set_num_threads
from nbflow_kernels.formats.layout_cpu import CpuPacked
from nbflow_kernels.quantized_matmul import cpu, cpu_gemv_f32, cpu_gemv_int8
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows, quantize_activations
from nbflow_kernels.quantizers import quantize

FORMATS = (
    *("q4_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "q4", "q3h"),
)
COLUMNS = 2048
THREADS = 2


def main() -> None:
    """Measure formats and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("formats", nargs="*", default=FORMATS)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--f32", action="store_true", help="float32 GEMV in the cache")
    arguments = parser.parse_args()
    facts = conditions()
    if arguments.f32:
        append(arguments.out / "rows.jsonl", facts, measure_f32(arguments.formats))
        return
    for name in arguments.formats:
        row = measure(name, arguments.megabytes << 20, arguments.repeats)
        print(row, flush=True)
        append(arguments.out / "rows.jsonl", facts, [row])


def measure(name: str, n_bytes: int, repeats: int) -> dict[str, Any]:
    """Return the row of a format."""
    rng = np.random.default_rng(0)
    x = Int8Rows.empty(1, COLUMNS)
    quantize_activations(rng.standard_normal((1, COLUMNS), dtype=np.float32), x)
    w = rng.standard_normal((64, COLUMNS), dtype=np.float32)
    some = quantize(w, name, quantizer="reference").packed()
    kernel = cpu.int8_kernel(some.form, 1)
    cached, large = _repeated(some, 1 << 20), _repeated(some, n_bytes)
    seconds = min(_seconds(kernel, x, cached, 1) for _ in range(300))
    probe = ReadProbe(large.nbytes, THREADS)
    speeds, reads = [], []
    for _ in range(repeats):
        before = probe.n_bytes / probe.seconds()
        speeds.append(large.nbytes / _seconds(kernel, x, large, THREADS))
        reads.append((before + probe.n_bytes / probe.seconds()) / 2)
    shares = [speed / read for speed, read in zip(speeds, reads, strict=True)]
    return {
        "weights": name,
        "packed_bits_per_weight": round(some.bits_per_weight, 4),
        "instructions_per_512_weights": instructions(kernel, _arguments(x, some)),
        "cached_gb_per_s_of_a_thread": round(cached.nbytes / seconds / 1e9, 2),
        "threads": THREADS,
        "read_gb_per_s": round(statistics.median(reads) / 1e9, 2),
        "share_of_read": round(statistics.median(shares), 4),
        "shares": [round(share, 4) for share in shares],
    }


def measure_f32(names: Sequence[str], repeats: int = 400) -> list[dict[str, Any]]:
    """Return a row for each format, 512 rows of weights in the second-level cache."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, COLUMNS), dtype=np.float32)
    w = rng.standard_normal((512, COLUMNS), dtype=np.float32)
    out, bias = np.empty((1, len(w)), np.float32), np.zeros(0, np.float32)
    products: dict[str, Any] = {
        name: quantize(w, name, quantizer="reference").packed() for name in names
    }
    seconds = dict.fromkeys(names, float("inf"))
    set_num_threads(1)
    for _ in range(repeats):
        for name, packed in products.items():
            kernel = cpu_gemv_f32.gemv(packed.form)
            started = time.perf_counter()
            parallel_for(
                kernel, packed.n_groups, 1e12, x, packed.data, packed.n_blocks, bias, False, out
            )
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return [
        {
            "weights": name,
            "activations": "f32",
            "packed_bits_per_weight": round(packed.bits_per_weight, 4),
            "cached_gweights_per_s_of_a_thread": round(w.size / seconds[name] / 1e9, 2),
        }
        for name, packed in products.items()
    ]


def _repeated(some: CpuPacked, n_bytes: int) -> CpuPacked:
    """Return a matrix of about `n_bytes` bytes that repeats the rows of `some`."""
    n = max(1, n_bytes // some.nbytes)
    data = huge_pages.zeros(n * some.nbytes)
    data.reshape(n, some.nbytes)[:] = some.data
    return CpuPacked(some.form, some.n_rows * n, some.n_blocks, data)


def _arguments(x: Int8Rows, w: CpuPacked) -> tuple[Any, ...]:
    """Return the arguments of the kernel before the range of row groups."""
    sums = x.sums if cpu_gemv_int8.piece_vectors(w.form) == 8 else x.half_sums
    out, bias = np.empty((1, w.n_rows), np.float32), np.zeros(0, np.float32)
    return x.codes, 1, x.scales, sums, w.data, w.n_blocks, bias, False, out


def _seconds(kernel: Callable[..., None], x: Int8Rows, w: CpuPacked, threads: int) -> float:
    """Return the duration of a product."""
    arguments = _arguments(x, w)
    set_num_threads(threads)
    started = time.perf_counter()
    parallel_for(kernel, w.n_groups, 1e12, *arguments)
    return time.perf_counter() - started


def instructions(kernel: Any, arguments: tuple[Any, ...]) -> float:
    """Return the instructions of the loop with the dot products, per 512 weights.

    A cached kernel has no assembly: it is compiled once more.
    """
    again = numba.njit(error_model="numpy", fastmath=jit.FAST_MATH)(kernel.py_func)
    again.compile(tuple(numba.typeof(one) for one in (*arguments, 0, 1)))
    (text,) = again.inspect_asm().values()
    counts = []
    for block in re.split(r"\n(?=[.\w$]+:)", text):
        dots = block.count("\tvpdpbusd\t")
        if dots:  # of 64 weights each
            end = block.find("\tj")  # the loop's jump; a peeled first iteration may have none
            loop = block if end < 0 else block[: end + 2]
            found = [line for line in loop.splitlines() if re.match(r"\t[a-z]", line)]
            counts.append((dots, 8 * len(found) / dots))
    if not counts:
        raise SystemExit("the kernel has no vpdpbusd: this tool counts AVX-512 VNNI code")
    return round(max(counts)[1], 1)


if __name__ == "__main__":
    main()

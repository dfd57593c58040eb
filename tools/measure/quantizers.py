"""Measure the speed of the CPU quantizers against GGML's, alternately in one process.

    python tools/measure/quantizers.py LIBRARY [--formats NAME ...] [--machine NAME] [--note TEXT]
                                       [--threads N] [--repeats N] [--rows N] [--columns K]

LIBRARY is a shared libggml-base of llama.cpp, whose ``ggml_quantize_chunk`` is called on shares of
the rows in N threads.  Timed are the conversions of a float32 matrix in memory, Gaussian with
standard deviation 0.02: `nbflow_kernels.quantize` with both quantizers, its checks included, and
GGML's.  Types that GGML does not quantize without importance get ones, on both sides.  Medians over
the repeats, in million weights per second of processor time of all threads, which other programs
disturb less than wall time; `ratio` and `search_ratio` are medians of the ratios of "reference" and
"search" to GGML in one repeat.  `same_bytes` compares "reference" with GGML.

Writes results/quantizers/NAME.json.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.utils import system
from nbflow_kernels.cpu.cpu_quota import available_cores

ROOT = Path(__file__).resolve().parents[2]
# numbers of the types in ggml.h
GGML_TYPES = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11, "q4_k": 12,
    "q5_k": 13, "q6_k": 14, "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20,
    "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23, "iq1_m": 29, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39,
    "nvfp4": 40, "q1_0": 41, "q2_0": 42,
}  # fmt: skip
INFERFLOW = ("q8", "q6", "q5", "q5h", "q4", "q3h", "q3", "q2")  # without a peer


class Ggml:
    """GGML's quantizers, called on `n_threads` shares of the rows."""

    def __init__(self, library: Path, n_threads: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        self._chunk = self._library.ggml_quantize_chunk
        self._chunk.restype = ctypes.c_size_t
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
        self._pool = ThreadPoolExecutor(n_threads)
        self._n_threads = n_threads

    def needs_importance(self, name: str) -> bool:
        """Return True if GGML does not quantize to a type without importance."""
        return bool(self._library.ggml_quantize_requires_imatrix(GGML_TYPES[name]))

    def quantize(self, x: np.ndarray, name: str, weight: np.ndarray | None) -> np.ndarray:
        """Return the bytes of each row."""
        format = nk.FORMATS[name]
        out = np.empty((len(x), x.shape[1] // format.block_size * format.block_bytes), np.uint8)
        edges = np.linspace(0, len(x), self._n_threads + 1).astype(int).tolist()
        importance = None if weight is None else weight.ctypes.data
        calls = [
            self._pool.submit(
                self._chunk, GGML_TYPES[name], x.ctypes.data, out.ctypes.data,
                start * x.shape[1], stop - start, x.shape[1], importance,
            )
            for start, stop in itertools.pairwise(edges)
        ]  # fmt: skip
        for call in calls:
            call.result()
        return out


def machine_name() -> str:
    words = re.sub(r"\W+", "-", system.processor_name().lower()).strip("-")
    return f"{words}-{available_cores()}-cores"


def seconds(call: Callable[[], Any]) -> float:
    """Return the processor time of a call, of all threads."""
    started = time.process_time()
    call()
    return time.process_time() - started


def measure(
    ggml: Ggml, name: str, x: np.ndarray, n_repeats: int
) -> dict[str, float | bool | list[float]]:
    """Return the speeds of one format; slow ones are measured on fewer rows."""
    peer = name in GGML_TYPES
    weight = np.ones(x.shape[1], np.float32) if peer and ggml.needs_importance(name) else None
    some = x[: max(1, len(x) // 16)]  # the speeds of types differ by a factor of 500
    calls: dict[str, Callable[[np.ndarray], Any]] = {
        "reference": lambda x: nk.quantize(x, name, quantizer="reference", importance=weight),
        "search": lambda x: nk.quantize(x, name, importance=weight),
    }
    if peer:
        calls["ggml"] = lambda x: ggml.quantize(x, name, weight)
    for call in calls.values():  # compiles
        call(some)
    slow = max(seconds(lambda call=call: call(some)) for call in calls.values())
    used = x if slow < 0.1 else some
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(n_repeats):
        for key, call in calls.items():
            times[key].append(seconds(lambda call=call: call(used)))
    speed = {key: used.size / np.array(t) / 1e6 for key, t in times.items()}
    row: dict[str, Any] = {
        f"{key}_mweights_per_cpu_s": round(float(np.median(v)), 3) for key, v in speed.items()
    }
    if peer:
        row["ratio"] = round(float(np.median(speed["reference"] / speed["ggml"])), 3)
        row["search_ratio"] = round(float(np.median(speed["search"] / speed["ggml"])), 3)
        ours = nk.quantize(some, name, quantizer="reference", importance=weight).data
        row["same_bytes"] = bool(np.array_equal(ours, ggml.quantize(some, name, weight)))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="measure the CPU quantizers against GGML's")
    parser.add_argument("library", type=Path)
    parser.add_argument("--formats", nargs="+", default=[*INFERFLOW, *GGML_TYPES])
    parser.add_argument("--machine", default=machine_name(), help="file in results/quantizers")
    parser.add_argument("--note", default="", help="state of the machine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    arguments = parser.parse_args()
    nk.set_num_threads(arguments.threads)
    ggml = Ggml(arguments.library, arguments.threads)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((arguments.rows, arguments.columns), np.float32) * np.float32(0.02)
    rows = {}
    for name in arguments.formats:
        rows[name] = measure(ggml, name, x, arguments.repeats)
        print(f"{name:8}", rows[name], flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    report = {
        "command": "python tools/measure/quantizers.py LIBRARY",
        "commit": commit.stdout.strip(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": system.processor_name(),
        "note": arguments.note,
        "packages": system.package_versions(),
        "threads": arguments.threads,
        "shape": list(x.shape),
        "repeats": arguments.repeats,
        "formats": rows,
    }
    file = ROOT / "results" / "quantizers" / f"{arguments.machine}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()

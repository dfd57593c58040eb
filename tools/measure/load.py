#!/usr/bin/env python3
"""Measure the time and the peak memory of loading models, and append the rows to results/.

    python tools/measure/load.py results/load/MACHINE MODEL... [--weights FMT] [--before FOLDER]

Each load runs in a new process, with the file in the page cache and the kernels in the kernel
cache.  The bundled model is loaded first, which imports all modules.  As many bytes of memory as
the file has are written and freed before, because a virtual machine waits for its host when it uses
memory for the first time.  A row also has two bounds, measured in the same process with one thread:
`read_s`, the time to copy the file from the page cache to a buffer that stays in the processor's
caches, and `fault_s`, the time to write the first byte of each page of as many bytes of new memory,
in huge pages.  The processor's time for loading is at least their sum; the threads divide it.

With --before, the packages in another folder (``git archive COMMIT nbflow kernels specs``) are
measured in turn with these.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUFFER_BYTES = 1 << 20
PACKAGES = ("", "kernels", "specs", "experiments")


def peak_bytes() -> int:
    """Return the peak of the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def read_seconds(files: list[Path]) -> float:
    """Return the seconds to read files into a small buffer; all of them are cached then."""
    buffer, started = bytearray(BUFFER_BYTES), time.perf_counter()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        at = 0
        while n := os.preadv(fd, [buffer], at):
            at += n
        os.close(fd)
    return time.perf_counter() - started


def fault_seconds(n_bytes: int) -> float:
    """Return the seconds to touch new memory."""
    started = time.perf_counter()
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, n_bytes, mmap.PAGESIZE):
            memory[at] = 1
    return time.perf_counter() - started


def measure(model: str, weights: str | None, threads: int | None) -> dict[str, Any]:
    """Load a model and return the times; runs in a new process."""
    import nbflow
    from nbflow.checkpoint import open_weights
    from nbflow.spec import resolve
    from nbflow.utils.system import reset_peak_rss

    with open_weights(resolve(model).path) as file:
        files = file.files()
    with nbflow.load("tiny_python", threads=threads):
        pass
    n_file_bytes = sum(path.stat().st_size for path in files)
    bounds = {}
    for _ in range(2):  # the first time for the page cache and the host's memory
        bounds = {"read_s": read_seconds(files), "fault_s": fault_seconds(n_file_bytes)}
    reset_peak_rss()
    before, usage = peak_bytes(), resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    with nbflow.load(model, weights=weights, threads=threads) as loaded:
        load_s = time.perf_counter() - started
        used, peak = resource.getrusage(resource.RUSAGE_SELF), peak_bytes()
        worker = loaded.workers[0]
        n_bytes, n_read = worker.weights.n_bytes, worker.bytes_read
    return {
        "load_s": load_s,
        "user_s": used.ru_utime - usage.ru_utime,
        "system_s": used.ru_stime - usage.ru_stime,
        "peak_bytes": peak - before,
        "weight_bytes": n_bytes,
        "bytes_read": n_read,
        **bounds,
    }


def _measured(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Measure the packages of a folder in a new process."""
    paths = os.pathsep.join(str(folder / part) for part in PACKAGES)
    command = [sys.executable, __file__, "--measure", str(arguments.out), model]
    for name in ("weights", "threads"):
        if getattr(arguments, name) is not None:
            command += [f"--{name}", str(getattr(arguments, name))]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--weights", help="weight format; default: as stored")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="folder of an older nbflow")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        json.dump(measure(arguments.models[0], arguments.weights, arguments.threads), sys.stdout)
        return
    sys.path[:0] = [str(ROOT / part) for part in PACKAGES]
    from published_rows import append, conditions

    facts = conditions()
    folders = {"now": ROOT} | ({"before": arguments.before} if arguments.before else {})
    for model in arguments.models:
        rows: list[dict[str, Any]] = []
        for folder in folders.values():
            _measured(arguments, model, folder)  # compiles the format's kernels
        for i in range(arguments.rounds):
            for version, folder in folders.items():
                found = {
                    key: round(value, 3) if isinstance(value, float) else value
                    for key, value in _measured(arguments, model, folder).items()
                }
                name = Path(model).name
                rows.append(
                    {"model": name, "weights": arguments.weights, "version": version, "round": i}
                    | found
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        append(arguments.out / "load.jsonl", facts, rows)
        for version in folders:
            same = [row for row in rows if row["version"] == version]
            median = {
                key: statistics.median(row[key] for row in same)
                for key in ("load_s", "user_s", "system_s", "read_s", "fault_s")
            }
            peak = max(row["peak_bytes"] / row["weight_bytes"] for row in same)
            shown = ", ".join(f"{key} {value:.2f}" for key, value in median.items())
            print(f"{name} ({version}): {shown}; peak {peak:.2f} of the weights")


if __name__ == "__main__":
    main()

"""GPU benchmark worker process and its watchdog.

A failing kernel takes its process with it: after an invalid address nothing runs any more, and a
hanging kernel cannot be stopped from within.  So a worker process (`work`) measures the cases and
reports starts and results on standard output, one line of JSON each; `supervise` starts another
worker for the remaining cases when it dies or is silent for too long.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nbflow_kernels
from nbflow_kernels import cuda
from nbflow_kernels.benchmarks import gpu
from nbflow_kernels.benchmarks.gpu import GpuRow
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import all_cases
from nbflow_kernels.quantized_matmul.cases import user_cases

COMMAND = (sys.executable, "-m", "nbflow_kernels.benchmarks.gpu_worker")
BUDGET_S = 420.0
"""Budget of all cases but the last."""
SILENCE_S = 90.0
"""Time limit of a case, including compilation and reference."""
_END = ""


class Worker:
    """Worker process that runs a command on a job (see `work`)."""

    def __init__(self, command: Sequence[str], job: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin is not None
        try:
            with self._process.stdin as file:
                json.dump(job, file)
        except BrokenPipeError:
            pass  # the process has ended, which `next` reports

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.put(text)
        self._lines.put(_END)

    def next(self, seconds: float) -> dict[str, Any] | str:
        """Return the worker's next message, or the reason why there is none."""
        try:
            text = self._lines.get(timeout=seconds)
        except queue.Empty:
            return f"no answer for {seconds:.0f} s; its process was ended"
        if text != _END:
            found: dict[str, Any] = json.loads(text)
            return found
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"its process ended with {how}"

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver
            self._process.wait(10)


def supervise(
    cases: list[OpCase],
    repeats: int,
    each: Callable[[dict[str, Any]], None],
    *,
    formats: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    silence_s: float = SILENCE_S,
    known: dict[str, Any] | None = None,
    max_copies: int = gpu.MAX_COPIES,
    command: Sequence[str] = COMMAND,
) -> dict[str, Any]:
    """Measure the cases in worker processes that run `command`; return the report.

    `each` gets the report after every row.  After `budget_s` no case is begun; a worker that is
    silent for `silence_s` is replaced.  `known` are the device's limits from an earlier run,
    `max_copies` bounds the copies of a case's inputs.
    """
    started = time.perf_counter()
    report: dict[str, Any] = {"seconds": 0.0, "rows": [], **(known or {})}
    waiting = {case.id: case for case in cases}

    def left() -> float:
        report["seconds"] = time.perf_counter() - started
        return budget_s - float(report["seconds"])

    def add(row: GpuRow) -> None:
        report["rows"].append(asdict(row))
        left()
        each(report)

    why = ""
    while waiting and not why and left() > 0:
        job = {
            "cases": list(waiting), "repeats": repeats, "formats": list(formats),
            "max_copies": max_copies,
            "limits": {k: v for k, v in report.items() if k not in ("seconds", "rows")} or None,
        }  # fmt: skip
        why = _watch(Worker(command, job), waiting, report, add, left, silence_s)
    for case in waiting.values():
        add(GpuRow(case.op, case.name, why or f"no time left of {budget_s:.0f} s"))
    return report


def _watch(
    worker: Worker,
    waiting: dict[str, OpCase],
    report: dict[str, Any],
    add: Callable[[GpuRow], None],
    left: Callable[[], float],
    silence_s: float,
) -> str:
    """Collect a worker's results until it ends; return the reason not to start another, or None."""
    begun, n_before = "", len(waiting)
    try:
        while waiting and (begun or left() > 0):
            said = worker.next(silence_s)
            if isinstance(said, str):
                if begun:
                    case = waiting.pop(begun)
                    add(GpuRow(case.op, case.name, said))
                return "" if len(waiting) < n_before else f"nothing was measured: {said}"
            report |= said.get("limits", {})
            begun = said.get("case", "")
            if "row" in said:
                row = GpuRow(**said["row"])
                del waiting[f"{row.op}-{row.case}"]
                add(row)
        return ""
    finally:
        worker.stop()


def work(job: dict[str, Any], cupy: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure the cases of a job, and pass to `say` what `gpu.events` yields.

    A job holds ``cases``, their ids; ``repeats``; ``limits``, if they are known; ``formats``, files
    that register weight formats; ``max_copies`` of a case's inputs.
    """
    for file in job["formats"]:
        nbflow_kernels.load_plugin(file)
    known = {case.id: case for case in (*all_cases(), *user_cases())}
    cases = [known[name] for name in job["cases"]]
    most = job.get("max_copies", gpu.MAX_COPIES)
    for event in gpu.events(cases, job["repeats"], cupy, job["limits"], most):
        say(event)


def main(
    cases: list[OpCase],
    repeats: int,
    as_json: bool,
    out: Path | None,
    formats: Sequence[str] = (),
    budget_s: float = BUDGET_S,
) -> int:
    """Run the benchmark on CuPy's current device; return the exit code (1: a row has an error)."""
    found = cuda.detect()
    wrong = found.reason
    if out is not None and not out.parent.is_dir():
        wrong = f"--out: folder {out.parent} does not exist"
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2

    def each(report: dict[str, Any]) -> None:
        print(gpu.line(GpuRow(**report["rows"][-1])), file=sys.stderr, flush=True)
        if out is not None:
            part = out.with_name(f".{out.name}.part")
            part.write_text(json.dumps(report, indent=2) + "\n")
            os.replace(part, out)

    report = supervise(
        gpu.in_order(cases), repeats, each, formats=formats, budget_s=budget_s
    )  # fmt: skip
    print(json.dumps(report, indent=2) if as_json else gpu.table(report))
    return 1 if any(row["error"] for row in report["rows"]) else 0


def _main() -> None:
    """Read a job from standard input; redirect other output to standard error.

    An argument names the module of arrays, by default CuPy.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(event: dict[str, Any]) -> None:
            print(json.dumps(event), file=out, flush=True)

        arrays = sys.argv[1] if len(sys.argv) > 1 else "cupy"
        work(json.load(sys.stdin), importlib.import_module(arrays), say)


if __name__ == "__main__":
    _main()

"""Subprocesses with a time limit, and the record of a point whose process died."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.distributed.launch import LAUNCHERS
from nbflow_experiments.config.points import Point
from nbflow_experiments.store import provenance
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.sweep.point_status import bits_per_weight, new_result
from nbflow_experiments.sweep.rank_barrier import StopRequest

POLL_S = 0.2
STOP_S = 60.0
"""Grace period after a stop request."""
END_S = 3.0
"""Pause between SIGTERM and SIGKILL."""
TAIL_BYTES, _SEARCHED_BYTES = 8192, 2**20


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a subprocess."""

    code: int
    """Exit code; negative: the signal that ended it."""
    tail: str
    """The last lines of its standard output and error."""
    seconds: float
    late: bool
    """True if it exceeded its time limit."""
    out_of_memory: bool
    """True if the OOM killer ended a process meanwhile."""

    def cause(self, subject: str, timeout_s: float | None) -> tuple[str, str]:
        """Return error type and message; `subject` names the process."""
        if self.late:
            return "Timeout", f"ended after {timeout_s:g} s (--timeout)"
        if self.out_of_memory:
            return "OutOfMemory", f"the system ended {subject}: memory ran out"
        if self.code < 0:
            return "ProcessDied", f"{subject} was killed by {signal.Signals(-self.code).name}"
        return "ProcessDied", f"{subject} ended with exit code {self.code}"


def run_process(
    words: Sequence[str],
    folder: Path,
    stop: StopRequest,
    poll: Callable[[], None],
    limit_s: float | None,
) -> ProcessEnd:
    """Run a command to its end, in a new session so that Ctrl-C reaches this process only.

    Parameters
    ----------
    words : sequence of str
        The command; its process calls `obey_parent`.
    folder : Path
        Temporary folder for its output.
    stop : StopRequest
        Forwarded to the process.
    poll : callable
        Called several times a second.
    limit_s : float, optional
        Time limit, in addition to the one inside the process (`Policy.timeout_s`).
    """
    start, kills, output = time.monotonic(), _oom_kills(), folder / "output"
    environment = {k: v for k, v in os.environ.items() if k not in sum(LAUNCHERS, ())}
    deadline, asked, late = start + (limit_s or float("inf")), False, False
    with output.open("wb") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    try:
        while process.poll() is None and time.monotonic() < deadline:
            poll()
            if stop.asked and not asked:
                asked, deadline = True, min(deadline, time.monotonic() + STOP_S)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(b"stop\n")
                    process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        late = process.poll() is None and not asked
    finally:
        _end(process)
    poll()
    text = output.read_bytes()[-_SEARCHED_BYTES:].decode(errors="replace")
    late = late or re.search(r"^Timeout \(\d+:\d\d:\d\d", text, re.MULTILINE) is not None
    seconds, killed = time.monotonic() - start, _oom_kills() > kills
    return ProcessEnd(process.returncode, text[-TAIL_BYTES:], seconds, late, killed)


def obey_parent(stop: StopRequest) -> None:
    """Stop after the current step on the parent's request; exit if the parent dies."""

    def wait() -> None:
        while os.read(0, 64):
            stop.asked = True
        os._exit(1)  # files are written atomically

    threading.Thread(target=wait, name="parent", daemon=True).start()


def record_death(
    folder: ResultsFolder,
    point: Point,
    launch: str,
    attempt: int,
    end: ProcessEnd,
    cause: tuple[str, str],
    ranks: Sequence[int],
) -> dict[str, Any]:
    """Record a point whose process died; return the result."""
    kind, message = cause
    result = new_result(point, launch, attempt)
    result["status"] = {"Timeout": "timeout", "OutOfMemory": "oom"}.get(kind, "failed")
    result["error"] = {
        "type": kind, "message": message, "traceback": end.tail, "ranks": list(ranks)
    }  # fmt: skip
    result["finished"] = provenance.now()
    result["wall_s"] = end.seconds
    result["steps_s"] = {}
    result["bits_per_weight"] = bits_per_weight(point, {})
    result["readings"] = []
    folder.write_config(point)
    folder.write_result(point.short, result, f"{result['finished']} {message}\n{end.tail}", {})
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a running process and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def _oom_kills() -> int:
    """Return the system's OOM-kill count; 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0

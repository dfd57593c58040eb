"""Run sections, each in a process with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from nbflow.first_gpu_run.journal import NO_TIME, Journal
from nbflow.first_gpu_run.sections import Section
from nbflow.first_gpu_run.summary import errors_of

COMMAND = (sys.executable, "-m", "nbflow.first_gpu_run.section_process")
LOG = "log.txt"
LEAST_S = 5.0
"""Seconds that must be left for a section to begin."""


def run(
    folder: Path,
    sections: Sequence[Section],
    budget_s: float,
    emulator: bool,
    say: Callable[[str], None],
    command: Sequence[str] = COMMAND,
) -> Journal:
    """Run sections one after the other within a budget; return the results.

    Parameters
    ----------
    folder : Path
        Where results and the sections' output go.
    sections : sequence of Section
        What to run.
    budget_s : float
        Seconds for all; sections for which none are left are noted, and begun by a later run.
    emulator : bool
        Run small shapes on the emulated device.
    say : callable
        Takes lines about the progress.
    command : sequence of str
        Program of a section's process.
    """
    journal, deadline = Journal(folder), time.monotonic() + budget_s
    for section in sections:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            journal.add(section.name, "end", status=NO_TIME, seconds=0.0)
            say(f"{section.name}: no time left of {budget_s:.0f} s")
            continue
        limit_s, started = min(section.limit_s, left), time.monotonic()
        say(f"{section.name}: at most {limit_s:.0f} s")
        journal.add(section.name, "begin", limit_s=round(limit_s, 1))
        with (folder / LOG).open("ab") as log:
            log.write(f"\n==== {section.name}\n".encode())
            log.flush()
            end = _run_one(folder, section.name, limit_s, emulator, journal, log, command)
        seconds = round(time.monotonic() - started, 2)
        rows = journal.sections[section.name]
        wrong = sum(any(errors_of(row)) for row in rows if "fact" not in row)
        if end["status"] == "ok" and wrong:
            end = {"status": "errors", "reason": f"{wrong} of {len(rows)} results are errors"}
        journal.add(section.name, "end", seconds=seconds, **end)
        say(f"{section.name}: {end['status']} in {seconds:.0f} s {end.get('reason', '')}".rstrip())
    return journal


def _run_one(
    folder: Path,
    name: str,
    limit_s: float,
    emulator: bool,
    journal: Journal,
    log: IO[bytes],
    command: Sequence[str],
) -> dict[str, Any]:
    """Run a section; return its status, and the reason if it is not ``ok``."""
    receiver, sender = os.pipe()
    words = [name, str(folder), "--channel", str(sender), "--limit", str(limit_s)]
    words += ["--emulator"] if emulator else []
    process = subprocess.Popen(
        [*command, *words], pass_fds=(sender,), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    os.close(sender)
    end: dict[str, Any] = {}
    reader = threading.Thread(target=_receive, args=(receiver, name, journal, end), daemon=True)
    reader.start()
    try:
        code = process.wait(limit_s)
        reader.join(5)
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "reason": f"killed after {limit_s:.0f} s"}
    finally:
        _kill(process)
    if end:
        return end
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return {"status": "died", "reason": f"its process ended with {how}"}


def _receive(receiver: int, name: str, journal: Journal, end: dict[str, Any]) -> None:
    """Write a process's results to the journal; put its last message into `end`."""
    with os.fdopen(receiver, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if "end" in said:
                    end |= said["end"]
                else:
                    journal.add(name, "row", **said)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver
        process.wait(10)

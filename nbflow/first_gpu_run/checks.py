"""Sections ``tests`` and ``sanitizer``: the GPU tests, and NVIDIA's checks of small cases."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from nbflow.first_gpu_run.facts import find_program
from nbflow.first_gpu_run.one_case import MODEL
from nbflow.first_gpu_run.sections import Context, Skipped

TESTS = Path(__file__).parents[2] / "tests" / "cuda"
FIRST = (
    "test_kernel_launch.py", "test_matmul_wgmma.py", "test_engine_real_gpu.py", "test_ops.py",
)  # fmt: skip
"""Files to begin with: those that say most soonest."""
SANITIZED = (
    "qmatmul-q4_0_one_row",
    "qmatmul-q4_odd",
    "qmatmul-long_rows",
    "qmatmul-many_tiles",
    "matmul-ragged_many_tokens",
    "single_decode_with_kv_cache-grouped",
    "single_prefill_with_kv_cache-causal_append",
    "fused_moe-q4",
    "merge_states-five_with_empty_ones",
    "rmsnorm-ragged",
)
"""Cases for compute-sanitizer, besides steps of a small model (`one_case.MODEL`)."""
ALL_LIMIT_S, ONE_LIMIT_S = 100.0, 40.0
TOOLS = ("memcheck", "racecheck", "synccheck")
_OUTCOME = re.compile(
    r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)|(PASSED|FAILED|ERROR|SKIPPED) (\S+::\S.*)"
)
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def gpu_tests(context: Context) -> None:
    """Run the tests that need a device; write each failure as it comes, and the counts."""
    if context.emulator:
        raise Skipped("the emulated device has tests of its own")
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    if not TESTS.is_dir():
        raise Skipped(f"{TESTS} does not exist: run from a source checkout")
    context.cupy()
    files = sorted(TESTS.glob("test_*.py"), key=lambda f: (_place(f.name), f.name))
    process = subprocess.Popen(
        [*pytest_command(), *map(str, files)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", cwd=TESTS.parents[1],
    )  # fmt: skip
    assert process.stdout is not None
    counts = watch_tests(context, process.stdout)
    context.emit({"tests": dict(counts), "exit_code": process.wait(), "complete": True})


def pytest_command() -> list[str]:
    """Return the command that runs GPU tests of files, of those that can be imported."""
    words = "-m pytest -v -m gpu --tb=short -p no:cacheprovider --continue-on-collection-errors"
    command = [sys.executable, *words.split()]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    return command


def watch_tests(context: Context, lines: Iterable[str]) -> Counter[str]:
    """Write failures, and the counts now and then, from pytest's output; return the counts."""
    counts: Counter[str] = Counter()
    reported, in_summary = time.monotonic(), False
    for line in lines:
        print(line, end="", flush=True)
        in_summary |= "short test summary info" in line
        if in_summary and line.startswith(("FAILED", "ERROR")):
            context.emit({"why": line.strip()[:500]})
        found = _OUTCOME.search(line)
        if found is None or in_summary:
            continue
        name, outcome = found.group(1) or found.group(4), found.group(2) or found.group(3)
        counts[outcome.lower()] += 1
        if outcome in ("FAILED", "ERROR"):
            context.emit({"test": name.strip(), "error": outcome.lower()})
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            context.emit({"tests": dict(counts), "complete": False})
    return counts


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def sanitizer(context: Context) -> None:
    """Run small cases under the tools of compute-sanitizer."""
    if context.emulator:
        raise Skipped("the emulator has checks of its own")
    program = find_program("compute-sanitizer")
    if not program:
        raise Skipped("compute-sanitizer is not installed")
    context.cupy()
    cases = (*SANITIZED, MODEL)
    for tool in TOOLS:  # all cases in one process, which starts slowly; apart to find the wrong one
        command = [program, "--tool", tool, sys.executable, "-m", f"{__package__}.one_case"]
        row = _sanitized([*command, *cases], ALL_LIMIT_S)
        context.emit({"tool": tool, "case": "all", **row})
        for case in cases if "error" in row else ():
            context.emit({"tool": tool, "case": case, **_sanitized([*command, case], ONE_LIMIT_S)})


def _sanitized(command: Sequence[str], limit_s: float) -> dict[str, object]:
    """Return the number of errors that a tool found, or why there is none."""
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {limit_s:.0f} s"}
    print(made.stdout[-4000:], made.stderr[-4000:], sep="\n", flush=True)
    return judge(made.returncode, made.stdout + made.stderr)


def judge(code: int, output: str) -> dict[str, object]:
    """Return the errors that the output of compute-sanitizer counts."""
    found = _SUMMARY.search(output)
    if found is None:
        return {"error": f"no summary, exit code {code}: {output[-300:]}"}
    n_errors = int(found.group(1) or found.group(2) or 0)
    if n_errors or code:
        return {"errors": n_errors, "error": f"{n_errors} errors, exit code {code}"}
    return {"errors": 0}

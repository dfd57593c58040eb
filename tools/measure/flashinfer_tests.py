#!/usr/bin/env python3
"""Run a sample of FlashInfer's own tests against nbflow_kernels on a CPU, and write the outcomes.

    git clone https://github.com/flashinfer-ai/flashinfer CHECKOUT
    python tools/measure/flashinfer_tests.py CHECKOUT results/flashinfer/tests.json --seed 0

Needs nbflow, pytest, PyTorch (CPU), SciPy and einops.  The test files run unmodified; their package
is the stand-in of `flashinfer_stand_in.py`.  Of each test function `--each` parametrisations are
drawn (`--more` in the files of `MANY`); `--again FILE` runs those of an earlier file instead.
Outcomes are written after each test file; files that are there already are not run again
(``--files`` names some to run anyway).  `--table` prints the table of `docs/comparison.md`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parents[1]
FILES = [
    f"{folder}/{name}"
    for folder, names in (
        ("utils", (
            "activation", "norm", "quantization", "sampling", "topk", "triton_cascade",
        )),
        ("attention", (
            "alibi", "attention_sink", "batch_attention", "batch_decode_kernels",
            "batch_invariant_fa2", "batch_prefill", "batch_prefill_kernels", "block_sparse",
            "decode_fp8_calibration_scale", "hopper", "logits_cap", "mla_page",
            "non_contiguous_decode", "non_contiguous_prefill", "page", "rope",
            "shared_prefix_kernels", "single_prefill", "sliding_window", "tensor_cores_decode",
        )),
        ("gemm", (
            "group_gemm",
        )),
    )
    for name in names
]  # fmt: skip
"""Test files of ops that nbflow_kernels has; the others test libraries of GPUs."""
MANY = ("norm", "topk")
NOT_DRAWN = ("int64_stride", "contiguous_overflow", "cuda_graph")
"""Parts of names of tests that allocate more than 4 GB, or capture graphs of a device."""
LIMIT_S = 20
"""Processor seconds of a test."""
OUTCOMES = (
    "passed", "no counterpart", "refused", "meaningless on a CPU", "skipped", "over the limit",
    "another message", "no error", "failed",
)  # fmt: skip
_GPU_ONLY = re.compile(
    "row_states_buffer|rejects_capture|_compilation_|use_tensor_cores|_plan_info|CUDAGraph"
    "|catching classes"
)
_ABSENT = re.compile(r"NoCounterpart|unexpected keyword|positional arguments but|has no attribute")


def outcome_of(test: str, outcome: str, reason: str) -> str:
    """Classify a test by pytest's outcome and the first line of its error."""
    if outcome in ("passed", "skipped"):
        return outcome
    if _GPU_ONLY.search(test) or _GPU_ONLY.search(reason):
        return "meaningless on a CPU"
    if reason.startswith("OverLimit"):
        return "over the limit"
    if _ABSENT.search(reason):
        return "no counterpart"
    if "Regex pattern did not match" in reason:
        return "another message"
    if "DID NOT RAISE" in reason:  # what FlashInfer refuses is computed
        return "no error"
    return "refused" if reason.startswith(("UsageError", "TypeError")) else "failed"


# ---- pytest plugin in the process of the tests --------------------------------------------------


class OverLimit(Exception):
    """The test takes more than `LIMIT_S` seconds of processor time."""


def _over_limit(*_: Any) -> None:
    raise OverLimit(f"more than {LIMIT_S} s of processor time")


class Sampler:
    """Keep the drawn tests, limit their time, and write their outcomes."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.chosen = chosen

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Draw parametrisations of each function."""
        items[:] = [item for item in items if item.nodeid not in self.chosen["done"]]
        if self.chosen["tests"] is not None:
            wanted = set(self.chosen["tests"])
            items[:] = [item for item in items if item.nodeid in wanted]
            return
        functions = collections.defaultdict(list)
        for item in items:
            if not any(part in item.nodeid for part in NOT_DRAWN):
                functions[item.nodeid.partition("[")[0]].append(item)
        kept = []
        for name, all_of_it in functions.items():
            many = any(f"test_{file}.py" in name for file in MANY)
            n = min(len(all_of_it), self.chosen["more" if many else "each"])
            draw = random.Random(f"{self.chosen['seed']} {name}")
            kept += sorted(draw.sample(all_of_it, n), key=items.index)
        items[:] = kept

    def pytest_runtest_setup(self, item: Any) -> None:
        """Start the clock; a call of a kernel that takes twice the limit ends the process."""
        signal.signal(signal.SIGPROF, _over_limit)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        Path(f"{self.chosen['out']}.running").write_text(item.nodeid, encoding="utf-8")
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + 2 * LIMIT_S
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Write a line for each test."""
        signal.setitimer(signal.ITIMER_PROF, 0 if call.when == "call" else LIMIT_S)
        error = call.excinfo
        if call.when == "teardown" or (call.when == "setup" and error is None):
            return
        reason = "" if error is None else f"{error.typename}: {error.value}".split("\n")[0]
        found = "passed" if error is None else "failed"
        if error is not None and error.typename in ("Skipped", "XFailed"):
            found, reason = "skipped", str(error.value)
        row = {
            "test": item.nodeid, "outcome": outcome_of(item.nodeid, found, reason),
            "reason": reason[:160],
        }  # fmt: skip
        with open(self.chosen["out"], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config: Any) -> None:
    """Register the sampler in the process of the tests."""
    config.pluginmanager.register(Sampler(json.loads(os.environ["FLASHINFER_SAMPLE"])))


# ---- the command --------------------------------------------------------------------------------


def run_file(checkout: Path, file: str, chosen: dict[str, Any]) -> list[dict[str, str]]:
    """Run the chosen tests of a file in a new process, and return their outcomes."""
    out = Path(chosen["out"])
    out.unlink(missing_ok=True)
    paths = (TOOLS, ROOT / "kernels", os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ, "FLASHINFER_CHECKOUT": str(checkout), "OMP_NUM_THREADS": "1",
        "FLASHINFER_SAMPLE": json.dumps(chosen), "PYTHONPATH": ":".join(map(str, paths)),
    }  # fmt: skip
    folder, _, name = file.partition("/")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "flashinfer_stand_in",
        "-p",
        "flashinfer_tests",
    ]
    command += ["-p", "no:cacheprovider", "-q", "--tb=no", "-rN", f"tests/{folder}/test_{name}.py"]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE)
    rows = []
    if out.exists():
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        out.unlink()
    running = Path(f"{out}.running")
    test = running.read_text(encoding="utf-8") if running.exists() else ""
    running.unlink(missing_ok=True)
    if done.returncode == -signal.SIGXCPU and test:
        limit = {"test": test, "outcome": "over the limit", "reason": f"over {2 * LIMIT_S} s"}
        known = [*chosen["done"], *(row["test"] for row in rows), test]
        return [*rows, limit, *run_file(checkout, file, {**chosen, "done": known})]
    if not rows:
        print(done.stdout.decode()[-2000:], file=sys.stderr)
    return rows


def file_of(test: str) -> str:
    """Return the name of a test's file, without folder and ``test_``."""
    return Path(test.partition("::")[0]).stem.removeprefix("test_")


def table(tests: list[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of the table by test file, those that passed whole in one."""
    groups = {
        "passed": ("passed",), "no counterpart": ("no counterpart",), "refused": ("refused",),
        "meaningless on a CPU, or skipped by the test": ("meaningless on a CPU", "skipped"),
        f"over {LIMIT_S} s": ("over the limit",),
        "another error, or none": ("another message", "no error"), "wrong": ("failed",),
    }  # fmt: skip
    yield f"| test file | drawn | {' | '.join(groups)} |"
    yield "|---" * (len(groups) + 2) + "|"
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for test in tests:
        for name in (file_of(test["test"]), "all"):
            counts[name][test["outcome"]] += 1
    files = sorted(counts.keys() - {"all"})
    whole = [name for name in files if set(counts[name]) == {"passed"}]
    counts[", ".join(whole)] = sum((counts[name] for name in whole), collections.Counter())
    for name in (*sorted(set(files) - set(whole)), ", ".join(whole), "all"):
        cells = [sum(counts[name][o] for o in outcomes) for outcomes in groups.values()]
        yield f"| {name} | {sum(cells)} | {' | '.join(map(str, cells))} |"


def _commit() -> str:
    """Return the commit of the checkout of nbflow."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().strip()


def _facts(checkout: Path, chosen: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    """Return what the outcomes depend on; `commits` are those of nbflow, by test file."""
    return {
        "what": "FlashInfer's tests through a stand-in for its package, on the CPU",
        "flashinfer_version": (checkout / "version.txt").read_text().strip(),
        "torch": version("torch"), "measured": datetime.date.today().isoformat(),
        "commits": done.get("commits", {}),
        **{name: chosen[name] for name in ("seed", "each", "more")},
    }  # fmt: skip


def _place(file: str, wanted: list[str]) -> int:
    """Return the place of a test file in a run: the order of those that are wanted."""
    name = file.partition("/")[2]
    return wanted.index(name) if name in wanted else len(wanted)


def main() -> None:
    """Run the tests, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--more", type=int, default=12, help="tests per function of norm and topk")
    parser.add_argument("--again", type=Path, help="run the tests of this file")
    parser.add_argument("--files", nargs="*", default=[], help="run these again, e.g. norm page")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    given = parser.parse_args()
    done = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    tests = done.get("tests", [])
    if given.table:
        print("\n".join(table(tests)))
        return
    again = json.loads(given.again.read_text(encoding="utf-8"))["tests"] if given.again else None
    chosen = {
        "seed": given.seed, "each": given.each, "more": given.more,
        "out": f"{given.out.resolve()}.lines",
        "tests": None if again is None else [test["test"] for test in again], "done": [],
    }  # fmt: skip
    facts = _facts(given.checkout, chosen, done)
    order = sorted(FILES, key=lambda file: _place(file, given.files))
    for file in order:
        name = file.partition("/")[2]
        old = [test for test in tests if file_of(test["test"]) == name]
        if (old or given.files) and name not in given.files:
            continue
        tests = [test for test in tests if test not in old]
        facts["commits"][name] = _commit()
        tests += run_file(given.checkout.resolve(), file, chosen)
        tests.sort(key=lambda test: test["test"])
        text = json.dumps({**facts, "tests": tests}, indent=1) + "\n"
        given.out.write_text(text, encoding="utf-8")
        counts = collections.Counter(t["outcome"] for t in tests if file_of(t["test"]) == name)
        print(name, dict(counts), flush=True)


if __name__ == "__main__":
    main()

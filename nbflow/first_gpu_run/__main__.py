"""Command line of the first run on a GPU: ``python -m nbflow.first_gpu_run --out DIR``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from nbflow.first_gpu_run import summary, supervise
from nbflow.first_gpu_run.journal import NO_TIME, Journal
from nbflow.first_gpu_run.sections import SECTIONS, Section, section
from nbflow_kernels.cuda import bundle
from nbflow_kernels.errors import MissingExtraError, UsageError

SUMMARY = "summary.txt"
BUDGET_S = 600.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nbflow.first_gpu_run",
        description="Facts, probes, benchmarks, models and tests of a GPU, within a time limit.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="results; begun runs go on")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="SECONDS",
        help=f"time for all sections (default: {BUDGET_S:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "--sections", metavar="NAME,...", help="run these, finished or not; default: all unfinished"
    )
    parser.add_argument("--list", action="store_true", help="list the sections")
    parser.add_argument("--emulator", action="store_true", help="small shapes, emulated device")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help="compiled kernels to use, from --write-bundle"
    )
    parser.add_argument(
        "--write-bundle", type=Path, metavar="FILE",
        help="compile all kernels of a run into a file and end; needs compilers, no GPU",
    )  # fmt: skip
    parser.add_argument("--arch", default="sm_90", help="target of --write-bundle (default: sm_90)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes of --write-bundle"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code (1: a section failed, 2: wrong usage)."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.list:
            for each in SECTIONS:
                print(f"{each.name:<16} {each.limit_s:4.0f} s  {each.about}")
            return 0
        if arguments.write_bundle is not None:
            return _write_bundle(arguments)
        return _run(arguments)
    except (UsageError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _write_bundle(arguments: argparse.Namespace) -> int:
    from nbflow.first_gpu_run.compile_ahead import write_bundle

    line, wrong = write_bundle(arguments.write_bundle, arguments.arch, max(1, arguments.jobs))
    print(*wrong, line, sep="\n")
    return 1 if wrong else 0


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out is None:
        raise UsageError("--out DIR names the folder for the results")
    if not arguments.budget > 0:
        raise UsageError(f"--budget must be above 0, got {arguments.budget}")
    if arguments.bundle is not None:
        os.environ[bundle.VARIABLE] = str(arguments.bundle.absolute())
    bundle.current()  # a bad file is an error now, not one of each section
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = _choose(arguments.sections, arguments.out)
    journal = supervise.run(
        arguments.out, chosen, arguments.budget, arguments.emulator,
        lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    text = summary.text(journal, SECTIONS)
    (arguments.out / SUMMARY).write_text(text, encoding="utf-8")
    print(text, end="")
    failed = {journal.ends[s.name]["status"] for s in chosen} - {"ok", "skipped", NO_TIME}
    return 1 if failed else 0


def _choose(names: str | None, folder: Path) -> list[Section]:
    """Return the named sections, or those that no earlier run has finished."""
    if names is not None:
        return [section(name.strip()) for name in names.split(",")]
    earlier = Journal(folder)
    return [each for each in SECTIONS if not earlier.is_finished(each.name)]


if __name__ == "__main__":
    sys.exit(main())

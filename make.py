#!/usr/bin/env python3
"""Set up nbflow in .venv and run the demo or the tests.

Every command is printed before it runs, so that you can type it yourself.

    python3 make.py demo     install, run the demo sweep on 4 MPI ranks, draw its report
    python3 make.py check    install, run linters and a quick subset of the tests
    python3 make.py test     install, run all tests
    python3 make.py docs     install, build the documentation as a site: site/index.html

Needs Python 3.11 or newer with venv and pip, and nothing else: MPI comes from a pip wheel.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
BIN = ROOT / ".venv" / "bin"
RESULTS = "runs"
QUICK_TESTS = (
    *("tests/test_imports.py", "tests/docs/test_site.py", "tests/docs/test_architecture_page.py"),
    *("tests/utils", "tests/spec", "tests/planner", "tests/checkpoint"),
    *("tests/tokenization", "tests/compat", "tests/cli"),
)
"""Folders of `make.py check`: every package of nbflow, no long compilation."""


def show(*command: str) -> None:
    """Print a command as one would type it in this folder."""
    words = [w.replace(f"{ROOT}/", "") for w in command]
    print(f"$ {shlex.join(words)}", flush=True)


def call(*command: str) -> None:
    """Print and run a command; end with its exit code if it fails."""
    show(*command)
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        sys.exit(code)


def install(extras: str) -> None:
    """Make .venv and install nbflow into it, unless it is there already."""
    stamp = ROOT / ".venv" / f"installed-{extras.replace(',', '-')}"
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    if not (BIN / "pip").exists():
        show("python3", "-m", "venv", ".venv")
        venv.create(ROOT / ".venv", with_pip=True)
    # Python compiles modules when it first imports them; most of what is installed it never does
    call(str(BIN / "pip"), "install", "--quiet", "--no-compile", "-e", f".[{extras}]")
    stamp.write_text(digest)


def demo() -> None:
    """Run the demo sweep and its report."""
    install("mpi,experiments")
    nbflow = str(BIN / "nbflow")
    sweep = "experiments/sweeps/demo.toml"
    call(str(BIN / "mpirun"), "-n", "4", nbflow, "sweep", sweep, "--out", RESULTS, "--resume")
    call(nbflow, "report", f"{RESULTS}/demo")


def has_cuda_compilers() -> bool:
    """Return whether there are wheels of the CUDA compilers for this computer."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def check(arguments: list[str]) -> None:
    """Run linters, import contracts and the quick tests; further words go to pytest."""
    install_for_tests()
    call(str(BIN / "ruff"), "check", ".")
    call(str(BIN / "ruff"), "format", "--check", ".")
    os.environ["PYTHONPATH"] = ".:kernels:specs:experiments"  # lint-imports reads sources
    call(str(BIN / "lint-imports"))
    del os.environ["PYTHONPATH"]
    run_pytest(*QUICK_TESTS, *arguments)


def test(arguments: list[str]) -> None:
    """Run all tests; further words go to pytest."""
    install_for_tests()
    run_pytest(*arguments)


def install_for_tests() -> None:
    """Install the package with what the tests need."""
    install("mpi,experiments,serve,dev" + (",cuda-test" if has_cuda_compilers() else ""))


def run_pytest(*arguments: str) -> None:
    """Run pytest with one process per processor, up to eight."""
    processes = str(min(8, len(os.sched_getaffinity(0))))
    order = ("--dist", "loadfile", "--no-loadscope-reorder")  # that of tests/conftest.py
    # Tests start hundreds of processes; each would compile every module that it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    slowest = ("--durations=25", "--durations-min=5")
    call(str(BIN / "python"), "-m", "pytest", "-q", "-n", processes, *order, *slowest, *arguments)


def docs() -> None:
    """Build the site; a link that leads nowhere fails."""
    install("experiments,serve,docs")
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # about versions that the extra excludes
    call(str(BIN / "python"), "-m", "mkdocs", "build", "--quiet")
    print("site/index.html")


def main() -> None:
    """Do what the first word says."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this script must say so itself
        sys.exit(f"nbflow needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    match sys.argv[1:]:
        case ["demo"]:
            demo()
        case ["check", *arguments]:
            check(arguments)
        case ["test", *arguments]:
            test(arguments)
        case ["docs"]:
            docs()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()

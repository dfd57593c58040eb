"""Compiles the kernels of all ops for a device, by many processes, without the device.

    python -m nbflow_kernels.cuda.compile_all [OP ...] [--arch sm_90] [--jobs N] [--timed]

What runs afterwards finds them on disk (`nbflow_kernels.cuda.cubins`): the first minutes of a short
session on a device need not go to a compiler.  Every case of the ops is run on arrays of
`nbflow_ptx.cupy_stand_in`, with kernels that are compiled and then do nothing.  Machines whose
compilers have the same versions can share the folder, also one that has no device.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import nbflow_kernels
from nbflow_kernels import checking
from nbflow_kernels.cuda import cubins, nvrtc
from nbflow_kernels.cuda.errors import CompileError
from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name
from nbflow_kernels.families import NO_CUDA, all_cases
from nbflow_kernels.opcase import OpCase

N_SMS = 132
"""Streaming multiprocessors that launches are divided for: those of an H100 or H200."""
MEMORY_BYTES = 16 << 30
"""Of which only what is written takes room."""


def compile_all(cases: Sequence[OpCase], arch: str, n_jobs: int) -> list[str]:
    """Compile what cases launch, each in one of `n_jobs` processes; return what went wrong.

    Parameters
    ----------
    cases : sequence of OpCase
        Those of ops without a CUDA variant are left out.
    arch : str
        ``sm_80``, ``sm_90``, ...
    n_jobs : int
        Processes.

    Raises
    ------
    MissingExtraError
        If a compiler is not installed.
    """
    nvrtc.version()
    names = [case.id for case in cases if case.op not in NO_CUDA]
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_jobs, processes, _start, (arch,)) as pool:
        try:
            answers = list(pool.map(_compile, names))
        except BrokenProcessPool as error:
            return [f"a process has died: {error}"]
    return [answer for answer in answers if answer]


def _start(arch: str) -> None:
    """Let the arrays of this process live on a device that only compiles."""
    stand_in = importlib.import_module("nbflow_ptx.cupy_stand_in")
    stand_in.reset(memory_bytes=MEMORY_BYTES, arch=arch)
    made: Any = type(stand_in.ndarray.__kernel_device__)

    class OnlyCompiles(made):  # type: ignore[misc]
        output = "cubin"
        n_sms = N_SMS

        def load(self, code: bytes, entry: str) -> Callable[..., None]:
            return lambda *_: None

    stand_in.ndarray.__kernel_device__ = OnlyCompiles(
        stand_in.empty, stand_in.asarray, stand_in.mapped
    )


def _compile(name: str) -> str:
    """Compile what a case launches; return why it could not be, or nothing."""
    stand_in = importlib.import_module("nbflow_ptx.cupy_stand_in")
    case = next(case for case in all_cases() if case.id == name)
    arguments, out = checking.make_inputs(case), checking.make_out(case)
    try:
        arguments, out = checking.placed(case, arguments, out, checking.placer(stand_in))
        getattr(nbflow_kernels, case.op)(**arguments, **out)
    except (CompileError, MissingExtraError) as error:
        return f"{name}: {error}"
    except Exception:  # the numbers are none that kernels have made; what is left out comes later
        pass
    return ""


def choose(ops: Sequence[str], timed: bool) -> list[OpCase]:
    """Return the cases of some ops, or of all; the timed ones alone, large and in front, if asked.

    Raises
    ------
    UsageError
        If there is no such op.
    """
    cases = [case for case in all_cases() if case.timed or not timed]
    for name in ops:
        if not any(case.op == name for case in cases):
            raise unknown_name("op", name, sorted({case.op for case in cases}))
    return [case for case in cases if not ops or case.op in ops]


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code (1: a compiler refused something, 2: wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m nbflow_kernels.cuda.compile_all",
        description="Compile the CUDA kernels of ops ahead, for a device that need not be here.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops (default: all)")
    parser.add_argument("--arch", default="sm_90", help="what for (default: sm_90)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--timed", action="store_true", help="only what the benchmark takes")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        if arguments.jobs < 1:
            raise UsageError(f"--jobs must be at least 1, got {arguments.jobs}")
        cases = choose(arguments.ops, arguments.timed)
        wrong = compile_all(cases, arguments.arch, arguments.jobs)
    except (UsageError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in wrong:
        print(line, file=sys.stderr)
    n_kernels = len(list(cubins.folder().glob("*.cubin")))
    print(
        f"{len(cases)} cases in {time.perf_counter() - started:.0f} s; "
        f"{n_kernels} kernels in {cubins.folder()}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

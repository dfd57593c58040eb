"""Compiles the kernels of all ops for a device, by many processes, without the device.

    python -m nbflow_kernels.testing.cuda_compile_all [OP ...] [--arch sm_90] [--jobs N] [--timed]
                                                      [--bundle FILE]

What runs afterwards finds them on disk (`nbflow_kernels.cuda.cache`): the first minutes of a short
session on a device need not go to a compiler.  Every case of the ops is run on arrays of
`nbflow_ptx.cupy_stand_in`, with kernels that are compiled and then do nothing; what a device has
too few registers or too little shared memory for is an error.  Machines whose compilers have the
same versions can share the folder, also one that has no device; a bundle serves machines with any
compilers, or none.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import nbflow_kernels
from nbflow_kernels.cuda import bundle, cache, nvrtc
from nbflow_kernels.cuda.devices import Dim3, Launch
from nbflow_kernels.cuda.errors import CompileError, CudaError
from nbflow_kernels.cuda.workspace import release
from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import NO_CUDA, all_cases
from nbflow_kernels.testing import checks

N_SMS = 132
"""Streaming multiprocessors that launches are divided for: those of an H100 or H200."""
MEMORY_BYTES = 4 << 30
"""Memory for the arrays of a case; untouched pages take none."""
LEFT_OUT = "left out: "
"""Begins what `compile_all` says of cases that end early, as no kernel has made their numbers."""
_REGISTERS = 16384
"""Registers of a quarter of a multiprocessor, which runs every fourth warp of a thread block."""


Used = dict[Path, str]
"""Files of the cache's folder -> digests of their kernels; see `cache.used`."""


def compile_all(
    cases: Sequence[OpCase], arch: str, n_jobs: int, used: Used | None = None
) -> list[str]:
    """Compile the kernels of cases in `n_jobs` processes; return failures and omissions.

    Cases of ops without a CUDA variant are left out; the kernels' files are added to `used`.
    Raises `MissingExtraError` if a compiler is not installed.
    """
    names = [case.id for case in cases if case.op not in NO_CUDA]
    return compile_tasks(_compile, names, arch, n_jobs, {} if used is None else used)


def compile_tasks(
    task: Callable[[str], str], names: Sequence[str], arch: str, n_jobs: int, used: Used
) -> list[str]:
    """Run a task for each name in processes whose device only compiles; return its messages.

    `task` is a function of a module; an empty string means success.

    Raises
    ------
    MissingExtraError
        If a compiler is not installed.
    UsageError
        If NVRTC does not know the architecture and would make PTX.
    """
    known = nvrtc.supported_archs()
    if nvrtc.target(arch, "cubin")[1] != "cubin":
        raise UsageError(
            f"NVRTC {nvrtc.version()} knows architectures up to sm_{known[-1]}, got {arch}; "
            "machine code for it needs a newer NVRTC"
        )
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_jobs, processes, _start, (arch,)) as pool:
        try:
            answers = list(pool.map(partial(_noting, task), names))
        except BrokenProcessPool as error:
            return [f"a compiling process died: {error}"]
    for _, found in answers:
        used |= found
    return [message for message, _ in answers if message]


def _noting(task: Callable[[str], str], name: str) -> tuple[str, Used]:
    """Run a task; return its message and the kernels that this process had not used before."""
    before = set(cache.used)
    message = task(name)
    return message, {path: key for path, key in cache.used.items() if path not in before}


def write_bundle(path: Path, arch: str, used: Used) -> str:
    """Write the kernels to a bundle; return a line about it."""
    found = [cache.bundled(file, key) for file, key in used.items()]
    kernels = [kernel for kernel in found if kernel is not None]
    n_bytes = bundle.write(path, arch, kernels)
    whole = sum(len(kernel.code) for kernel in kernels)
    return (
        f"{path}: {len(kernels)} kernels for {arch}, {n_bytes / 1e6:.1f} MB ({whole / 1e6:.1f} MB "
        "uncompressed)"
    )


def check_launch(cubin: bytes, entry: str, block: Dim3, shared: int, most_shared: int) -> None:
    """Raise `CudaError` if a thread block needs more than a multiprocessor has.

    `shared` are bytes of dynamic shared memory; `most_shared` bounds static and dynamic together.
    """
    facts = importlib.import_module("nbflow_ptx").lint(cubin)[entry]
    n_warps = -(-math.prod(block) // 32)
    if -(-facts.registers // 8) * 8 * 32 * -(-n_warps // 4) > _REGISTERS:
        raise CudaError(
            f"{entry}: {facts.registers} registers of {math.prod(block)} threads are too many"
        )
    if facts.static_shared_bytes + shared > most_shared:
        raise CudaError(
            f"{entry}: {facts.static_shared_bytes} static and {shared} dynamic bytes of shared "
            f"memory, a thread block has {most_shared}"
        )


def _start(arch: str) -> None:
    """Put the arrays of this process on a device that only compiles."""
    stand_in = importlib.import_module("nbflow_ptx.cupy_stand_in")
    stand_in.reset(memory_bytes=MEMORY_BYTES, arch=arch)
    made: Any = type(stand_in.ndarray.__kernel_device__)

    class OnlyCompiles(made):  # type: ignore[misc]
        output = "cubin"
        n_sms = N_SMS

        def load(self, code: bytes, entry: str) -> Launch:
            def launch(grid: Dim3, block: Dim3, packed: bytes, shared: int) -> None:
                check_launch(code, entry, block, shared, self.max_shared_bytes)

            return launch

    stand_in.ndarray.__kernel_device__ = OnlyCompiles(
        stand_in.empty, stand_in.asarray, stand_in.mapped
    )


def _compile(name: str) -> str:
    """Compile the kernels of a case; return the reason of a failure, or None."""
    stand_in = importlib.import_module("nbflow_ptx.cupy_stand_in")
    case = next(case for case in all_cases() if case.id == name)
    arguments, out = checks.make_inputs(case), checks.make_out(case)
    try:
        arguments, out = checks.placed(case, arguments, out, checks.placer(stand_in))
        getattr(nbflow_kernels, case.op)(**arguments, **out)
    except (CompileError, CudaError, MissingExtraError) as error:
        return f"{name}: {error}"
    except Exception as error:
        return f"{LEFT_OUT}{name}: {type(error).__name__}: {error}"
    finally:
        device = stand_in.ndarray.__kernel_device__
        release(device.key, device.stream)
        stand_in.reset(memory_bytes=MEMORY_BYTES, arch=device.arch)
    return ""


def choose(ops: Sequence[str], timed: bool) -> list[OpCase]:
    """Return the cases of some ops, or of all; the timed ones alone, large and in front, if asked.

    Raises
    ------
    UsageError
        If the op is unknown.
    """
    cases = [case for case in all_cases() if case.timed or not timed]
    for name in ops:
        if not any(case.op == name for case in cases):
            raise unknown_name("op", name, sorted({case.op for case in cases}))
    return [case for case in cases if not ops or case.op in ops]


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code (1: a compiler refused something, 2: wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m nbflow_kernels.testing.cuda_compile_all",
        description="Compile the CUDA kernels of ops ahead, for a device that need not be here.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops (default: all)")
    parser.add_argument("--arch", default="sm_90", help="compilation target (default: sm_90)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--timed", action="store_true", help="only the benchmark's cases")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help="also write the kernels to one compressed file"
    )
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        if arguments.jobs < 1:
            raise UsageError(f"--jobs must be at least 1, got {arguments.jobs}")
        if arguments.bundle is not None:
            os.environ.pop(bundle.VARIABLE, None)  # a bundle holds what is in the folder
            if not arguments.bundle.parent.is_dir():
                raise UsageError(f"--bundle: folder {arguments.bundle.parent} does not exist")
        cases = choose(arguments.ops, arguments.timed)
        used: Used = {}
        wrong = compile_all(cases, arguments.arch, arguments.jobs, used)
    except (UsageError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in wrong:
        print(line, file=sys.stderr)
    n_kernels = len(list(cache.folder().glob("*.cubin")))
    print(
        f"{len(cases)} cases in {time.perf_counter() - started:.0f} s; "
        f"{n_kernels} kernels in {cache.folder()}"
    )
    if arguments.bundle is not None:
        print(write_bundle(arguments.bundle, arguments.arch, used))
    return 0 if all(line.startswith(LEFT_OUT) for line in wrong) else 1


if __name__ == "__main__":
    sys.exit(main())

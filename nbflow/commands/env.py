"""`nbflow env`: versions, processor and MPI, for bug reports and provenance."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from nbflow_kernels.threads import available_cores

PACKAGES = (
    "nbflow",
    "numpy",
    "numba",
    "llvmlite",
    "tokenizers",
    "mpi4py",
    "mpich",
    "h5py",
    "pandas",
    "matplotlib",
    "rich",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba-cuda",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    facts = environment()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for name, text in value.items():
                print(f"  {name:<14} {text}")
        else:
            print(f"{key:<16} {value}")
    return 0


def environment() -> dict[str, Any]:
    """Return what a result depends on besides the code and the data."""
    from nbflow_kernels._jit import cache_folder

    names = ("NUMBA_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "cores_available": available_cores(),
        "memory_bytes": _memory_bytes(),
        "kernel_cache": str(cache_folder()),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(names)},
    }


def processor_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"

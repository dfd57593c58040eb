"""Where results come from: code, packages, machine, ranks, inputs."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from nbflow_experiments.engine import Comm

_PACKAGES = (
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
    "cupy-cuda12x",
    "cupy-cuda13x",
)
_VARIABLES = re.compile(r"(NUMBA|NBFLOW|OMP|OPENBLAS|MKL|CUDA|SLURM|GOMP)_\w+")


def describe_rank() -> dict[str, Any]:
    """Return what differs between ranks: host, process, cores, environment."""
    return {
        "host": socket.gethostname(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": _memory_bytes(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(k)},
    }


def describe_launch(comm: Comm, argv: list[str]) -> dict[str, Any] | None:
    """Return the provenance of one launch on rank 0, None elsewhere; every rank must call it.

    Parameters
    ----------
    comm : Comm
        All ranks of the launch.
    argv : list of str
        The command line.
    """
    ranks = comm.gather_object(describe_rank())
    if ranks is None:
        return None
    return {
        "started": now(),
        "finished": None,
        "command": argv,
        "git": git_state(Path(__file__).parent),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": versions(),
        "mpi": mpi_library(comm),
        "world_size": comm.size,
        "ranks": ranks,
    }


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of the packages that results can depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and whether files differ from it; None outside a checkout or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "-uno"))}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command, None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def mpi_library(comm: Comm) -> str | None:
    """Return the MPI library's own words for itself; None without MPI."""
    if comm.size == 1:
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return str(MPI.Get_library_version()).strip().split("\n")[0]


def cpu_model() -> str:
    """Return the name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def _memory_bytes() -> int | None:
    """Return the size of the main memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None

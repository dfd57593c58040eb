"""Provenance of results: code, packages, machine, ranks, inputs."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from nbflow.utils import system
from nbflow_experiments.backend import Comm
from nbflow_experiments.store.gpu_facts import describe_cuda, describe_gpus
from nbflow_kernels.plugins import loaded_plugins


def describe_rank() -> dict[str, Any]:
    """Return the per-rank facts: host, cores, environment, GPUs (None without)."""
    return {
        "host": socket.gethostname(),
        "cpu_model": system.processor_name(),
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": system.memory_bytes(),
        "environment": system.relevant_variables(),
        "plugins": [plugin.facts for plugin in loaded_plugins()],
        "gpus": describe_gpus(),
        "cuda": describe_cuda(),
    }


def describe_launch(comm: Comm, argv: list[str]) -> dict[str, Any] | None:
    """Return the provenance of one launch on rank 0, None elsewhere; every rank must call it."""
    ranks = comm.gather_object(describe_rank())
    if ranks is None:
        return None
    return {
        "started": now(),
        "finished": None,
        "command": argv,
        "git": git_state(Path(__file__)),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": system.package_versions(),
        "mpi": mpi_library(comm),
        "world_size": comm.size,
        "ranks": ranks,
    }


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def launch_name() -> str:
    """Return a new name for a launch; names sort by time."""
    time = datetime.datetime.now(datetime.UTC)
    return f"{time:%Y%m%dT%H%M%S.%fZ}-{uuid.uuid4().hex[:8]}"


def git_state(file: Path) -> dict[str, Any] | None:
    """Return the commit that a file belongs to and whether the checkout differs from it.

    None without git, and for untracked files: an installed package may lie inside the checkout of
    another project.
    """
    folder = file.parent
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
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
    """Return the version string of the MPI library; None without MPI."""
    if comm.size == 1:
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return str(MPI.Get_library_version()).strip().split("\n")[0]

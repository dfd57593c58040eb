"""Launchers of MPI ranks: the variables that they set, and the search for mpirun."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from nbflow_kernels.errors import MissingExtraError, install_command

PROGRAM = (sys.executable, "-P", "-m", "nbflow")
"""Words that run the command line; -P keeps the current folder's modules out of it."""
LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
"""Variables for rank and number of ranks: MPICH and Intel MPI, Open MPI, Slurm with PMIx."""


def launched_as() -> tuple[int, int] | None:
    """Return rank and number of ranks that a launcher's variables state, or None."""
    for rank, size in LAUNCHERS:
        try:
            return int(os.environ[rank]), int(os.environ[size])
        except (KeyError, ValueError):
            continue
    return None


def find_mpirun() -> str:
    """Return the launcher next to this Python, or the one in the path.

    Raises
    ------
    MissingExtraError
        If neither exists.
    """
    local = Path(sys.executable).with_name("mpirun")
    found = str(local) if local.exists() else shutil.which("mpirun")
    if found is None:
        raise MissingExtraError(
            f"mpirun was not found; install MPI and its launcher: {install_command('mpi')}"
        )
    return found

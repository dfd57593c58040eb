"""`nbflow launch`: run a command on several MPI ranks.

``nbflow launch -n 4 serve MODEL --partition "0&1;2&3"`` becomes ``mpirun -n 4 nbflow serve ...``:
the launcher replaces this process, so that signals and the exit code are the launcher's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys

from nbflow.distributed.launch import PROGRAM, find_mpirun
from nbflow_kernels.errors import UsageError, unknown_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("-n", "--ranks", type=int, required=True, help="ranks to start")
    parser.add_argument(
        "--mpirun",
        metavar="COMMAND",
        help="launcher and its options, e.g. 'mpirun -hosts a,b -ppn 2' (mpirun)",
    )
    parser.add_argument("command", help="command of nbflow: serve, sweep, run, ...")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process with the launcher."""
    from nbflow.cli import COMMANDS

    if arguments.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, got {arguments.ranks}")
    others = {name: about for name, about in COMMANDS.items() if name != "launch"}
    if arguments.command not in others:
        raise unknown_name("command", arguments.command, others)
    launcher = shlex.split(arguments.mpirun or "") or [find_mpirun()]
    if shutil.which(launcher[0]) is None:
        raise UsageError(f"--mpirun: the program {launcher[0]!r} was not found")
    ranks = ["-n", str(arguments.ranks)]
    sys.stdout.flush()
    os.execvp(launcher[0], [*launcher, *ranks, *PROGRAM, arguments.command, *arguments.arguments])

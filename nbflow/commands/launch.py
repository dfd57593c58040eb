"""`nbflow launch`: start a command on several ranks, and say what happens when one fails.

``nbflow launch -n 4 --on-rank-failure restart serve MODEL --partition "0&1;2&3"`` is ``mpirun -n 4
nbflow serve ...``, started again when a rank dies, hangs or runs out of memory.  A server's address
is kept by this process, so that clients are answered meanwhile.
"""

from __future__ import annotations

import argparse
import shlex
import socket
from typing import TYPE_CHECKING

from nbflow.launch import POLICIES, PROGRAM, Launch, find_mpirun
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow.server.config import ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("-n", "--ranks", type=int, required=True, help="ranks to start")
    parser.add_argument(
        "--on-rank-failure",
        metavar="P",
        default="exit",
        help="when a rank fails and all have ended: exit (with its code), or restart (exit)",
    )
    parser.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="most restarts in a row (10)"
    )
    parser.add_argument(
        "--mpirun",
        metavar="COMMAND",
        help="launcher and its options, e.g. 'mpirun -hosts a,b -ppn 2' (mpirun)",
    )
    parser.add_argument(
        "--no-front", dest="front", action="store_false",
        help="let rank 0 of serve listen itself: for a rank 0 on another host",
    )  # fmt: skip
    parser.add_argument("command", help="command of nbflow: serve, sweep, run, ...")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nbflow.cli import COMMANDS

    if arguments.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, got {arguments.ranks}")
    if arguments.on_rank_failure not in POLICIES:
        raise unknown_name("policy --on-rank-failure", arguments.on_rank_failure, POLICIES)
    others = {name: about for name, about in COMMANDS.items() if name != "launch"}
    if arguments.command not in others:
        raise unknown_name("command", arguments.command, others)
    launcher = shlex.split(arguments.mpirun) if arguments.mpirun else [find_mpirun()]
    program = [*PROGRAM, arguments.command, *arguments.arguments]
    launch = Launch(
        [*launcher, "-n", str(arguments.ranks), *program],
        arguments.on_rank_failure,
        arguments.restarts,
    )
    served = _served(arguments)
    if served is None:
        return launch.run()
    from nbflow.front.front import Front

    limits = served.limits
    with Front(
        served.host, served.port, limits.connections, limits.header_s, limits.slow_reader_s
    ) as launch.front:
        return launch.run()


def _served(arguments: argparse.Namespace) -> ServerConfig | None:
    """Return what is to be served behind an address that this process keeps, if that is so."""
    if not arguments.front or arguments.command != "serve" or not hasattr(socket, "AF_UNIX"):
        return None
    from nbflow.cli import make_parser
    from nbflow.commands.serve import configuration, need_extra

    need_extra()
    parsed = make_parser("serve").parse_args(arguments.arguments)
    config = configuration(parsed)
    return None if parsed.check or parsed.plan else config

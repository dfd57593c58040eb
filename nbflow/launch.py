"""Start a command's ranks with mpirun, and start them again when one of them fails.

A launcher ends all ranks when one ends badly, and MPI cannot take a new one in, so whoever wants a
service back starts all of them again.  `Launch` does that: the policy ``restart`` waits a little,
longer each time, and gives up after a number of starts that did not live long.  Wrong usage
(exit code 2) and a signal to this process end it at once.  Of a server, a `Front` keeps the address
meanwhile, and answers clients.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from nbflow_kernels.errors import MissingExtraError, UsageError, install_command, unknown_name

OnRankFailure = Literal["exit", "restart"]
POLICIES = ("exit", "restart")
PROGRAM = (sys.executable, "-P", "-m", "nbflow.cli")
"""Words that run the command line; -P keeps the current folder's modules out of it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
LONG_LIFE_S = 600.0
"""Ranks that lived so long begin anew with the shortest pause, and do not count."""
USAGE = 2
"""Exit code of wrong usage: it would be wrong again."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def find_mpirun() -> str:
    """Return the launcher beside this Python, or the one in the path.

    Raises
    ------
    MissingExtraError
        If there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise MissingExtraError(
            f"mpirun was not found; install MPI and its launcher: {install_command('mpi')}"
        )
    return found


class Keeper(Protocol):
    """What keeps a server's address: `nbflow.front.front.Front`."""

    def environment(self) -> Mapping[str, str]:
        """Return the variables by which ranks find it."""

    def say(self, state: str, message: str) -> None:
        """Say what clients are told while rank 0 cannot be reached."""

    def ended(self, state: str, message: str) -> None:
        """Say that all ranks have ended."""

    def tell_rank_0(self, number: int) -> bool:
        """Send a signal to the process that takes the requests, if there is one."""


@dataclass
class Launch:
    """Ranks that are started together.

    Parameters are the fields below.
    """

    command: Sequence[str]
    """What to run: the launcher with its options, and the program with its arguments."""
    on_rank_failure: OnRankFailure = "exit"
    """What to do when it ends badly: end too, or start it again."""
    most_restarts: int = 10
    """Starts in a row, each of a short life, after which it is given up."""
    first_pause_s: float = FIRST_PAUSE_S
    """Pause before the first of them; it doubles up to a minute."""
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    """Takes a line about what is done."""
    front: Keeper | None = None
    """What keeps the address, if it is a server's."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _told_to_end: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        if self.on_rank_failure not in POLICIES:
            raise unknown_name("policy --on-rank-failure", self.on_rank_failure, POLICIES)
        if self.most_restarts < 1:
            raise UsageError(f"--restarts must be at least 1, got {self.most_restarts}")

    def run(self) -> int:
        """Run until it ends well, or for good; return the exit code of the last start."""
        before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        n_restarts, pause_s = 0, self.first_pause_s
        while True:
            started = time.monotonic()
            code = self._one_life(n_restarts)
            ends = self._told_to_end.is_set() or code in (0, USAGE)
            if ends or self.on_rank_failure == "exit":
                return code
            if time.monotonic() - started > LONG_LIFE_S:
                n_restarts, pause_s = 0, self.first_pause_s
            n_restarts += 1
            if n_restarts > self.most_restarts:
                self.tell(f"nbflow launch: given up after {self.most_restarts} restarts")
                return code
            self.tell(
                f"nbflow launch: the ranks have ended with code {code}; restart {n_restarts} of "
                f"{self.most_restarts} in {pause_s:g} s"
            )
            if self.front is not None:
                self.front.ended("restarting", "the server's ranks have ended and start again")
            if self._told_to_end.wait(pause_s):
                return code
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _one_life(self, n_restarts: int) -> int:
        """Start the ranks, wait for their end, and return the exit code."""
        if self.front is None:
            self._process = subprocess.Popen(self.command)
        else:
            again = ", again" if n_restarts else ""
            self.front.say("starting", f"the server is starting{again}")
            self._process = subprocess.Popen(
                self.command,
                env=os.environ | self.front.environment(),
                stdin=subprocess.DEVNULL,  # which a group of its own must not read from a terminal
                process_group=0,  # so that Ctrl-C comes here alone, and is given on in order
            )
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Give a signal on to the ranks, and let their end be the end.

        The rank that takes a server's requests ends in order, and the others with it; the second
        signal ends all of them.
        """
        first = not self._told_to_end.is_set()
        self._told_to_end.set()
        if self.front is not None:
            self.front.say("stopping", "the server is stopping")
            if first and self.front.tell_rank_0(signal.SIGTERM):
                return
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

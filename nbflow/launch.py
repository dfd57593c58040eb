"""Start a command's ranks with mpirun, and start them again when one of them fails.

A launcher ends all ranks when one ends badly, and MPI cannot take a new one in, so whoever wants a
service back starts all of them again.  `Launch` does that: the policy ``restart`` waits a little,
longer each time, and gives up after a number of starts that did not live long.  Wrong usage
(exit code 2) and a signal to this process end it at once.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name

OnRankFailure = Literal["exit", "restart"]
POLICIES = ("exit", "restart")
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
            "there is no mpirun; install MPI and its launcher: pip install 'nbflow[mpi]'"
        )
    return found


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
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _told_to_end: bool = field(default=False, init=False)

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
            self._process = subprocess.Popen(self.command)
            code = self._process.wait()
            code = 128 - code if code < 0 else code
            ends = self.on_rank_failure == "exit" or code in (0, USAGE) or self._told_to_end
            if ends:
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
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if self._told_to_end:
                return code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Give a signal on to the ranks, and let their end be the end."""
        self._told_to_end = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

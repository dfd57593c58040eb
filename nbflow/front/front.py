"""The process that keeps a server's address while its ranks come and go.

It runs in a thread of the launcher.  `Launch` tells it when ranks are started and how they have
ended; whether rank 0 takes requests it finds out by connecting to it.  The process that looks after
a rank (`nbflow.supervise`) tells it of a failure at once, so that nobody waits for the launcher to
end the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from nbflow.front.connection import Accepted, Connection, Situation
from nbflow.server.addresses import FRONT_SOCKET, FRONT_URL, listen, url_of
from nbflow.supervise import FAILURES
from nbflow_kernels.errors import UsageError

LAST_S = 5.0
"""Seconds for clients to be answered, and to take their answers, after the ranks have ended."""
_CONNECT_S = 2.0
_POLL_S = 0.02
_LONGEST_PATH = 90
"""Bytes of the folder's name: an address of a local socket has 108, or 104."""


class Front:
    """Keeps an address; use it as a context manager, around all starts of the ranks.

    Parameters
    ----------
    host, port : str and int
        The address; port 0 takes a free one.
    connections : int
        A further connection is answered with status 503 and closed.
    header_s : float
        Seconds for the head of a request to arrive.
    slow_reader_s : float
        Seconds for which a client may leave its full buffer unread.

    Raises
    ------
    UsageError
        If the port is not free.
    """

    def __init__(
        self, host: str, port: int, connections: int, header_s: float, slow_reader_s: float
    ) -> None:
        self._listener = listen(host, port)
        self.url = url_of(self._listener)
        """The address as clients write it."""
        self._most = connections
        self._folder = Path(tempfile.mkdtemp(prefix="nbflow-"))  # nobody else's
        if len(os.fsencode(self._folder)) > _LONGEST_PATH:
            shutil.rmtree(self._folder)
            raise UsageError(
                f"the name of the folder for temporary files is too long for a socket within it: "
                f"{self._folder}; set TMPDIR to a shorter one"
            )
        self._situation = Situation(self._folder / "rank0", header_s, slow_reader_s)
        self._opened: set[Accepted] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nbflow-front", daemon=True)

    # ---- what the launcher calls --------------------------------------------------------------

    def __enter__(self) -> Front:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        """Answer who still waits, let clients take their answers, and end."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the variables by which ranks find their way here."""
        return {
            FRONT_SOCKET: str(self._situation.socket),
            FRONT_URL: self.url,
            FAILURES: str(self._folder / "failures"),
        }

    def say(self, state: str, message: str) -> None:
        """Say what clients are told while rank 0 cannot be reached.

        Parameters
        ----------
        state : str
            A word, for ``/health`` and ``/ready``.
        message : str
            A sentence, for everybody else.
        """
        self._loop.call_soon_threadsafe(self._say, state, message)

    def ended(self, state: str, message: str) -> None:
        """Say that all ranks have ended; clients who wait for them are told."""
        self._loop.call_soon_threadsafe(self._give_up, state, message, LAST_S)

    def tell_rank_0(self, number: int) -> bool:
        """Send a signal to the process that takes the requests; return whether there is one."""
        if not sys.platform.startswith("linux"):
            return False
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(_CONNECT_S)
            link.connect(str(self._situation.socket))
            said = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            os.kill(struct.unpack("3i", said)[0], number)
            return True
        return False

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work in the thread, and wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        self._server = await self._loop.create_server(
            lambda: Accepted(self._situation, self._opened, self._most),
            sock=self._listener,
            backlog=self._most,
        )
        failures = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        failures.bind(str(self._folder / "failures"))
        self._failures, _ = await self._loop.create_datagram_endpoint(
            lambda: _Failures(self._failed), sock=failures
        )

    def _failed(self, rank: str) -> None:
        """Believe a rank's keeper that it has failed: the launcher is about to end the others."""
        self._give_up("failed", f"{rank} of the server has failed", 0.0)

    def _say(self, state: str, message: str) -> None:
        self._situation.state, self._situation.message = state, message

    def _give_up(self, state: str, message: str, last_s: float) -> None:
        """Let nobody reach the ranks that there were; what they have sent may be read so long."""
        self._say(state, message)
        with contextlib.suppress(FileNotFoundError):
            self._situation.socket.unlink()
        for connection in self._connections():
            if connection.link is not None:
                self._loop.call_later(last_s, connection.link.abort)

    def _connections(self) -> list[Connection]:
        return [accepted.connection for accepted in self._opened if accepted.connection]

    async def _close(self) -> None:
        self._server.close()
        self._failures.close()
        await self._wait(lambda: any(c.busy for c in self._connections()))
        self._give_up(self._situation.state, self._situation.message, 0.0)
        await asyncio.sleep(_POLL_S)  # for those to be told who wait for ranks that do not end
        for accepted in self._opened:
            accepted.cancel()
        await self._wait(lambda: bool(self._opened))

    async def _wait(self, lasts: Callable[[], bool]) -> None:
        """Wait while something lasts, but not for long."""
        end = self._loop.time() + LAST_S
        while lasts() and self._loop.time() < end:
            await asyncio.sleep(_POLL_S)


class _Failures(asyncio.DatagramProtocol):
    """Takes what the processes that look after ranks have to say."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._told = failed

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._told(data[:100].decode("ascii", "replace"))

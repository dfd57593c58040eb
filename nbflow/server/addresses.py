"""Where a server listens: at an address, or behind the process that keeps the address for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

from nbflow.supervise import FAILURES
from nbflow_kernels.errors import UsageError

FRONT_SOCKET = "NBFLOW_FRONT_SOCKET"
"""Environment variable: the socket at which `nbflow.front` expects rank 0."""
FRONT_URL = "NBFLOW_FRONT_URL"
"""Environment variable: the address that clients use then."""
UNREAD_MS = 30_000
LOOK_S = 2.0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; it does not listen yet.

    Raises
    ------
    UsageError
        If there is no such host, or the port is not free.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"host {host!r}: {error.strerror}") from error
    if sys.platform != "win32":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # a closed connection does not wait for its reader
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"{host}:{port} is not free ({error.strerror}); choose another --port"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the address of a bound socket as clients write it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def behind_front() -> bool:
    """Return whether another process keeps the public address."""
    return FRONT_SOCKET in os.environ


def listen_behind_front() -> tuple[socket.socket, str]:
    """Return the private socket, which does not listen yet, and the public address.

    Raises
    ------
    UsageError
        If the process that keeps the address is on another host.
    """
    path = Path(os.environ[FRONT_SOCKET])
    if not path.parent.is_dir():
        raise UsageError(
            "nbflow launch keeps the server's address, and rank 0 must run on its host: name that "
            "host first, or let rank 0 listen itself with nbflow launch --no-front"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a rank that has died
    sock.bind(str(path))
    return sock, os.environ.get(FRONT_URL, "")


async def front_is_gone() -> None:
    """Wait until the process that keeps the address has ended, also if it was killed."""
    while True:
        await asyncio.sleep(LOOK_S)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as look:
            try:
                look.connect(os.environ[FAILURES])
            except OSError:
                return

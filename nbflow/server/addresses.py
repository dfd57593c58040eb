"""Listening socket of the server, and its URL."""

from __future__ import annotations

import socket
import sys

from nbflow_kernels.errors import UsageError

UNREAD_MS = 30_000
"""Milliseconds that sent data may stay unacknowledged; then the system drops the connection."""


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

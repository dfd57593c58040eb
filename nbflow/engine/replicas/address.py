"""Socket addresses between hosts, and the authentication handshake.

Host names are unreliable: on Debian the own name resolves to 127.0.1.1.  The leading process
therefore takes the source addresses that its routing table selects for the other hosts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import socket
import struct
import sys
from collections.abc import Sequence

from nbflow_kernels.errors import UsageError

ADDRESS_ENV = "NBFLOW_REPLICA_ADDRESS"
"""Environment variable of the leading process that overrides its address."""
HANDSHAKE_S = 10.0
"""Timeout in seconds of connecting, and of each handshake message."""

Connection = multiprocessing.connection.Connection
SocketAddress = tuple[str, int]
"""Address and port."""

REFUSED = (multiprocessing.AuthenticationError, AssertionError, EOFError, OSError, ValueError)
"""Errors of a failed handshake: wrong key, timeout, closed connection."""

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_ANY_PORT = 9  # no packet is sent to it


def own_addresses() -> list[str]:
    """Return the non-loopback IPv4 addresses of this machine."""
    found: list[str] = []
    if sys.platform.startswith("linux"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # without address
                    answer = fcntl.ioctl(udp.fileno(), _SIOCGIFADDR, request)
                    found.append(socket.inet_ntoa(answer[20:24]))
    else:
        with contextlib.suppress(OSError):
            found = socket.gethostbyname_ex(socket.gethostname())[2]
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def addresses_towards(others: Sequence[Sequence[str]]) -> list[str]:
    """Return the source addresses of packets to the other hosts, given their `own_addresses`.

    Addresses that both hosts have (container bridges) are skipped.
    """
    own = own_addresses()
    found: list[str] = []
    for address in (a for addresses in others for a in addresses):
        with (
            contextlib.suppress(OSError),  # no route
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        ):
            if address not in own:
                udp.connect((address, _ANY_PORT))
                found.append(udp.getsockname()[0])
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def listen(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens on an address and a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError as error:
        raise UsageError(
            f"cannot listen for the other replicas at {address}: {error}; set {ADDRESS_ENV} to an "
            "address of this host that the other hosts reach"
        ) from error


def configured_address() -> str | None:
    """Return the value of `ADDRESS_ENV`, if set."""
    return os.environ.get(ADDRESS_ENV) or None


def accept_handshake(accepted: socket.socket, key: bytes) -> Connection:
    """Return a connection after mutual authentication with the key."""
    connection = _with_timeout(accepted)
    try:
        multiprocessing.connection.deliver_challenge(connection, key)
        multiprocessing.connection.answer_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def connect(places: Sequence[SocketAddress], key: bytes) -> Connection:
    """Return a connection to the first address that authenticates with the key."""
    failures = []
    for place in places:
        try:
            made = socket.create_connection(place, HANDSHAKE_S)
            made.settimeout(None)
            connection = _with_timeout(made)
        except OSError as error:
            failures.append(f"{place[0]}:{place[1]} ({error})")
            continue
        try:
            multiprocessing.connection.answer_challenge(connection, key)
            multiprocessing.connection.deliver_challenge(connection, key)
            clear_timeout(connection)
            return connection
        except REFUSED as error:
            connection.close()
            failures.append(f"{place[0]}:{place[1]} ({error or type(error).__name__})")
    raise UsageError(
        f"{socket.gethostname()} does not reach the leading process at {', '.join(failures)}; set "
        f"{ADDRESS_ENV} there to an address of its host that the other hosts reach"
    )


def _with_timeout(made: socket.socket) -> Connection:
    """Return a socket as a connection with a timeout of `HANDSHAKE_S` per message."""
    _set_timeout(made, HANDSHAKE_S)
    return Connection(made.detach())


def clear_timeout(connection: Connection) -> None:
    """Remove the timeout of a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        _set_timeout(same, 0.0)


def _set_timeout(made: socket.socket, seconds: float) -> None:
    value = struct.pack("ll", int(seconds), 0)  # a struct timeval; 0: no timeout
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        made.setsockopt(socket.SOL_SOCKET, option, value)

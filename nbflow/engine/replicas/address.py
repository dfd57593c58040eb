"""Addresses for processes on several hosts, and the handshake on a connection between two.

Names are of little use: on a stock Debian a host's own name stands for 127.0.1.1, which every host
has.  So the leading process asks its routing table from which of its addresses packets to the
others leave.
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
"""Environment variable of the leading process: the address to use, whatever else there is."""
HANDSHAKE_S = 10.0
"""Seconds for a connection to be made, and for each message of the handshake."""

Connection = multiprocessing.connection.Connection
SocketAddress = tuple[str, int]
"""Address and port."""

REFUSED = (multiprocessing.AuthenticationError, AssertionError, EOFError, OSError, ValueError)
"""Errors of a handshake with a peer that does not know the key, or does not answer."""

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_ANY_PORT = 9  # no packet is sent to it


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's interfaces, loopback ones aside."""
    found: list[str] = []
    if sys.platform.startswith("linux"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # it has none
                    answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                    found.append(socket.inet_ntoa(answer[20:24]))
    else:
        with contextlib.suppress(OSError):
            found = socket.gethostbyname_ex(socket.gethostname())[2]
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def addresses_towards(others: Sequence[Sequence[str]]) -> list[str]:
    """Return the own addresses that other hosts can reach.

    Parameters
    ----------
    others : sequence of sequence of str
        For each of the other hosts its `own_addresses`.

    Returns
    -------
    list of str
        Those from which packets to an address of another host leave, without repetitions.  An
        address that both hosts have (a bridge of containers) is not the other host's.
    """
    own = own_addresses()
    found: list[str] = []
    for address in (a for addresses in others for a in addresses):
        with (
            contextlib.suppress(OSError),  # no route
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
        ):
            if address not in own:
                asking.connect((address, _ANY_PORT))
                found.append(asking.getsockname()[0])
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def listen(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens at an address, on any port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError as error:
        raise UsageError(
            f"the other replicas cannot be awaited at {address}: {error}; set {ADDRESS_ENV} to an "
            "address of this host that the other hosts reach"
        ) from error


def configured_address() -> str | None:
    """Return what `ADDRESS_ENV` says."""
    return os.environ.get(ADDRESS_ENV) or None


def accept_handshake(accepted: socket.socket, key: bytes) -> Connection:
    """Return a connection whose other side has proved that it knows the key."""
    connection = _with_timeout(accepted)
    try:
        multiprocessing.connection.deliver_challenge(connection, key)
        multiprocessing.connection.answer_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def connect(places: Sequence[SocketAddress], key: bytes) -> Connection:
    """Return a connection to the first of several places that answers with the key."""
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
    """Return a socket as a connection that waits `HANDSHAKE_S` for a message, and not longer."""
    _set_timeout(made, HANDSHAKE_S)
    return Connection(made.detach())


def clear_timeout(connection: Connection) -> None:
    """Let a connection wait for messages without a limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        _set_timeout(same, 0.0)


def _set_timeout(made: socket.socket, seconds: float) -> None:
    value = struct.pack("ll", int(seconds), 0)  # a struct timeval; 0 is for ever
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        made.setsockopt(socket.SOL_SOCKET, option, value)

"""Two hosts on one machine: network namespaces with a name and an address of their own, and a link.

They stand for hosts of a cluster: processes of one reach those of the other over TCP only, and are
started there by mpirun through a command like ssh.  Linux, and the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpirun import MPIRUN, PYTHONPATH

LINK = "nbfv"
READY_S = 10.0
RSH = """#!/bin/sh
# like ssh: OPTIONS HOST COMMAND...
while :; do case "$1" in -*) shift ;; *) break ;; esac; done
number=${1##*.}; shift
exec ip netns exec PREFIX$number unshare --uts sh -c "hostname host$number; exec $*"
"""


class NoHosts(Exception):
    """Reason why there cannot be two hosts here."""


class Hosts:
    """host1 and host2, reached as 10.PREFIX.1 and .2."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"nbf{os.getpid()}-"
        self._network = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
        self._rsh = folder / "rsh"
        self._rsh.write_text(RSH.replace("PREFIX", self._prefix))
        self._rsh.chmod(self._rsh.stat().st_mode | stat.S_IXUSR)

    @property
    def _names(self) -> list[str]:
        return [f"{self._prefix}{number}" for number in (1, 2)]

    def make(self) -> None:
        """Make them.

        Raises
        ------
        NoHosts
            If that is not allowed here, or not possible.
        """
        if not sys.platform.startswith("linux"):
            raise NoHosts("network namespaces are Linux's")
        missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
        if missing:
            raise NoHosts(f"no {' and no '.join(missing)}: install iproute2 and util-linux")
        first, second = self._names
        _ip("netns", "add", first)
        _ip("netns", "add", second)
        peer = ("type", "veth", "peer", "name", LINK, "netns", second)
        _ip("link", "add", LINK, "netns", first, *peer)
        for number, name in enumerate(self._names, 1):
            _ip("-n", name, "addr", "add", f"{self._network}.{number}/24", "dev", LINK)
            for device in ("lo", LINK):
                _ip("-n", name, "link", "set", device, "up")
        until = time.monotonic() + READY_S
        while not all("LOWER_UP" in _ip("-n", n, "link", "show", LINK) for n in self._names):
            if time.monotonic() > until:
                raise NoHosts(f"the link between them was not up within {READY_S:g} s")
            time.sleep(0.01)

    def remove(self) -> None:
        """Kill the processes of the namespaces and remove these."""
        for name in self._names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def mpirun(
        self,
        per_host: int,
        *command: str,
        timeout: int = 300,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments on `per_host` ranks of each host, from the first one."""
        launch = (
            str(MPIRUN), "-launcher", "ssh", "-launcher-exec", str(self._rsh), "-iface", LINK,
            "-hosts", f"{self._network}.1,{self._network}.2", "-ppn", str(per_host),
            "-n", str(2 * per_host), sys.executable, *command,
        )  # fmt: skip
        variables = {
            "UCX_TLS": "tcp,self",  # not by the memory that the hosts share unknowingly
            "UCX_NET_DEVICES": LINK,
            "PYTHONPATH": os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")]),
        }
        named = 'hostname host1; exec "$@"'
        return subprocess.run(
            ["ip", "netns", "exec", self._names[0], "unshare", "--uts", "sh", "-c", named, "-",
             *launch],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **variables, **(environment or {})},
        )  # fmt: skip


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make two hosts, and remove them afterwards."""
    hosts = Hosts(folder)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def _ip(*arguments: str) -> str:
    """Run ip and return its output."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise NoHosts(f"ip {' '.join(arguments[:2])}: {done.stderr.strip()}")
    return done.stdout

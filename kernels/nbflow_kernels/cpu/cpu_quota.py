"""CPU quota of this process's control groups (cgroups), as containers set it.

``docker run --cpus=2`` leaves all processors in the affinity of a process but limits it to two
processors' time, which more threads only contend for.  A group of version 2 has ``cpu.max``, one of
version 1 ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``; the least quota among a group and its
ancestors holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Return the quota in processors, rounded up; None without a quota.

    Parameters
    ----------
    root : Path
        The root of the file system.
    """
    quotas = [_of_group(folder) for folder in _groups(root)]
    found = [quota for quota in quotas if quota is not None]
    return max(1, min(found)) if found else None


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's mounted groups and their ancestors."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in memberships:
        number, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        is_v2 = number == "0" and not controllers
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        for mount in mounts:
            found = _mounted(mount, is_v2)
            if found is None:
                continue
            top = root / found[1].lstrip("/")
            folder = top / _below(path, found[0])
            yield folder
            while folder != top:
                folder = folder.parent
                yield folder


def _mounted(mount: str, is_v2: bool) -> tuple[str, str] | None:
    """Return a mounted group and its mount point from a mountinfo line; None for other mounts."""
    fields, _, rest = mount.partition(" - ")
    kind, *options = rest.split(" ")
    columns = fields.split(" ")
    if len(columns) < 5 or kind != ("cgroup2" if is_v2 else "cgroup"):
        return None
    if not is_v2 and "cpu" not in options[-1].split(","):
        return None
    return columns[3], columns[4]


def _below(path: str, mounted: str) -> PurePosixPath:
    """Return a group's path relative to the mounted one, which in a container may be itself."""
    group = PurePosixPath(path)
    inside = group.is_relative_to(mounted) and ".." not in group.parts
    return group.relative_to(mounted) if inside else PurePosixPath()


def _of_group(folder: Path) -> int | None:
    """Return one group's quota in processors, rounded up; None if it has none."""
    try:
        if (folder / "cpu.max").is_file():
            words = (folder / "cpu.max").read_text().split()
        else:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            words = [(folder / name).read_text().strip() for name in names]
        quota, period = map(int, words)
    except (OSError, ValueError):  # "max", or no such file
        return None
    return -(-quota // period) if quota > 0 and period > 0 else None


def available_cores() -> int:
    """Return the number of processors this process may use: its affinity, within its CPU quota."""
    quota = cpu_quota()
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return allowed if quota is None else min(allowed, quota)

"""CPU quota of the control groups (cgroups) that this process is in, as containers set it.

``docker run --cpus=2`` leaves all processors of the machine in the affinity of a process, but lets
it run for two processors' time only: more threads than that stop each other.  Version 2 has
``cpu.max`` in each group, version 1 ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``; a group has the
least of its own and of those above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Return the processors that the quota is worth, rounded up; None without a quota.

    Parameters
    ----------
    root : Path
        The folder that ``proc`` and the mounted control groups are in.
    """
    quotas = [_of_group(folder) for folder in _groups(root)]
    found = [quota for quota in quotas if quota is not None]
    return max(1, min(found)) if found else None


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of all groups above them, if mounted."""
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
    """Return which group is mounted where by a line of mountinfo; None if it is another mount."""
    fields, _, rest = mount.partition(" - ")
    kind, *options = rest.split(" ")
    place = fields.split(" ")
    if len(place) < 5 or kind != ("cgroup2" if is_v2 else "cgroup"):
        return None
    if not is_v2 and "cpu" not in options[-1].split(","):
        return None
    return place[3], place[4]


def _below(path: str, mounted: str) -> PurePosixPath:
    """Return where a group is below the mounted one, which in a container may be itself."""
    group = PurePosixPath(path)
    inside = group.is_relative_to(mounted) and ".." not in group.parts
    return group.relative_to(mounted) if inside else PurePosixPath()


def _of_group(folder: Path) -> int | None:
    """Return the processors of one group's quota, rounded up; None if it has none."""
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

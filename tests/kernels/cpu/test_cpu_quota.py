"""CPU quotas of control groups, as folders of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbflow_kernels.cpu.cpu_quota import available_cores, cpu_quota

V1_MOUNT = "33 24 0:28 {group} {folder} rw,nosuid - cgroup cgroup rw,{controllers}\n"
V2_MOUNT = "30 24 0:26 {group} {folder} rw,nosuid,nodev shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
PROC = "22 1 0:20 / /proc rw - proc proc rw\n"


def _files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def _v2(root: Path, path: str, quotas: dict[str, str], group: str = "/") -> Path:
    """Write the files of version 2 for a process in group `path`, and the groups' ``cpu.max``."""
    _files(root, **{f"sys/fs/cgroup/{at}cpu.max": text + "\n" for at, text in quotas.items()})
    mounts = PROC + V2_MOUNT.format(group=group, folder="/sys/fs/cgroup")
    return _files(root, **{"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mounts})


def _v1(root: Path, path: str, quotas: dict[str, tuple[int, int]]) -> Path:
    """Write the files of version 1, next to the empty hierarchy of version 2 that systemd uses."""
    for at, (quota, period) in quotas.items():
        names = f"cg/cpu,cpuacct/{at}cpu.cfs_quota_us", f"cg/cpu,cpuacct/{at}cpu.cfs_period_us"
        _files(root, **dict(zip(names, (f"{quota}\n", f"{period}\n"), strict=True)))
    mounts = (
        V1_MOUNT.format(group="/", folder="/cg/memory", controllers="memory")
        + V1_MOUNT.format(group="/", folder="/cg/cpuset", controllers="cpuset")
        + V1_MOUNT.format(group="/", folder="/cg/cpu,cpuacct", controllers="cpu,cpuacct")
        + V2_MOUNT.format(group="/", folder="/cg/unified")
    )
    groups = f"12:memory:/elsewhere\n4:cpu,cpuacct:{path}\n1:name=systemd:/init\n0::/init\n"
    return _files(root, **{"proc/self/cgroup": groups, "proc/self/mountinfo": mounts})


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),  # rounded up
        ("10000 100000", 1),
        ("6400000 100000", 64),
        ("max 100000", None),
        ("", None),
        ("200000", None),
        ("200000 0", None),
        ("-1 100000", None),
        ("much 100000", None),
    ],
)
def test_quota_of_version_2(tmp_path: Path, text: str, cores: int | None) -> None:
    assert cpu_quota(_v2(tmp_path, "/", {"": text})) == cores


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({"a/b/": "400000 100000", "a/": "300000 100000"}, 3),
        ({"a/b/": "100000 100000", "a/": "300000 100000"}, 1),
        ({"a/b/": "max 100000", "a/": "50000 10000", "": "700000 100000"}, 5),
        ({"a/c/": "100000 100000"}, None),  # another group's
    ],
)
def test_the_least_quota_of_a_group_and_those_above_counts(
    tmp_path: Path, quotas: dict[str, str], cores: int | None
) -> None:
    assert cpu_quota(_v2(tmp_path, "/a/b", quotas)) == cores


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/docker/0a1b", "/docker/0a1b"),  # the container's group is what is mounted
        ("/docker/0a1b", "/"),  # seen from the host, with the container's group mounted as the top
        ("/../0a1b", "/"),  # above what this process may see
        ("/elsewhere", "/docker"),
    ],
)
def test_quota_of_a_container_whose_group_is_the_mounted_one(
    tmp_path: Path, path: str, group: str
) -> None:
    assert cpu_quota(_v2(tmp_path, path, {"": "200000 100000"}, group)) == 2


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({"a/": (250000, 100000), "": (-1, 100000)}, 3),
        ({"a/": (-1, 100000), "": (400000, 50000)}, 8),
        ({"a/": (-1, 100000), "": (-1, 100000)}, None),
    ],
)
def test_quota_of_version_1(
    tmp_path: Path, quotas: dict[str, tuple[int, int]], cores: int | None
) -> None:
    assert cpu_quota(_v1(tmp_path, "/a", quotas)) == cores


def test_no_quota_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    _files(tmp_path, **{"proc/self/cgroup": "nonsense\n", "proc/self/mountinfo": "x - cgroup2\n\n"})
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (3, 3), (8, 4)])
def test_available_cores_are_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, cores: int
) -> None:
    monkeypatch.setattr("nbflow_kernels.cpu.cpu_quota.cpu_quota", lambda: quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 4, 5, 7}, raising=False)
    assert available_cores() == cores

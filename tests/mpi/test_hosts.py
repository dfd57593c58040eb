"""Ranks on two emulated hosts over a network, started by a launcher like ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mpirun import MPIRUN
from network_hosts import Hosts, NoHosts, two_hosts
from server_process import eventually
from small_models import write_llama

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Make two hosts; skip without the permission."""
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
            yield made
    except NoHosts as reason:
        pytest.skip(f"two hosts cannot be made here: {reason}")


def test_partitions_across_hosts_agree_with_one_rank(hosts: Hosts, tmp_path: Path) -> None:
    write_llama(tmp_path, n_layers=2, n_heads=8, n_kv_heads=2, intermediate_size=320)
    script, partitions = str(HERE / "check_hosts.py"), ("0&1;2&3", "0&2;1&3")
    done = hosts.mpirun(2, "-m", "mpi4py", script, str(tmp_path), *partitions)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all partitions agree on host1, host1, host2, host2" in done.stdout


def test_replicas_on_two_hosts_find_each_other(hosts: Hosts) -> None:
    done = hosts.mpirun(1, "-m", "mpi4py", str(HERE / "check_replicas.py"), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replicas on host1, host2 agree" in done.stdout


def test_a_rank_that_dies_on_another_host_ends_all(hosts: Hosts, tmp_path: Path) -> None:
    run = ("run", "tiny_python", "-p", "def ", "-n", "16", "--partition", "0&1", "-q")
    arguments = (str(HERE / "faults.py"), "kill", "1", "4", *run, "--threads", "1")
    pids = tmp_path / "pids"  # the hosts share process ids
    done = hosts.mpirun(1, *arguments, timeout=120, environment={"FAULTS_PIDS": str(pids)})
    assert done.returncode != 0
    assert "BAD TERMINATION" in done.stdout + done.stderr
    assert "EXIT CODE: 9" in done.stdout + done.stderr
    ranks = [int(line) for line in pids.read_text().split()]
    assert len(ranks) == 2
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))

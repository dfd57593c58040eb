"""Rank status, hang watchdog and failure reports of one process; MPI ranks: tests/mpi."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from mpirun import PYTHONPATH

from nbflow.distributed.cpu_threads import fair_threads
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow.utils.rank_status import IDLE, LOADING, WAITING, WORKING, RankStatus

HANGS = (
    "import time\n"
    "from nbflow.distributed import failure\n"
    "from nbflow.utils.rank_status import WORKING, status\n"
    "status.is_needed = {needed}\n"
    "failure.install()\n"
    "status.set(WORKING, 'all_reduce', 3)\n"
    "time.sleep(60)\n"
)


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PMI")}
    environment |= {"PYTHONPATH": PYTHONPATH, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )


def test_one_process_reports_errors_like_python():
    done = python("from nbflow.distributed import failure; failure.install(); 1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "stopping" not in done.stderr


def test_an_unneeded_replica_ends_alone():
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2", "NBFLOW_HANG_S": "0.2"}
    done = python(HANGS.format(needed=False), **variables)
    assert done.returncode == 1
    assert "rank 1 of 2 on " in done.stderr
    assert "has stood still for 0 s behind all_reduce of layer 3" in done.stderr
    assert "the other replicas continue" in done.stderr
    assert 'File "<string>", line 7 in <module>' in done.stderr  # the traceback


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (WORKING, "behind all_reduce of layer 3"),
        (WAITING, "in all_reduce of layer 3"),
        (LOADING, "while loading all_reduce"),
    ],
)
def test_a_rank_without_a_heartbeat_hangs(state, words):
    status = RankStatus()
    status.set(state, "all_reduce", 3)
    assert status.overdue(60) == ""
    time.sleep(0.002)
    assert status.overdue(0.001) == f"stood still for 0 s {words}"
    status.set(IDLE)
    time.sleep(0.002)
    assert status.overdue(0.001) == ""


def test_a_waiting_rank_has_three_times_the_limit():
    status = RankStatus()
    status.set(WAITING, "recv")
    begun = time.monotonic()
    while not status.overdue(0.1):
        status.heartbeat()
    assert time.monotonic() - begun >= 0.3
    assert status.overdue(0.1) == "waited for 0 s in recv"


def test_an_idle_rank_has_no_limit():
    status = RankStatus()
    with status.step():
        pass
    time.sleep(0.002)
    assert status.overdue(0.0001) == ""


def test_loading_progress_is_a_heartbeat():
    status = RankStatus()
    with status.loading("the description"):
        status.progress("layers.0.attn.q.weight")
        assert str(status.activity) == "while loading layers.0.attn.q.weight"
        with status.loading("a draft"):
            assert str(status.activity) == "while loading a draft"
        assert str(status.activity) == "while loading layers.0.attn.q.weight"
    assert not status.activity.is_busy
    status.progress("nothing is loaded now")
    assert str(status.activity) == "before the first step"
    with pytest.raises(KeyError), status.loading("x"):
        raise KeyError
    assert not status.activity.is_busy
    assert str(status.activity) == "while loading x"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_follow_the_cpu_affinity():
    """The affinity mask limits the threads; thread ranks share it."""
    code = (
        "import os, sys\n"
        "os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(sys.argv[1])]})\n"
        "from nbflow.distributed import SelfComm\n"
        "from nbflow.distributed.cpu_threads import fair_threads\n"
        "print(fair_threads(SelfComm(), (0,)), fair_threads(SelfComm(), (0, 1)))\n"
    )
    for core in "01":
        done = subprocess.run(
            [sys.executable, "-c", code, core], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )  # fmt: skip
        assert done.stdout.split() == ["1", "1"], done.stderr
    team = ThreadRanks(2)
    try:
        cores = len(os.sched_getaffinity(0))
        assert team.run(lambda comm: fair_threads(comm, (0, 1))) == [max(1, cores // 2)] * 2
    finally:
        team.close()

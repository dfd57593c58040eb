"""The process beside a rank: what it says about the rank's end, and what it keeps to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from launching import PYTHONPATH

from nbflow.parallel.cores import fair_threads
from nbflow.parallel.threads import RankTeam
from nbflow.status import LOADING, WAITING, WORKING, Status
from nbflow.supervise import _abort, _watch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks: Linux only")


def watched(status: Status, limit: float, told=(), code="import time; time.sleep(60)"):
    """Return exit code and reports of a child."""
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    for number in told:
        child.send_signal(number)
    reports: list[str] = []
    return _watch(child.pid, status, limit, reports.append, told), reports


def test_a_rank_that_ends_by_itself_is_not_reported():
    assert watched(Status(), 60, code="import sys; sys.exit(7)") == (7, [])


def test_a_signal_that_the_launcher_has_sent_is_not_reported():
    assert watched(Status(), 60, told=(signal.SIGTERM,)) == (128 + signal.SIGTERM, [])
    kill_itself = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    code, (report,) = watched(Status(), 60, code=kill_itself)
    assert code == 128 + signal.SIGSEGV
    assert report == "was killed by SIGSEGV before the first step"


def test_a_replica_that_the_others_do_not_need_ends_alone(monkeypatch):
    status = Status()
    receiver, sender = os.pipe()
    monkeypatch.setenv("PMI_FD", str(sender))
    os.set_blocking(receiver, False)
    _abort(status, 9)
    assert os.read(receiver, 99) == b"cmd=abort exitcode=9\n"
    status.not_needed()
    _abort(status, 9)
    with pytest.raises(BlockingIOError):
        os.read(receiver, 99)
    os.close(receiver)
    os.close(sender)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (WORKING, "behind all_reduce of layer 3"),
        (WAITING, "in all_reduce of layer 3"),
        (LOADING, "while loading all_reduce"),
    ],
)
def test_a_rank_that_stands_still_is_ended(state, words):
    status = Status()
    status.set(state, "all_reduce", 3)
    code, (report,) = watched(status, 0.2)
    assert code == 1
    assert report.startswith("has stood still for 0 s")
    assert words in report


def test_a_rank_without_work_may_wait():
    status, started = Status(), time.monotonic()
    with status.watched():
        pass
    found = watched(status, 0.1, code="import time; time.sleep(0.6)")
    assert found == (0, [])
    assert time.monotonic() - started > 0.5


def test_progress_is_a_sign_of_life_of_who_loads():
    status = Status()
    with status.loading("the description"):
        status.progress("layers.0.attn.q.weight")
        assert str(status.place()) == "while loading layers.0.attn.q.weight"
        with status.loading("a draft"):
            assert str(status.place()) == "while loading a draft"
        assert str(status.place()) == "while loading layers.0.attn.q.weight"
    assert not status.place().is_busy
    status.progress("nothing is loaded now")
    assert str(status.place()) == "before the first step"
    with pytest.raises(KeyError), status.loading("x"):
        raise KeyError
    assert not status.place().is_busy
    assert str(status.place()) == "while loading x"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_are_those_of_the_cores_that_a_process_is_bound_to():
    """The mask decides, not the number of cores of the machine; ranks that are threads share it."""
    code = (
        "import os, sys\n"
        "os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(sys.argv[1])]})\n"
        "from nbflow.parallel import Alone\n"
        "from nbflow.parallel.cores import fair_threads\n"
        "print(fair_threads(Alone(), (0,)), fair_threads(Alone(), (0, 1)))\n"
    )
    for core in "01":
        done = subprocess.run(
            [sys.executable, "-c", code, core], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )  # fmt: skip
        assert done.stdout.split() == ["1", "1"], done.stderr
    team = RankTeam(2)
    try:
        cores = len(os.sched_getaffinity(0))
        assert team.run(lambda comm: fair_threads(comm, (0, 1))) == [max(1, cores // 2)] * 2
    finally:
        team.close()

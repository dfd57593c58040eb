"""A rank that dies, hangs or raises ends all ranks soon, with one report."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from mpirun import MPIRUN, mpirun
from server_process import eventually

FAULTS = Path(__file__).with_name("faults.py")
RUN = ("run", "tiny_python", "-p", "def ", "-n", "16", "--partition", "0&1", "--threads", "1", "-q")
HANG_S = 5.0  # reading a model's description takes two seconds on a busy machine

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'"),
]


@pytest.fixture(scope="module")
def _compiled():
    """Run once without a fault, so that compilation does not count as a hang."""
    done = mpirun(2, str(FAULTS), "none", "1", "0", *RUN)
    assert done.returncode == 0, done.stderr


REPORTS = {
    "memory": r"MemoryError: planted\nnbflow: rank 1 of 2 failed in all_reduce of layer 1 ",
    "usage": r"error: rank 1: planted\nnbflow: rank 1 of 2 failed in all_reduce of layer 1 ",
    "load-memory": r"error: rank 1 ran out of memory while loading its shard: planted",
}
"""Output of the ranks after a fault."""
HANGS = {
    "stop": r"rank 0 of 2 on \S+ has waited for \d+ s in all_reduce of layer 1; ",
    "load-sleep": r"rank 1 of 2 on \S+ has stood still for \d+ s while loading layers\.0\.\S+ ",
    "draw-sleep": r"rank 0 of 2 on \S+ has stood still for \d+ s behind all_gather; ",
}
"""The same after a fault that is noticed after `HANG_S`."""


def run_with(fault: str) -> subprocess.CompletedProcess[str]:
    # the fourth: after one of the embedding and two of layer 0; a weight of layer 0
    started, rank = time.monotonic(), "0" if fault.startswith("draw") else "1"
    limit = {"NBFLOW_HANG_S": str(HANG_S)}
    done = mpirun(2, str(FAULTS), fault, rank, "4", *RUN, environment=limit)
    assert time.monotonic() - started < 60  # start, HANG_S and pauses
    return done


@pytest.fixture(scope="module")
def hung(_compiled) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Run the faults of `HANGS` one after the other, while the other tests of this file run."""
    with ThreadPoolExecutor(1) as pool:
        yield {fault: pool.submit(run_with, fault) for fault in HANGS}


def check_report(done: subprocess.CompletedProcess[str], words: str, n_stops: int) -> None:
    assert done.returncode != 0
    assert re.search(words, done.stderr), done.stderr
    assert done.stderr.count("stopping all ranks") == n_stops


@pytest.mark.usefixtures("hung")
@pytest.mark.parametrize("fault", REPORTS)
def test_one_rank_goes_wrong(fault):
    # ranks agree whether loading succeeded, so no rank must abort the others
    check_report(run_with(fault), REPORTS[fault], n_stops=fault != "load-memory")


@pytest.mark.usefixtures("hung")
@pytest.mark.parametrize("fault", ["kill", "crash", "load-kill"])
def test_a_rank_that_a_signal_ends(fault, tmp_path):
    """The launcher reports it and ends the other ranks."""
    pids = tmp_path / "pids"
    done = mpirun(2, str(FAULTS), fault, "1", "4", *RUN, environment={"FAULTS_PIDS": str(pids)})
    number = signal.SIGSEGV if fault == "crash" else signal.SIGKILL
    assert done.returncode != 0
    assert f"signal {number:d}" in done.stdout + done.stderr
    if fault == "crash":  # faulthandler's traceback
        assert "Fatal Python error: Segmentation fault" in done.stderr
        assert "in strike" in done.stderr
    ranks = [int(line) for line in pids.read_text().split()]
    assert len(ranks) == 2
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))


def test_a_limit_that_is_no_number():
    done = mpirun(2, "-m", "nbflow", "env", environment={"NBFLOW_HANG_S": "soon"})
    assert done.returncode == 2
    assert "NBFLOW_HANG_S must be a positive number of seconds, got 'soon'" in done.stderr


def test_a_sweep_keeps_its_rows_and_goes_on(tmp_path):
    sweep = tmp_path / "two.toml"
    sweep.write_text(
        '[sweep]\nname = "two"\nmeasures = ["decode"]\n'
        '[settings]\nmodel = "tiny_python"\nprompt = 8\ndecode = 2\nrepeats = 1\nwarmup = 0\n'
        "min_repetition_s = 0\n"
        'threads = 1\n[axes]\npartition = ["0", "0&1"]\n'
    )
    arguments = ("sweep", str(sweep), "--out", str(tmp_path))
    killed = mpirun(2, str(FAULTS), "kill", "1", "3", *arguments)
    assert killed.returncode != 0
    assert "signal 9" in killed.stdout + killed.stderr
    (kept,) = (tmp_path / "two" / "points").glob("*/result.json")
    written = kept.stat().st_mtime_ns
    again = mpirun(2, "-m", "nbflow", *arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert kept.stat().st_mtime_ns == written
    assert (tmp_path / "two" / "points.csv").read_text().count("done") == 2


@pytest.mark.parametrize("fault", HANGS)
def test_one_rank_hangs(fault, hung):
    check_report(hung[fault].result(), HANGS[fault], n_stops=1)

"""A rank that dies, hangs or raises ends all of them soon, with one report that says where."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from launching import MPIRUN, mpirun

FAULTS = Path(__file__).with_name("faults.py")
RUN = ("run", "tiny_python", "-p", "def ", "-n", "16", "--partition", "0&1", "--threads", "1", "-q")
HANG_S = 4.0  # reading a model's description takes a second on a busy machine

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'"),
]


@pytest.fixture(scope="module")
def _compiled():
    """Run once without a fault, so that compiling does not look like standing still."""
    done = mpirun(2, str(FAULTS), "none", "1", "0", *RUN)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", r"rank 1 of 2 on \S+ was killed by SIGKILL.* in all_reduce of layer 1; stopping"),
        ("stop", r"rank 1 of 2 on \S+ has stood still for \d+ s in all_reduce of layer 1 "),
        ("memory", r"MemoryError: planted\nnbflow: rank 1 of 2 failed in all_reduce of layer 1 "),
        ("usage", r"error: rank 1: planted\nnbflow: rank 1 of 2 failed in all_reduce of layer 1 "),
        ("load-kill", r"rank 1 of 2 on \S+ was killed by SIGKILL.* while loading layers\.0\.\S+; "),
        (
            "load-sleep",
            r"rank 1 of 2 on \S+ has stood still for \d+ s while loading layers\.0\.\S+ ",
        ),
        ("load-memory", r"error: rank 1 has not the memory for its part: planted"),
        ("draw-sleep", r"rank 0 of 2 on \S+ has stood still for \d+ s behind all_gather "),
    ],
)
def test_one_rank_goes_wrong(fault, words):
    # the fourth: after that of the embedding and the two of layer 0; a weight of layer 0
    started, rank = time.monotonic(), "0" if fault.startswith("draw") else "1"
    limit = {"NBFLOW_HANG_S": str(HANG_S)}
    done = mpirun(2, str(FAULTS), fault, rank, "4", *RUN, environment=limit)
    assert done.returncode != 0
    assert re.search(words, done.stderr), done.stderr
    # the ranks tell each other how loading went, so nobody has to stop the others
    assert done.stderr.count("stopping all ranks") == (fault != "load-memory")
    assert time.monotonic() - started < 60  # start, HANG_S, the pauses; far below for ever


def test_a_limit_that_is_no_number():
    done = mpirun(2, "-m", "nbflow.cli", "env", environment={"NBFLOW_HANG_S": "soon"})
    assert done.returncode == 2
    assert "NBFLOW_HANG_S must be a positive number of seconds, got 'soon'" in done.stderr


def test_a_sweep_keeps_its_rows_and_goes_on(tmp_path):
    sweep = tmp_path / "two.toml"
    sweep.write_text(
        '[sweep]\nname = "two"\nmeasures = ["decode"]\n'
        '[settings]\nmodel = "tiny_python"\nprompt = 8\ndecode = 2\nrepeats = 1\nwarmup = 0\n'
        'threads = 1\n[axes]\npartition = ["0", "0&1"]\n'
    )
    arguments = ("sweep", str(sweep), "--out", str(tmp_path))
    killed = mpirun(2, str(FAULTS), "kill", "1", "3", *arguments)
    assert killed.returncode != 0
    assert "was killed by SIGKILL" in killed.stderr
    (kept,) = (tmp_path / "two" / "points").glob("*/result.json")
    written = kept.stat().st_mtime_ns
    again = mpirun(2, "-m", "nbflow.cli", *arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert kept.stat().st_mtime_ns == written
    assert (tmp_path / "two" / "points.csv").read_text().count("done") == 2

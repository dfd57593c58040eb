"""Sweeps in a subprocess that are killed or interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest
from mpirun import PYTHONPATH

from nbflow_experiments.report.data import load_results
from nbflow_experiments.store.results_folder import ResultsFolder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def start(
    sweep_file: Path,
    *arguments: str,
    delay_s: float = 0.0,
    failures: str = "",
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = PYTHONPATH
    environment |= {"FAKE_FOLDER": str(sweep_file.parent / "m"), "FAKE_DELAY_S": str(delay_s)}
    environment["FAKE_FAILURES"] = failures
    command = [sys.executable, str(HERE / "fake_backend.py"), "sweep", str(sweep_file)]
    return subprocess.Popen(
        [*command, "--out", str(sweep_file.parent / "out"), *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_points(folder: Path, n: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 60
    while len(list(folder.glob("points/*/result.json"))) < n:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def test_kill_loses_no_finished_point_and_leaves_readable_files(sweep_file: Path) -> None:
    folder = sweep_file.parent / "out" / "unit"
    process = start(sweep_file, delay_s=0.05)
    wait_for_points(folder, 4, process)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    kept = {p: p.read_bytes() for p in folder.glob("points/*/result.json")}
    assert 4 <= len(kept) < 12
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    for path in folder.rglob("*.h5"):
        with h5py.File(path, "r") as file:
            assert len(file) > 0
    assert len(load_results(folder).points) == len(kept)  # the report accepts unfinished sweeps

    code, out, err = finish(start(sweep_file, delay_s=0.0))
    assert code == 2
    assert "--resume" in err
    code, out, err = finish(start(sweep_file, "--resume", delay_s=0.0))
    assert code == 0, err
    assert f"{len(kept)} of them done already" in out
    assert len(ResultsFolder(folder).finished()) == 12
    assert {p: p.read_bytes() for p in kept} == kept
    assert [launch["finished"] is None for launch in ResultsFolder(folder).launches()] == [
        True,
        False,
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_ends_in_order(sweep_file: Path, number: signal.Signals) -> None:
    folder = sweep_file.parent / "out" / "unit"
    process = start(sweep_file, delay_s=0.05)
    wait_for_points(folder, 2, process)
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 130
    assert "stopping after the present step" in err
    assert "interrupted; continue with --resume" in out
    assert out.strip().split("\n")[-1] == str(folder)
    finished = ResultsFolder(folder).finished()
    assert 2 <= len(finished) < 12
    assert (folder / "points.csv").read_text().count("\n") == len(finished) + 1
    assert not list(folder.rglob("*.part"))

"""Points that need MPI ranks of their own: the launcher starts mpirun for them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import sys
import time
from pathlib import Path

import h5py
import pandas as pd
import pytest
from fake_backend import FakeEngine
from test_sweep_interrupt import finish, start, wait_for_points

from nbflow_experiments.config.points import check_world, make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.sweep.mpi_runner import Job, command_of
from nbflow_experiments.sweep.resume_loop import Policy
from nbflow_kernels.errors import UsageError

has_mpi = (
    Path(sys.executable).with_name("mpirun").is_file() or shutil.which("mpirun") is not None
) and importlib.util.find_spec("mpi4py") is not None
needs_mpi = pytest.mark.skipif(
    not has_mpi, reason="needs mpi4py and mpirun: pip install -e '.[mpi]'"
)
ONE_BATCH = ("--batch", "1")


def rows(sweep_file: Path) -> pd.DataFrame:
    types = {"point": str, "partition": str}
    return pd.read_csv(sweep_file.parent / "out" / "unit" / "points.csv", dtype=types)


def launches(sweep_file: Path) -> list[dict[str, object]]:
    folder = sweep_file.parent / "out" / "unit" / "launches"
    return [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]


@pytest.mark.mpi
@needs_mpi
def test_one_sweep_of_several_numbers_of_ranks(sweep_file: Path) -> None:
    """Ranks that die make one row, and are started again for the other points."""
    arguments = (*ONE_BATCH, "--ranks", "0,2", "--weights", "q4,q5", "--partition", "0")
    # of the processes here and there: the first point in this one, the second on ranks
    code, out, err = finish(start(sweep_file, *arguments, failures="time:q4:kill@2"))
    assert code == 1, out + err
    table = rows(sweep_file).set_index(["ranks", "weights"])
    assert dict(table.status) == {
        (0, "q4"): "done",
        (0, "q5"): "done",
        (2, "q4"): "failed",
        (2, "q5"): "done",
    }
    message = table.error_message[2, "q4"]
    assert message.startswith("the job of 2 MPI ranks ended with exit code")
    folder = sweep_file.parent / "out" / "unit"
    log = (folder / "points" / table.point[2, "q4"] / "log.txt").read_text()
    assert "signal 9" in log  # the end of their output: the launcher's report
    assert "[4/4]" in out
    sizes = [launch["world_size"] for launch in launches(sweep_file)]
    assert sizes == [1, 2, 2]
    # points that were measured before another launch are as good as ever
    code, out, err = finish(start(sweep_file, *arguments, "--retry-failed"))
    assert code == 0, out + err
    assert set(rows(sweep_file).status) == {"done"}


@pytest.mark.mpi
@needs_mpi
def test_ranks_that_hang_are_ended(sweep_file: Path) -> None:
    arguments = (*ONE_BATCH, "--weights", "q2", "--ranks", "auto", "--timeout", "5")
    code, out, err = finish(start(sweep_file, *arguments, failures="load:q2:hang"))
    assert code == 1, out + err
    table = rows(sweep_file).set_index("partition")
    assert dict(table.status) == {"0": "timeout", "0&1": "done"}
    assert dict(table.ranks) == {"0": 1, "0&1": 2}
    assert table.error_message["0"] == "ended after 5 s (--timeout)"


@pytest.mark.mpi
@needs_mpi
def test_each_rank_writes_a_file_and_the_first_a_master(sweep_file: Path) -> None:
    arguments = (*ONE_BATCH, "--weights", "q4", "--partition", "0&1", "--ranks", "2")
    code, out, err = finish(start(sweep_file, *arguments))
    assert code == 0, out + err
    folder = sweep_file.parent / "out" / "unit"
    (name,) = rows(sweep_file).point
    point = folder / "points" / name
    assert {p.name for p in point.glob("*.h5")} == {
        "arrays.h5",
        "arrays.rank0.h5",
        "arrays.rank1.h5",
    }
    for path, group in ((point / "arrays.h5", "/"), (folder / "results.h5", f"points/{name}")):
        with h5py.File(path, "r") as file:
            master = file[group]
            assert list(master["ranks"]) == ["0", "1"]
            together = master["decode_s_by_rank"]
            assert together.is_virtual
            assert together.attrs["unit"] == "s"
            assert together.shape == (2, 3)
            for rank in (0, 1):
                own = master["ranks"][str(rank)]["decode_s"]
                assert Path(own.file.filename).name == f"arrays.rank{rank}.h5"
                assert own.attrs["unit"] == "s"
                assert (together[rank] == own[...]).all()
            assert (master["decode_s"][...] == together[0]).all()  # the rank that leads


@pytest.mark.mpi
@needs_mpi
def test_a_request_to_stop_reaches_the_ranks(sweep_file: Path) -> None:
    arguments = (*ONE_BATCH, "--ranks", "2", "--partition", "0", "--measures", "decode")
    process = start(sweep_file, *arguments, delay_s=1.0)
    wait_for_points(sweep_file.parent / "out" / "unit", 1, process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 130, out + err
    assert "interrupted; continue with --resume" in out
    assert 1 <= len(rows(sweep_file)) < 3
    assert set(rows(sweep_file).status) == {"done"}
    assert launches(sweep_file)[-1]["finished"]  # the ranks came to an end of their own


@pytest.mark.mpi
@needs_mpi
def test_ranks_end_when_their_launcher_is_killed(sweep_file: Path) -> None:
    arguments = (*ONE_BATCH, "--ranks", "2", "--partition", "0", "--measures", "decode")
    process = start(sweep_file, *arguments, delay_s=1.0)
    folder = sweep_file.parent / "out" / "unit"
    wait_for_points(folder, 1, process)
    limit = time.monotonic() + 60
    while not (holders := list(folder.glob("locks/*.json"))):  # the second point has begun
        assert time.monotonic() < limit
    holder = json.loads(holders[0].read_text())
    process.kill()
    finish(process)
    while Path(f"/proc/{holder['pid']}").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert len(list(folder.glob("points/*/result.json"))) < 3


@pytest.mark.usefixtures("fake")
def test_ranks_and_partitions_that_do_not_go_together(sweep_file: Path) -> None:
    points = make_points(load_sweep(sweep_file, lists={"ranks": ["1"]}))
    with pytest.raises(UsageError, match=r"needs ranks = 2, got 1; ranks = 'auto'"):
        check_world(points, 1)
    points = make_points(load_sweep(sweep_file, lists={"ranks": ["2"]}))
    check_world(points, 1)
    check_world(points, 2)
    with pytest.raises(UsageError, match=r"ranks = 2, but mpirun started 4 ranks; .*without"):
        check_world(points, 4)


def test_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert command_of("env srun -n {ranks} --exclusive", 3) == [
        "env",
        "srun",
        "-n",
        "3",
        "--exclusive",
    ]
    with pytest.raises(UsageError, match="where the number of ranks goes"):
        command_of("env srun", 3)
    with pytest.raises(UsageError, match="program 'nowhere' does not exist"):
        command_of("nowhere {ranks}", 3)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=r"ranks = 3 need mpirun.*--launcher"):
        command_of(None, 3)


def test_a_job_is_read_as_it_was_written(
    fake: FakeEngine, sweep_file: Path, tmp_path: Path
) -> None:
    points = tuple(make_points(load_sweep(sweep_file, lists={"ranks": ["2"]})))
    plugins, before = (str(tmp_path / "f.py"),), {"a": None, "b": "earlier"}
    job = Job(tmp_path, "launch", 2, points, plugins, Policy(2), before, {"a": 1})
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job

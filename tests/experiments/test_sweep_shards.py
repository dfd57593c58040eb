"""Several launches that write to one results folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_backend import FakeEngine
from test_sweep_interrupt import finish, start, wait_for_points

from nbflow_experiments.claims import STALE_S, Claims
from nbflow_experiments.config.points import LOAD_SETTINGS, make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.sweep.shard import Shard
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError


def run(sweep_file: Path, **options: Any) -> int:
    return run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", **options))


@pytest.fixture
def results(sweep_file: Path) -> ResultsFolder:
    return ResultsFolder(sweep_file.parent / "out" / "unit")


@pytest.mark.parametrize("count", [1, 2, 4, 5, 12, 30])
@pytest.mark.usefixtures("fake")
def test_shards_have_every_point_once(sweep_file: Path, count: int) -> None:
    points = make_points(load_sweep(sweep_file))  # 12 points, 6 models to load
    parts = [Shard(i, count).select(points) for i in range(count)]
    assert sorted(p.id for part in parts for p in part) == sorted(p.id for p in points)
    sizes = [len(part) for part in parts]
    if count <= 6:  # points of one model stay together
        loads = [{p.key(LOAD_SETTINGS) for p in part} for part in parts]
        assert sum(map(len, loads)) == 6
        assert max(map(len, loads)) - min(map(len, loads)) <= 1
    else:
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["3/3", "1", "a/2", "-1/2", "0/0"])
def test_wrong_shards_are_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"--shard must be I/N with I from 0 to N-1.*got"):
        Shard.parse(text)


@pytest.mark.usefixtures("fake")
def test_shards_of_one_sweep_meet_in_one_folder(
    sweep_file: Path, results: ResultsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sweep_file, shard=Shard(0, 2)) == 0
    assert "unit: 6 of 12 points, 0 of them done already" in capsys.readouterr().out
    assert len(results.finished()) == 6
    assert run(sweep_file, merge=True) == 1
    assert "6 of 12 points are finished" in capsys.readouterr().out
    assert run(sweep_file, shard=Shard(1, 2)) == 0
    table = pd.read_csv(results.path / "points.csv", dtype={"partition": str})
    assert len(table) == 12
    assert set(table.status) == {"done"}
    assert run(sweep_file, merge=True) == 0
    names = [launch["name"] for launch in results.launches()]
    assert len(set(names)) == 2
    by_launch = [(results.result(n) or {})["launch"] for n in results.finished()]
    assert {name: by_launch.count(name) for name in names} == dict.fromkeys(names, 6)
    kept = json.loads((results.path / "provenance.json").read_text())["launches"]
    assert kept == results.launches()


@pytest.mark.usefixtures("fake")
def test_only_the_shard_that_failed_says_so(
    fake: FakeEngine, sweep_file: Path, results: ResultsFolder
) -> None:
    def boom() -> None:
        raise RuntimeError("no")

    points = make_points(load_sweep(sweep_file))
    first = Shard(0, 2).select(points)[0].config
    fake.failures["load", str(first["weights"]), str(first["partition"])] = boom
    assert run(sweep_file, shard=Shard(0, 2)) == 1
    assert run(sweep_file, shard=Shard(1, 2)) == 0
    assert len(results.finished()) == 12


def test_nothing_to_merge(fake: FakeEngine, sweep_file: Path) -> None:
    with pytest.raises(UsageError, match="holds no results to merge"):
        run(sweep_file, merge=True)


def test_two_processes_share_the_points_and_run_none_twice(
    sweep_file: Path, results: ResultsFolder
) -> None:
    both = [start(sweep_file, "--resume", delay_s=0.02) for _ in range(2)]
    ends = [finish(process) for process in both]
    assert [code for code, _, _ in ends] == [0, 0], ends
    claims = sorted((results.path / "claims").iterdir())
    assert len(claims) == 12  # nobody had to take a point over
    assert all(name.name.endswith(".0.json") for name in claims)
    assert len(results.finished()) == 12
    assert pd.read_csv(results.path / "points.csv").status.eq("done").all()
    runs = {json.loads(path.read_text())["launch"] for path in claims}
    assert runs <= {launch["name"] for launch in results.launches()}


def test_the_point_of_a_killed_launch_is_taken_over(
    sweep_file: Path, results: ResultsFolder
) -> None:
    process = start(sweep_file, delay_s=0.5)
    wait_for_points(results.path, 1, process)
    while len(list(results.path.glob("claims/*.json"))) < 2:  # the second point has begun
        assert process.poll() is None
    process.kill()
    finish(process)
    code, out, err = finish(start(sweep_file, "--resume", delay_s=0.0))
    assert code == 0, err
    assert "another launch" not in out
    assert len(results.finished()) == 12
    assert len(list(results.path.glob("claims/*.1.json"))) == 1


@pytest.mark.usefixtures("fake")
def test_points_that_others_hold_are_left_to_them(
    sweep_file: Path, results: ResultsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    held = make_points(load_sweep(sweep_file))[3]
    other = Claims(results.path / "claims", "other")
    assert other.take(held.short)
    assert run(sweep_file) == 0
    out = capsys.readouterr().out
    assert f"1 points are being run by another launch ({os.uname().nodename}, process" in out
    assert results.result(held.short) is None
    assert len(results.finished()) == 11
    other.release()
    assert run(sweep_file, resume=True) == 0
    assert len(results.finished()) == 12


def foreign(path: Path, **changes: object) -> None:
    """Make a claim one of a process on another machine."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "scope": "elsewhere", **changes}))


def test_claims_of_other_machines_count_while_they_are_touched(tmp_path: Path) -> None:
    mine, theirs = Claims(tmp_path, "a"), Claims(tmp_path, "b")
    assert theirs.take("p")
    foreign(tmp_path / "p.0.json", host="far", pid=1)
    assert not mine.take("p")
    assert mine.holder("p") == "far, process 1"
    old = (tmp_path / "p.0.json").stat().st_mtime - STALE_S - 1
    os.utime(tmp_path / "p.0.json", (old, old))
    assert mine.holder("p") is None
    theirs.touch()
    assert not mine.take("p")
    os.utime(tmp_path / "p.0.json", (old, old))
    assert mine.take("p")
    assert mine.is_ours("p")
    assert not theirs.is_ours("p")  # it throws its result away


def test_a_number_that_the_system_gave_to_another_process_is_no_holder(tmp_path: Path) -> None:
    other = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    mine = Claims(tmp_path, "a")
    assert Claims(tmp_path, "b").take("p")
    data = json.loads((tmp_path / "p.0.json").read_text())
    (tmp_path / "p.0.json").write_text(json.dumps({**data, "started": "1"}))
    assert mine.take("p")  # our own number, but another start
    (tmp_path / "p.1.json").write_text(json.dumps({**data, "pid": int(other.stdout)}))
    assert Claims(tmp_path, "c").take("p")  # gone


def test_of_many_that_claim_at_once_one_succeeds(tmp_path: Path) -> None:
    start_together = threading.Barrier(8)
    taken: list[bool] = []

    def claim(i: int) -> None:
        claims = Claims(tmp_path, str(i))
        start_together.wait()
        taken.append(claims.take("p"))

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 7 + [True]

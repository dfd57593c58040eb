"""Several launches that write to one results folder."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_backend import FakeEngine
from test_sweep_interrupt import finish, start, wait_for_points

from nbflow_experiments.config.points import LOAD_SETTINGS, make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.sweep.point_lock import PointLocks, result_launch
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
    shown = [line for _, out, _ in ends for line in out.splitlines() if line.startswith("[")]
    assert len(shown) == 12
    assert len(results.finished()) == 12
    assert pd.read_csv(results.path / "points.csv").status.eq("done").all()
    assert not list(results.path.glob("locks/*.json"))


def _begun(results: ResultsFolder) -> bool:
    """Return whether a point is being measured."""
    holders = results.path.glob("locks/*.json")
    return any(results.result(holder.stem) is None for holder in holders)


def test_the_point_of_a_killed_launch_is_taken_over(
    sweep_file: Path, results: ResultsFolder
) -> None:
    process = start(sweep_file, delay_s=0.5)
    wait_for_points(results.path, 1, process)
    while not _begun(results):
        assert process.poll() is None
    process.kill()
    finish(process)
    assert len(list(results.path.glob("locks/*.json"))) == 1
    code, out, err = finish(start(sweep_file, "--resume", delay_s=0.0))
    assert code == 0, err
    assert "another launch" not in out
    assert len(results.finished()) == 12
    assert not list(results.path.glob("locks/*.json"))


@pytest.mark.usefixtures("fake")
def test_points_that_others_hold_are_left_to_them(
    sweep_file: Path, results: ResultsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    held = make_points(load_sweep(sweep_file))[3]
    other = PointLocks(results, "other", {})
    assert other.acquire(held)
    assert run(sweep_file) == 0
    out = capsys.readouterr().out
    assert f"1 points are being run by another launch ({os.uname().nodename}, process" in out
    assert results.result(held.short) is None
    assert len(results.finished()) == 11
    other.release()
    assert run(sweep_file, resume=True) == 0
    assert len(results.finished()) == 12


@pytest.mark.usefixtures("fake")
def test_a_point_is_not_measured_again_after_another_launch_has(
    sweep_file: Path, results: ResultsFolder
) -> None:
    point = make_points(load_sweep(sweep_file))[0]
    late = PointLocks(results, "late", {point.short: result_launch(results, point)})
    assert run(sweep_file) == 0
    assert not late.acquire(point)
    again = PointLocks(results, "again", {point.short: result_launch(results, point)})
    assert again.acquire(point)  # planned as a further attempt
    assert again.was_measuring(point)
    again.release()
    assert not again.was_measuring(point)


@pytest.mark.usefixtures("fake")
def test_of_many_that_lock_at_once_one_succeeds(sweep_file: Path, results: ResultsFolder) -> None:
    point = make_points(load_sweep(sweep_file))[0]
    start_together = threading.Barrier(8)
    acquired: list[bool] = []

    def acquire(i: int) -> None:
        locks = PointLocks(results, str(i), {})
        start_together.wait()
        acquired.append(locks.acquire(point))
        start_together.wait()

    threads = [threading.Thread(target=acquire, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(acquired) == [False] * 7 + [True]

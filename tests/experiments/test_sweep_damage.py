"""Results folders with damaged files, links and full disks: named, and never in the way."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_backend import HERE, FakeEngine

from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow_experiments.compare.selection import select
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.store.summary import write_summaries
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError

DAMAGE = {
    "empty": b"",
    "cut off": b'{"status": "done", "rea',
    "a list": b"[]",
    "null": b"null",
    "no keys": b"{}",
    "other types": b'{"status": 1, "id": [], "name": 2, "factors": {}, "config": 0}',
    "not UTF-8": b"\xff\xfe\x00",
    "a number without end": b"1" * 5000,
}
ONE_POINT = ("axes.batch=[1]", 'axes.weights=["f32"]', 'axes.partition=["0"]')


def run(sweep_file: Path, **options: Any) -> int:
    return run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", **options))


def out(sweep_file: Path) -> Path:
    return sweep_file.parent / "out" / "unit"


def one_point(sweep_file: Path) -> Path:
    """Run a sweep of one point; return its folder."""
    assert run(sweep_file, overrides=ONE_POINT) == 0
    (point,) = (out(sweep_file) / "points").iterdir()
    return point


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["result.json", "config.json"])
@pytest.mark.usefixtures("fake")
def test_a_damaged_point_is_measured_again(
    sweep_file: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    point = one_point(sweep_file)
    before = json.loads((point / "result.json").read_text())
    (point / name).write_bytes(content)
    write_summaries(ResultsFolder(out(sweep_file)))  # the others' tables can be written meanwhile
    assert run(sweep_file, overrides=ONE_POINT, resume=True) == 0
    printed = capsys.readouterr()
    assert f"{point / name} is damaged" in printed.err
    assert "0 of them done already" in printed.out
    after = json.loads((point / "result.json").read_text())
    assert after["launch"] != before["launch"]
    assert after["status"] == "done"
    assert (point / f"{name}.damaged").read_bytes() == content  # nothing is lost


@pytest.mark.usefixtures("fake")
def test_damaged_readings_count_as_damage(sweep_file: Path) -> None:
    point = one_point(sweep_file)
    result = json.loads((point / "result.json").read_text())
    result["readings"][0]["value"] = "fast"
    (point / "result.json").write_text(json.dumps(result))
    folder = ResultsFolder(out(sweep_file))
    assert folder.result(point.name) is None
    assert folder.finished() == []


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.usefixtures("fake")
def test_a_damaged_description_of_the_sweep_is_written_again(
    sweep_file: Path, content: bytes
) -> None:
    point = one_point(sweep_file)
    kept = (point / "result.json").read_bytes()
    path = out(sweep_file) / "sweep.json"
    whole = path.read_text()
    path.write_bytes(content)
    assert run(sweep_file, overrides=ONE_POINT, resume=True) == 0
    assert path.read_text() == whole
    assert (point / "result.json").read_bytes() == kept


@pytest.mark.usefixtures("fake")
def test_damaged_launches_and_lock_holders_are_ignored(sweep_file: Path) -> None:
    one_point(sweep_file)
    (launch,) = (out(sweep_file) / "launches").iterdir()
    launch.write_bytes(b"[")
    for lock in (out(sweep_file) / "locks").glob("*.lock"):  # a crash left holders behind
        lock.with_suffix(".json").write_bytes(b"[")
    assert run(sweep_file, resume=True) == 0


@pytest.mark.usefixtures("fake")
def test_damaged_arrays_are_left_out_and_named(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = one_point(sweep_file)
    (point / "arrays.h5").write_bytes(b"no HDF5")
    write_summaries(ResultsFolder(out(sweep_file)))
    assert f"{point / 'arrays.h5'} is damaged" in capsys.readouterr().err
    (out(sweep_file) / "results.h5").write_bytes(b"no HDF5 either")
    with pytest.raises(UsageError, match=r"results\.h5 is damaged"):
        select(str(out(sweep_file))).per_token(point.name)


@pytest.mark.parametrize("name", ["points", "points/POINT", "locks", "launches"])
@pytest.mark.usefixtures("fake")
def test_links_are_not_written_through(sweep_file: Path, tmp_path: Path, name: str) -> None:
    point = one_point(sweep_file)
    folder = out(sweep_file) / name.replace("POINT", point.name)
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    before = {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}
    folder.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="must be a folder, not a symbolic link"):
        run(sweep_file, resume=True)
    assert {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()} == before


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_stops_the_sweep_with_a_message(
    fake: FakeEngine, sweep_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **options: Any) -> Any:
        if fake.counts.get("load") == 3:  # some points are recorded by then
            monkeypatch.setattr(os, "fsync", full_disk)
        return whole(*args, **options)

    whole = fake.load
    monkeypatch.setattr("nbflow_experiments.backend.load", load)
    with pytest.raises(UsageError, match=r"No space left on device.*--resume"):
        run(sweep_file)
    done = len(list(out(sweep_file).glob("points/*/result.json")))
    assert 0 < done < 12
    monkeypatch.undo()
    fake.install(monkeypatch.setattr)
    assert run(sweep_file, resume=True) == 0
    assert len(list(out(sweep_file).glob("points/*/result.json"))) == 12


def test_a_full_disk_stops_all_ranks(
    fake: FakeEngine, sweep_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> int | str:
        HERE.rank = comm.rank
        options = SweepOptions(sweep_file, sweep_file.parent / "out", overrides=ONE_POINT[:2])
        try:
            return run_sweep(options, comm)
        except UsageError as error:
            return str(error)

    fake.size = 2
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda n: full_disk() if fake.counts.get("load", 0) >= 3 else fsync(n)
    )
    ranks = ThreadRanks(2)
    try:
        first, second = ranks.run(rank)
    finally:
        ranks.close()
    assert "No space left on device" in str(first)
    assert second == 2

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_backend import HERE, FakeEngine, FakeModel

from nbflow.distributed import Comm
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError


def run(sweep_file: Path, comm: Comm | None = None, **options: Any) -> int:
    return run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", **options), comm)


def results(sweep_file: Path) -> dict[str, dict[str, Any]]:
    folder = sweep_file.parent / "out" / "unit" / "points"
    return {p.parent.name: json.loads(p.read_text()) for p in folder.glob("*/result.json")}


def config(sweep_file: Path, name: str) -> dict[str, Any]:
    path = sweep_file.parent / "out" / "unit" / "points" / name / "config.json"
    return json.loads(path.read_text())["config"]


def metrics(result: dict[str, Any]) -> dict[str, float]:
    rows = result["readings"]
    return {r["metric"]: r["value"] for r in rows if r["rank"] is None and r["repeat"] is None}


def boom() -> None:
    raise MemoryError("no room for the weights")


def test_every_point_is_measured_and_recorded(
    fake: FakeEngine, sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sweep_file) == 0
    found = results(sweep_file)
    assert len(found) == 12
    assert {r["status"] for r in found.values()} == {"done"}
    for name, result in found.items():
        folder = sweep_file.parent / "out" / "unit" / "points" / name
        assert {p.name for p in folder.iterdir()} == {
            "config.json",
            "result.json",
            "log.txt",
            "arrays.h5",
        }
        assert result["id"].startswith(name)
    # one load per (weights, partition) and one for the reference
    assert fake.counts["load"] == fake.counts["close"] == 7
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[0] == "unit: 12 points, 0 of them done already"
    assert lines[-1] == str(sweep_file.parent / "out" / "unit")  # the path comes last


def test_points_that_differ_in_batch_share_their_quality(
    fake: FakeEngine, sweep_file: Path
) -> None:
    assert run(sweep_file) == 0
    found = results(sweep_file)
    # 4 windows for each of 6 models and for the reference, not for each of 12 points
    assert fake.counts["logits"] == 4 * 7
    shared = {n: r["quality_shared_from"] for n, r in found.items() if r["quality_shared_from"]}
    assert len(shared) == 6
    for name, source in shared.items():
        here, there = config(sweep_file, name), config(sweep_file, source)
        assert {k for k in here if here[k] != there[k]} == {"batch"}
        assert metrics(found[name])["perplexity"] == metrics(found[source])["perplexity"]
        log = (sweep_file.parent / "out" / "unit" / "points" / name / "log.txt").read_text()
        assert f"perplexity is that of point {source}" in log


@pytest.mark.usefixtures("fake")
def test_more_noise_is_more_error(sweep_file: Path) -> None:
    assert run(sweep_file) == 0
    errors = {config(sweep_file, n)["weights"]: metrics(r) for n, r in results(sweep_file).items()}
    for metric in ("weight_error_relative", "kld_mean_nats", "kld_p99_nats"):
        assert errors["f32"][metric] == 0 < errors["q4"][metric] < errors["q2"][metric]
    assert errors["f32"]["top1_agreement_share"] == 1 >= errors["q2"]["top1_agreement_share"]


@pytest.mark.parametrize("where", ["load", "logits", "time"])
def test_a_failing_point_is_a_row_and_the_sweep_goes_on(
    fake: FakeEngine, sweep_file: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    fake.failures[where, "q4", "0&1"] = boom
    assert run(sweep_file) == 1
    found = results(sweep_file)
    failed = {n: r for n, r in found.items() if r["status"] == "oom"}
    assert len(found) == 12
    assert len(failed) == 2
    for name, result in failed.items():
        assert result["error"]["type"] == "MemoryError"
        assert result["error"]["message"] == "no room for the weights"
        assert "in boom" in result["error"]["traceback"]
        log = (sweep_file.parent / "out" / "unit" / "points" / name / "log.txt").read_text()
        assert "no room for the weights" in log
        assert ("perplexity" in metrics(result)) == (where == "time")  # earlier measures are kept
    assert "failed: 2 points with MemoryError: no room" in capsys.readouterr().out


def test_resume_runs_only_what_is_missing(fake: FakeEngine, sweep_file: Path) -> None:
    fake.failures["load", "q4", "0"] = boom
    assert run(sweep_file) == 1
    with pytest.raises(UsageError, match=r"holds results already \(12 finished.*--resume"):
        run(sweep_file)
    loads = fake.counts["load"]
    assert run(sweep_file, resume=True) == 1  # failed points stay failed
    assert fake.counts["load"] == loads
    fake.failures.clear()
    assert run(sweep_file, retry_failed=True) == 0
    assert fake.counts["load"] == loads + 1  # the reference is kept on disk
    assert {r["status"] for r in results(sweep_file).values()} == {"done"}


@pytest.mark.usefixtures("fake")
def test_resume_keeps_the_points_of_a_narrower_sweep(sweep_file: Path) -> None:
    assert run(sweep_file, overrides=("axes.batch=[1]",)) == 0
    before = {n: r["finished"] for n, r in results(sweep_file).items()}
    assert run(sweep_file, resume=True) == 0
    after = {n: r["finished"] for n, r in results(sweep_file).items()}
    assert len(before) == 6
    assert len(after) == 12
    assert before.items() <= after.items()


@pytest.mark.usefixtures("fake")
def test_resume_notices_a_changed_configuration(sweep_file: Path) -> None:
    assert run(sweep_file) == 0
    name = next(iter(results(sweep_file)))
    path = sweep_file.parent / "out" / "unit" / "points" / name / "config.json"
    path.write_text(path.read_text().replace('"prompt": 8', '"prompt": 9'))
    with pytest.raises(UsageError, match="was changed after the point was run"):
        run(sweep_file, resume=True)


@pytest.mark.usefixtures("fake")
def test_resume_with_another_number_of_ranks_is_refused(sweep_file: Path) -> None:
    assert run(sweep_file) == 0
    (path,) = (sweep_file.parent / "out" / "unit" / "launches").iterdir()
    path.write_text(path.read_text().replace('"world_size": 1', '"world_size": 4'))
    with pytest.raises(UsageError, match="begun with 4 MPI ranks, now there are 1"):
        run(sweep_file, resume=True)


@pytest.mark.usefixtures("fake")
def test_dry_run_writes_nothing(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sweep_file, dry_run=True) == 0
    out = capsys.readouterr().out
    assert "12 points, 0 excluded" in out
    assert "logits of the reference: about 0.0 MB" in out
    assert not (sweep_file.parent / "out").exists()


def test_dry_run_names_the_points_whose_partition_is_impossible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "blocks.toml"
    file.write_text(
        '[sweep]\nname = "blocks"\nmeasures = ["decode"]\n'
        '[settings]\nmodel = "tiny_python"\nranks = "auto"\n'
        '[axes]\nweights = ["tq1_0", "q4"]\npartition = ["0", "0&1"]\n'
    )
    assert run(file, dry_run=True) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "will fail" in x]
    assert "partition '0&1': tiny_python" in line
    assert "whole blocks of 256 columns" in line


def run_on_ranks(sweep_file: Path, fake: FakeEngine, size: int) -> list[int]:
    """Run a sweep on threads that behave like MPI ranks."""
    fake.size = size

    def main(comm: Comm) -> int:
        HERE.rank = comm.rank
        return run(sweep_file, comm)

    ranks = ThreadRanks(size)
    try:
        codes: list[int] = ranks.run(main)
    finally:
        ranks.close()
    return codes


def test_ranks_run_in_step(fake: FakeEngine, sweep_file: Path) -> None:
    assert run_on_ranks(sweep_file, fake, 3) == [0, 0, 0]  # rank 2 never takes part
    found = results(sweep_file)
    assert len(found) == 12
    for name, result in found.items():
        rows = [r for r in result["readings"] if r["metric"] == "weight_bytes"]
        ranks = [r["rank"] for r in rows if r["rank"] is not None]
        assert ranks == ([0, 1] if config(sweep_file, name)["partition"] == "0&1" else [0])
    assert not {r["error"] for r in found.values() if r["error"]}


@pytest.mark.parametrize("where", ["load", "time"])
def test_a_failure_on_one_rank_is_one_on_all(
    fake: FakeEngine, sweep_file: Path, where: str
) -> None:
    def fail_on_rank_1() -> None:
        if getattr(HERE, "rank", 0) == 1:
            boom()

    fake.failures[where, "q4", "0&1"] = fail_on_rank_1
    assert run_on_ranks(sweep_file, fake, 2) == [1, 1]
    failed = [r for r in results(sweep_file).values() if r["status"] == "oom"]
    assert len(failed) == 2
    assert all(r["error"]["ranks"] == [1] for r in failed)
    assert len(results(sweep_file)) == 12


def test_a_partition_without_rank_0(fake: FakeEngine, sweep_file: Path) -> None:
    text = sweep_file.read_text().replace('["0", "0&1"]', '["1;2"]')
    sweep_file.write_text(text)
    assert run_on_ranks(sweep_file, fake, 3) == [0, 0, 0]
    for result in results(sweep_file).values():
        assert metrics(result)["perplexity"] > 1
        assert metrics(result)["decode_tokens_per_s"] > 0


def test_a_sweep_that_cannot_start_ends_on_every_rank(fake: FakeEngine, sweep_file: Path) -> None:
    sweep_file.write_text(sweep_file.read_text().replace('"0&1"', '"0&7"'))
    codes: list[int] = []

    def main(comm: Comm) -> None:
        if comm.rank == 0:
            with pytest.raises(UsageError, match="names rank 7"):
                run(sweep_file, comm)
        else:
            codes.append(run(sweep_file, comm))

    ranks = ThreadRanks(2)
    ranks.run(main)
    ranks.close()
    assert codes == [2]
    assert not (sweep_file.parent / "out").exists()


def test_scoring_error_of_the_leading_rank_does_not_stop_the_others_midway(
    fake: FakeEngine, sweep_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    exact = FakeModel.logits

    def logits(self: FakeModel, ids: Any) -> Any:
        if self.partition == "0&1":
            calls.append(getattr(HERE, "rank", 0))
        return exact(self, ids)

    def broken(*_: Any) -> None:
        raise FloatingPointError("cannot be scored")

    monkeypatch.setattr(FakeModel, "logits", logits)
    monkeypatch.setattr("nbflow_experiments.scoring.score_text.score", broken)
    sweep_file.write_text(sweep_file.read_text().replace('["0", "0&1"]', '["0&1"]'))
    assert run_on_ranks(sweep_file, fake, 2) == [1, 1]
    assert calls.count(0) == calls.count(1) == 4 * 6

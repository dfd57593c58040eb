"""Points that hang, die, run out of memory or give no numbers: each becomes a row."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_backend import FakeEngine, FakeModel
from test_sweep_interrupt import finish, start

from nbflow_experiments.sweep import mpi_runner
from nbflow_experiments.sweep.resume_loop import Policy
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError

NARROW = ("--set", "axes.batch=[1]", "--set", 'axes.partition=["0"]')
SMALL = ("axes.batch=[1]", 'axes.partition=["0"]')


def run(sweep_file: Path, **options: Any) -> int:
    return run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", SMALL, **options))


def rows(sweep_file: Path) -> pd.DataFrame:
    table = pd.read_csv(sweep_file.parent / "out" / "unit" / "points.csv", dtype={"point": str})
    return table.set_index("weights")


def log(sweep_file: Path, point: str) -> str:
    return (sweep_file.parent / "out" / "unit" / "points" / point / "log.txt").read_text()


def test_isolated_points_that_end_badly_are_rows(sweep_file: Path) -> None:
    weights = ["q3", "q4", "q5", "f32"]
    failures = "time:q3:memory load:q4:kill time:q5:exit"
    arguments = (*NARROW, "--set", f"axes.weights={weights}", "--isolate")
    code, out, err = finish(start(sweep_file, *arguments, failures=failures))
    assert code == 1, out + err
    table = rows(sweep_file)
    assert dict(table.status) == {"q3": "oom", "q4": "failed", "q5": "failed", "f32": "done"}
    assert table.error_message["q3"] == "no room"
    assert table.perplexity["q3"] > 1  # earlier measures are kept
    assert table.error_message["q4"] == "the process of the point was killed by SIGKILL"
    assert table.error_message["q5"] == "the process of the point ended with exit code 7"
    assert "last words" in log(sweep_file, table.point["q5"])
    assert table.perplexity["f32"] > 1
    assert "[4/4]" in out


def test_a_point_that_hangs_is_ended(sweep_file: Path) -> None:
    arguments = (*NARROW, "--set", "axes.weights=['q2']", "--timeout", "1")
    code, out, err = finish(start(sweep_file, *arguments, failures="load:q2:hang"))
    assert code == 1, out + err
    table = rows(sweep_file)
    assert dict(table.status) == {"q2": "timeout"}
    assert table.error_message["q2"] == "ended after 1 s (--timeout)"
    assert "failed: 1 points with Timeout: ended after 1 s" in out


def test_an_isolated_point_gives_the_same_numbers(fake: FakeEngine, sweep_file: Path) -> None:
    only = ("--set", 'axes.weights=["q4"]')
    code, _, err = finish(start(sweep_file, *NARROW, *only, "--isolate"))
    assert code == 0, err
    apart = rows(sweep_file)
    out = sweep_file.parent / "again"
    overrides = (*SMALL, 'axes.weights=["q4"]')
    assert run_sweep(SweepOptions(sweep_file, out, overrides)) == 0
    together = pd.read_csv(out / "unit" / "points.csv", dtype={"point": str}).set_index("weights")
    for name in ("point", "perplexity", "kld_mean_nats", "weight_error_relative"):
        assert apart[name].tolist() == together[name].tolist()


def test_no_process_runs_modules_of_the_current_folder(sweep_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    marker = f"open({str(folder / 'executed')!r}, 'a').write(__name__)\n"
    for name in ("json", "http", "random", "socket"):
        (folder / f"{name}.py").write_text(marker)
    only = ("--set", 'axes.weights=["q4"]')
    code, _, err = finish(start(sweep_file, *NARROW, *only, "--isolate", folder=folder))
    assert not (folder / "executed").exists()
    assert code == 0, err
    ranks = [*mpi_runner.PROGRAM, "--help"]
    done = subprocess.run(ranks, cwd=folder, capture_output=True, text=True, timeout=60)
    assert not (folder / "executed").exists()
    assert done.returncode == 0, done.stderr


def test_stopping_an_isolated_point(sweep_file: Path) -> None:
    folder = sweep_file.parent / "out" / "unit"
    process = start(sweep_file, *NARROW, "--isolate", delay_s=0.5)
    limit = time.monotonic() + 60
    while not list(folder.glob("points/*/config.json")):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 130, err
    assert "interrupted; continue with --resume" in out
    assert len(list(folder.glob("points/*/result.json"))) <= 1  # the others never began
    assert not list(folder.glob("locks/*.json"))  # every lock was released


def test_no_process_is_left_when_the_launch_is_killed(sweep_file: Path) -> None:
    process = start(sweep_file, *NARROW, "--isolate", failures="load:f32:hang")
    folder = sweep_file.parent / "out" / "unit"
    limit = time.monotonic() + 60
    while not (children := _children(process.pid)) or not list(folder.glob("points/*/config.json")):
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.kill()
    finish(process)
    while any(Path(f"/proc/{child}").exists() and not _is_zombie(child) for child in children):
        assert time.monotonic() < limit
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(text) for text in path.read_text().split()] if path.is_file() else []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_numbers_that_are_not_finite_are_a_status(
    fake: FakeEngine, sweep_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = FakeModel.logits

    def logits(self: FakeModel, ids: Any) -> Any:
        found = exact(self, ids).copy()
        if self.weights == "q2":
            found[0] = math.nan
        return found

    monkeypatch.setattr(FakeModel, "logits", logits)
    assert run(sweep_file) == 1
    table = rows(sweep_file)
    assert dict(table.status) == {"f32": "done", "q4": "done", "q2": "nonfinite"}
    assert table.nonfinite_share["q2"] > 0 == table.nonfinite_share["q4"]
    assert table.error_message["q2"].startswith("not finite: ")
    assert "perplexity" in table.error_message["q2"]
    assert table.decode_tokens_per_s["q2"] > 0  # successful measures are kept


@pytest.mark.parametrize(("failures", "status", "attempts"), [(1, "done", 2), (9, "failed", 3)])
def test_retries(
    fake: FakeEngine,
    sweep_file: Path,
    capsys: pytest.CaptureFixture[str],
    failures: int,
    status: str,
    attempts: int,
) -> None:
    calls: list[None] = []

    def sometimes() -> None:
        calls.append(None)
        if len(calls) <= failures:
            raise OSError("busy")

    fake.failures["load", "q4", "0"] = sometimes
    assert run(sweep_file, policy=Policy(retries=2)) == int(status != "done")
    assert rows(sweep_file).status["q4"] == status
    assert rows(sweep_file).attempt["q4"] == len(calls) == attempts
    assert rows(sweep_file).attempt["f32"] == 1
    out = capsys.readouterr().out
    assert out.count("failed (OSError: busy), once more") == attempts - 1
    assert "[3/3]" in out


def test_fail_fast_stops_at_the_first_failure(
    fake: FakeEngine, sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def boom() -> None:
        raise OSError("broken")

    fake.failures["load", "q4", "0"] = boom
    assert run(sweep_file, policy=Policy(fail_fast=True)) == 1
    assert dict(rows(sweep_file).status) == {"f32": "done", "q4": "failed"}  # q2 never began
    assert "stopped at the first failure (--fail-fast)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": -1}, "--retries must be at least 0, got -1"),
        ({"timeout_s": 0.0}, "--timeout must be more than 0 seconds, got 0"),
        ({"timeout_s": math.nan}, "--timeout must be more than 0 seconds, got nan"),
    ],
)
def test_wrong_policies_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Policy(**options)

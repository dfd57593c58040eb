"""Comparing measured points: intervals, pairs, refusals, the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nbflow.cli import main
from nbflow_experiments.compare.bootstrap import paired, unpaired
from nbflow_experiments.compare.pairs import compare
from nbflow_experiments.compare.selection import select
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "settings.eval_tokens=256",
    "settings.eval_window=64",
    "settings.prompt=8",
    "settings.decode=2",
    "settings.repeats=3",
    "settings.min_repetition_s=0",
    'axes.weights=["q2", "q4"]',
    'axes.partition=["0"]',
    "axes.batch=[1, 2]",
)


def test_a_paired_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    """Texts differ a hundred times as much as the two sides; windows have something in common."""
    rng = np.random.default_rng(0)
    hits, widths = 0, []
    for _ in range(60):
        text = np.repeat(rng.normal(2, 1, 40), 16)
        a = text + rng.normal(0, 0.1, 640)
        b = a + 0.01 + np.repeat(rng.normal(0, 0.02, 40), 16) + rng.normal(0, 0.02, 640)
        found = paired(a, b, 16)
        hits += found.low <= 0.01 <= found.high
        widths.append(found.high - found.low)
    # binomial with p = 0.95: fewer than 50 of 60 has a probability below 1e-4
    assert hits >= 50
    # 2 * 1.96 * sqrt((0.02**2 + 0.02**2 / 16) / 40) = 0.0128, known to 1 / sqrt(2 * 40) = 11 %
    assert np.mean(widths) == pytest.approx(0.0128, rel=0.15)


def test_a_function_of_the_mean() -> None:
    a, b = np.full(32, np.log(4.0)), np.full(32, np.log(5.0))
    found = paired(a, b, 8, np.exp)
    assert (found.a, found.b) == (pytest.approx(4), pytest.approx(5))
    assert (found.low, found.high) == (pytest.approx(1), pytest.approx(1))
    assert found.is_clear
    assert not paired(a, a, 8, np.exp).is_clear
    assert np.isnan(paired(a, b, 32).low)  # one window gives no spread


def test_repetitions() -> None:
    found = unpaired(np.array([10.0, 11, 12]), np.array([20.0, 22, 24]))
    assert found.change == 2
    assert 20 / 12 <= found.low < 2 < found.high <= 2.4
    assert found.is_clear
    assert not unpaired(np.array([10.0, 11, 12]), np.array([10.5, 11.0, 11.5])).is_clear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare")
    assert (
        run_sweep(SweepOptions(ROOT / "experiments" / "sweeps" / "demo.toml", out, SETTINGS)) == 0
    )
    return out / "demo"


def test_points_of_one_sweep(folder: Path) -> None:
    found = compare(select(f"{folder}:weights=q2"), select(f"{folder}:weights=q4"))
    by_name = {(c.label["batch"], c.metric): c for c in found}
    kld = by_name[1, "kld_mean_nats"]
    assert kld.basis == "windows"
    assert kld.interval.n == 4
    assert kld.interval.is_clear
    assert kld.interval.high < 0  # q4 is nearer to the reference
    assert by_name[2, "decode_tokens_per_s"].basis == "repetitions"
    assert by_name[1, "weight_bytes"].basis == "-"
    assert by_name[1, "weight_bytes"].interval.change > 0


def test_a_sweep_with_itself(folder: Path) -> None:
    for c in compare(select(str(folder)), select(str(folder)), ["perplexity", "kld_mean_nats"]):
        assert set(c.label) == {"weights", "batch"}
        assert (c.interval.change, c.interval.low, c.interval.high) == (0, 0, 0)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("absent", "{}", "not a results folder"),
        ("{}:wieghts=q2", "{}", "did you mean 'weights'"),
        ("{}:weights", "{}", "must be NAME=VALUE"),
        ("{}:weights=q8", "{}", "weights is q2, q4"),
        ("{}:batch=1", "{}:weights=q2,kv=f32", "kv is f16"),
    ],
)
def test_refusals(a: str, b: str, message: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=message):
        compare(*(select(text.replace("{}", str(folder))) for text in (a, b)))


def test_failed_points_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text((folder / "points.csv").read_text().replace("done", "oom"))
    (tmp_path / "results.csv").write_text((folder / "results.csv").read_text())
    with pytest.raises(UsageError, match=r"the points \(\d+\) all failed; see .*log\.txt"):
        select(f"{tmp_path}:weights=q2")


def test_sides_without_pairs(folder: Path, tmp_path: Path) -> None:
    for name in ("points.csv", "results.csv"):
        text = (folder / name).read_text().replace("tiny_python", "another")
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="has a partner"):
        compare(select(str(folder)), select(str(tmp_path)))


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [f"{folder}:weights=q2,batch=1", f"{folder}:weights=q4,batch=1"]
    for extra in ([], ["--json", "--metric", "perplexity"]):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *sides, *extra])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        if extra:
            (row,) = json.loads(out)
            assert row["low"] <= row["change"] <= row["high"]
        else:
            assert "| kld_mean_nats" in out
            assert "4 windows" in out

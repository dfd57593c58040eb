"""The sweep of state bits: its points, and a part of it on the bundled hybrid."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import nbflow
from nbflow.planner.memory import PAGE_SIZE
from nbflow_experiments.backend import plan_memory
from nbflow_experiments.config.points import estimate_bytes, make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError

FILE = Path(__file__).parents[2] / "experiments" / "sweeps" / "state_bits.toml"


def test_points() -> None:
    points = [p.config for p in make_points(load_sweep(FILE))]
    whole = [p for p in points if "=" not in str(p["weights"])]
    assert len(points) == len(whole) + 16 == 32
    assert {p["state"] for p in whole} == {"f32", "f16", "bf16", "q8_0"}


def test_a_part(tmp_path: Path) -> None:
    """Errors are the same on every machine to the rounding of float32, 1e-6 of a logit."""
    text = (FILE.parents[2] / "tests" / "conftest.py").read_text()
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "part.toml").write_text(
        """
        [sweep]
        measures = ["divergence"]
        [settings]
        model = "tiny_python_hybrid"
        kv = "f32"
        eval_text = "text.txt"
        eval_tokens = 256
        eval_window = 64
        threads = 1
        [axes]
        weights = ["f32", "*.delta.*=q4_0"]
        state = ["f32", "f16", "bf16", "q8_0"]
        [[exclude]]
        weights = "*.delta.*=q4_0"
        state = ["f16", "bf16", "q8_0"]
        """
    )
    options = SweepOptions(tmp_path / "part.toml", tmp_path / "out")
    assert run_sweep(options) == 0
    table = pd.read_csv(tmp_path / "out" / "part" / "points.csv").set_index(["weights", "state"])
    assert set(table.status) == {"done"}
    kld = table.kld_mean_nats
    assert kld["f32", "f32"] < 1e-9
    assert 1e-9 < kld["f32", "f16"] < kld["f32", "bf16"] / 8  # eight times as fine
    assert kld["f32", "f16"] < kld["f32", "q8_0"]
    assert kld["*.delta.*=q4_0", "f32"] > kld["f32", "bf16"]


def test_estimated_bytes_are_those_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, and a state for each sequence in every format; the plan's pages are whole."""
    (tmp_path / "sizes.toml").write_text(
        """
        [sweep]
        measures = ["decode"]
        [settings]
        model = "tiny_python_hybrid"
        prompt = 20
        decode = 11
        threads = 1
        [axes]
        state = ["f32", "f16", "bf16", "q8_0"]
        weights = ["f32", "q4_0"]
        batch = [1, 3]
        """
    )
    sizes, pages = [], set()
    for point in make_points(load_sweep(tmp_path / "sizes.toml")):
        found = estimate_bytes(point)
        (rank,) = plan_memory(point.config, "0").ranks
        batch, n_tokens = point.config["batch"], point.config["prompt"] + point.config["decode"]
        assert found["weight_bytes"] == rank.weight_bytes
        page_bytes = found["kv_bytes"] // (batch * n_tokens) * PAGE_SIZE
        n_pages = (rank.kv_bytes - found["state_bytes"]) / page_bytes
        pages.add((batch, n_pages))
        sizes.append(found["state_bytes"])
    assert len(pages) == 2  # the same in all formats
    assert all(n == int(n) >= batch for batch, n in pages)
    assert len(set(sizes)) == 6  # f16 and bf16 take the same
    assert run_sweep(SweepOptions(tmp_path / "sizes.toml", tmp_path / "out", dry_run=True)) == 0
    printed = capsys.readouterr().out
    assert f"{max(sizes) / 1e6:.2f}" in printed.split("states MB")[1]
    assert "MB of weights, key/value cache and states in all ranks" in printed


def test_patterns_without_a_matrix_are_refused() -> None:
    with pytest.raises(UsageError, match=r"pattern '\*.ssm.\*' is for no matrix"):
        nbflow.load("tiny_python_hybrid", weights="*.ssm.*=q4_0")

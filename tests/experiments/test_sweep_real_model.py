"""Sweeps over the bundled model with the real engine, in process and under mpirun."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest
from mpirun import MPIRUN, mpirun

from nbflow_experiments.report import write_report
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep

ROOT = Path(__file__).parents[2]
SIZES = [
    "settings.eval_tokens=128",
    "settings.eval_window=64",
    "settings.prompt=8",
    "settings.decode=2",
    "settings.repeats=2",
    "settings.min_repetition_s=0",
    'axes.weights=["f32", "q4"]',
    'axes.partition=["0", "0&1"]',
]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine")
    code = run_sweep(SweepOptions(ROOT / "experiments" / "sweeps" / "demo.toml", out, tuple(SIZES)))
    assert code == 0
    return out / "demo"


def read(folder: Path) -> pd.DataFrame:
    types = {"point": str, "partition": str}
    return pd.read_csv(folder / "points.csv", dtype=types).set_index("point")


def test_the_demo_sweep_gives_sensible_numbers(in_process: Path) -> None:
    table = read(in_process)
    assert len(table) == 8
    assert set(table.status) == {"done"}
    exact, coarse = table[table.weights == "f32"], table[table.weights == "q4"]
    assert (exact.weight_error_relative == 0).all()
    # 16 levels over the 4.1 sigma that 32 normal weights span: 4.1 / 15 / sqrt(12) = 0.08 sigma
    assert coarse.weight_error_relative.between(0.05, 0.09).all()
    # The only differences to the reference: float16 keys and values (2**-11 relative) and order.
    assert (exact.kld_mean_nats.abs() < 1e-5).all()
    assert (coarse.kld_mean_nats > 100 * exact.kld_mean_nats.max()).all()
    assert (table.perplexity < 2048 / 10).all()  # 2048: a model that knows nothing
    assert (table.prefill_tokens_per_s > 0).all()
    assert (table.peak_rss_bytes > 1e7).all()
    assert coarse.weight_bytes.max() < exact.weight_bytes.min()


def test_bytes_sent_are_those_predicted(in_process: Path) -> None:
    table = read(in_process)
    alone, shared = table[table.partition == "0"], table[table.partition == "0&1"]
    assert (alone.traffic_measured_bytes == 0).all()
    assert (shared.traffic_measured_bytes > 0).all()
    assert (table.traffic_measured_bytes == table.traffic_predicted_bytes).all()


def test_the_report_of_a_real_sweep(in_process: Path, tmp_path: Path) -> None:
    page, figures = write_report(in_process, tmp_path / "report.html")
    names = [figure.stem for figure in figures]
    # Two batch sizes and more than one format: the figure of the speed has the throughput.
    assert names == [x for x in ("quality", "memory", "speed", "partitions") for _ in range(2)]
    assert page.read_text(encoding="utf-8").count("<svg") == 4


def test_the_memory_of_a_point_is_its_own(tmp_path: Path) -> None:
    overrides = [
        x for x in SIZES if x.split("=")[0] in ("settings.eval_tokens", "settings.eval_window")
    ]
    overrides += ['axes.weights=["f32"]', 'axes.partition=["0"]', "axes.batch=[16, 2, 1]"]
    overrides += [
        'sweep.measures=["perplexity", "memory"]',
        "settings.prompt=200",
        "settings.decode=16",
    ]
    file = ROOT / "experiments" / "sweeps" / "demo.toml"
    assert run_sweep(SweepOptions(file, tmp_path, tuple(overrides))) == 0
    rows = read(tmp_path / "demo").set_index("batch")
    one = rows.kv_bytes[1]
    assert one == 4 * 64 * 2048  # 4 pages of 64 tokens hold 216; a token has 2048 bytes
    assert rows.kv_bytes[2] == 2 * one
    assert rows.kv_bytes[16] == 16 * one
    # The large batch runs first; its cache alone is larger than this difference.
    assert rows.peak_rss_bytes[16] - rows.peak_rss_bytes[1] > 8 * one


@pytest.mark.mpi
def test_mpi_ranks_give_the_same_errors_as_threads(in_process: Path, tmp_path: Path) -> None:
    if MPIRUN is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpirun: pip install -e '.[mpi]'")
    command = ["-m", "nbflow", "sweep"]
    command += [str(ROOT / "experiments" / "sweeps" / "demo.toml"), "--out", str(tmp_path)]
    # ranks agree how often a repetition repeats its work
    for override in [*SIZES, "axes.batch=[1]", "settings.min_repetition_s=0.02"]:
        command += ["--set", override]
    done = mpirun(3, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 points, 0 of them done already") == 1  # rank 0 speaks alone
    keys = ["weights", "partition"]  # names of points differ: min_repetition_s is part of them
    ours, theirs = read(tmp_path / "demo"), read(in_process)
    ours, theirs = ours.set_index(keys), theirs[theirs.batch == 1].set_index(keys)
    assert len(ours) == len(theirs) == 4
    for name in ("perplexity", "kld_mean_nats", "kld_p99_nats", "traffic_measured_bytes"):
        assert (ours[name] == theirs.loc[ours.index, name]).all(), name

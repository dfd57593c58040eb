"""Sweeps over all-reduce formats and planned partitions, with predictions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from mpirun import MPIRUN, mpirun

from nbflow.planner import (
    Device,
    Link,
    Machine,
    RunConfig,
    Workload,
    machine_toml,
    planned_model,
    predict,
)
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError

SWEEP = """
[sweep]
name = "two"
measures = ["decode", "traffic", "memory"]
[settings]
model = "tiny_python"
weights = "q8"
prompt = 8
decode = 2
repeats = 1
min_repetition_s = 0
warmup = 0
threads = 1
machine = "MACHINE"
[axes]
partition = ["0&1", "auto"]
all_reduce = ["f32", "q8"]
[[exclude]]
partition = "auto"
all_reduce = "q8"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with so fast a link that two ranks are better than one."""
    device = Device("d", 1e9, 1e9, {"f32": 1e12})
    found = Machine("m", (device,) * 2, 2, {"host": Link(1e-9, 1e12)})
    (tmp_path / "m.toml").write_text(machine_toml(found))
    return found


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(SWEEP.replace("MACHINE", str(tmp_path / "m.toml")))
    return path


def rows(folder: Path) -> pd.DataFrame:
    types = {"partition": str, "partition_chosen": str}
    return pd.read_csv(folder / "two" / "points.csv", dtype=types)


def test_predictions_stand_beside_what_was_measured(sweep: Path, machine: Machine) -> None:
    assert run_sweep(SweepOptions(sweep, sweep.parent)) == 0
    table = rows(sweep.parent)
    assert set(table.status) == {"done"}
    assert list(table.partition_chosen) == ["0&1", "0&1", "0"]  # without mpirun there is one rank
    for _, row in table.iterrows():
        wanted = predict(
            planned_model("tiny_python", "q8"), row.partition_chosen, machine, Workload(1, 8, 2),
            RunConfig(activations="f32", all_reduce=row.all_reduce),
        )  # fmt: skip
        assert row.predicted_decode_tokens_per_s == pytest.approx(wanted.decode_tokens_per_s)
        assert row.predicted_prefill_tokens_per_s == pytest.approx(wanted.prefill_tokens_per_s)
        assert row.predicted_weight_bytes == row.weight_bytes
    exact, rounded, alone = table.itertuples()
    # 32 / 9 on partial sums; the embedding's sum and the logits stay float32
    assert 1.5 < exact.traffic_measured_bytes / rounded.traffic_measured_bytes < 32 / 9
    # uniform within a step of max/127 of 32 numbers: 0.3 % to 0.8 % of their root mean square
    assert 0.002 < rounded.all_reduce_error_relative < 0.01
    assert pd.isna(exact.all_reduce_error_relative)
    assert alone.traffic_measured_bytes == 0


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_the_planner_chooses_for_the_ranks_of_a_sweep(sweep: Path, machine: Machine) -> None:
    arguments = ("sweep", str(sweep), "--out", str(sweep.parent))
    slow = sweep.parent / "slow.toml"  # an exchange costs more than all the rest
    link = {"host": Link(1.0, 1e6)}
    slow.write_text(machine_toml(dataclasses.replace(machine, links=link)))
    head, _, _ = sweep.read_text().partition("[axes]")
    lines = [line for line in head.splitlines() if not line.startswith("machine")]
    machines = [str(sweep.parent / "m.toml"), str(slow)]
    aims = ["latency", "throughput"]
    axes = f'[axes]\npartition = ["auto"]\nmachine = {machines}\noptimize = {aims}\n'
    sweep.write_text("\n".join([*lines, axes]))
    done = mpirun(2, "-m", "nbflow", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(sweep.parent)
    chosen = {(Path(r.machine).stem, r.optimize): r.partition_chosen for r in table.itertuples()}
    assert chosen["m", "latency"] == "0&1"
    assert (chosen["slow", "latency"], chosen["slow", "throughput"]) == ("0", "0/1")
    assert set(table.status) == {"done"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('axes.all_reduce=["q9"]', "unknown all_reduce 'q9'"),
        ("settings.machine=nowhere", "unknown machine 'nowhere'"),
        ("settings.optimize=speed", "unknown optimize 'speed'"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_wrong_names_are_found_before_anything_runs(sweep: Path, override: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_sweep(sweep, [override])

"""Sweeps and benches whose ranks are on the emulated device: its memory next to the plan's."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import write_llama

import nbflow_ptx.cupy_stand_in as stand_in
from nbflow.cli import main
from nbflow.cli.bench_rows import table
from nbflow_experiments.report import memory
from nbflow_experiments.report.data import load_results
from nbflow_experiments.store.results_reader import read_points
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_ptx.checks import NO_CHECKS

pytestmark = pytest.mark.compiler

SWEEP = """
[sweep]
name = "devices"
measures = ["memory"]
[settings]
model = "MODEL"
device = "emulator"
kv = "f32"
prompt = 1
decode = 1
[axes]
weights = ["f32", "f16"]
partition = ["0", "0;1"]
batch = [1, 9]
"""


def write_model(folder: Path) -> None:
    """Write a model whose cache and rotary tables are large and whose products are small.

    Besides what the plan predicts, a device holds up to 100 kB, whatever the model's size.
    """
    write_llama(
        folder, n_layers=2, hidden_size=32, intermediate_size=32, n_heads=8, n_kv_heads=8,
        head_dim=12, vocab_size=64, max_context=32768,
    )  # fmt: skip


def reset() -> None:
    """Empty the device; its memory is counted here, not the kernels' accesses checked."""
    stand_in.reset(checks=NO_CHECKS)


def swept(folder: Path, *overrides: str) -> tuple[int, Path, list[dict[str, Any]]]:
    """Run the sweep; return its exit code, its results folder and its points."""
    write_model(folder / "model")
    file = folder / "devices.toml"
    file.write_text(SWEEP.replace("MODEL", str(folder / "model")))
    reset()
    code = run_sweep(SweepOptions(file, folder, overrides))
    return code, folder / "devices", read_points(folder / "devices")[1]


@pytest.fixture(scope="module")
def on_one_kind(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    code, folder, points = swept(tmp_path_factory.mktemp("swept"))
    assert code == 0
    yield folder, points
    stand_in.reset()


def test_memory_of_devices_is_the_plans(on_one_kind: Any) -> None:
    _, points = on_one_kind
    assert len(points) == 8
    for point in points:
        assert point["vram_bytes"] == pytest.approx(point["plan_vram_bytes"], rel=0.02)
        for name in ("weight_bytes", "workspace_bytes"):
            assert point[name] == point[f"plan_{name}"]
        assert point["kv_allocated_bytes"] == point["plan_kv_bytes"] >= point["kv_bytes"] > 0
        parts = ("weight_bytes", "kv_allocated_bytes", "workspace_bytes", "step_bytes")
        assert point["vram_bytes"] >= sum(point[name] for name in parts)
        assert point["vram_peak_bytes"] >= point["vram_bytes"] > point["vram_load_bytes"] > 0
        assert "emulator" in point["devices"]
        assert "no GPU" in point["devices"]
    ratios = [point["plan_step_bytes"] / point["step_bytes"] for point in points]
    assert ratios == pytest.approx(8 * [1.0], abs=0.3)


def test_what_two_ranks_share_counts_once(on_one_kind: Any) -> None:
    folder, points = on_one_kind
    with (folder / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    by_point = {point["point"]: point for point in points}
    for name, n_ranks in (("step_bytes", 2), ("vram_bytes", 1), ("plan_vram_bytes", 2)):
        for point in (p for p in points if p["partition"] == "0;1"):
            own = [r for r in rows if r["point"] == point["point"] and r["metric"] == name]
            of_ranks = [float(row["value"]) for row in own if row["rank"]]
            assert len(of_ranks) == n_ranks
            assert sum(of_ranks) == by_point[point["point"]][name]


def test_the_provenance_says_that_it_was_no_gpu(on_one_kind: Any) -> None:
    (launch,) = json.loads((on_one_kind[0] / "provenance.json").read_text())["launches"]
    assert launch["devices"] == ["emulator"]
    assert "no GPU" in launch["emulator"]["note"]
    assert launch["emulator"]["arch"] == "sm_80"
    assert set(launch["ranks"][0]) >= {"gpus", "cuda"}


def test_the_report_draws_memory_and_plan(on_one_kind: Any) -> None:
    results = load_results(on_one_kind[0])
    drawing = memory.draw(results)
    assert "Diamonds are the memory of the devices" in drawing.caption
    panels = drawing.figure.axes
    titles = [panel.get_title() for panel in panels]
    assert titles == ["partition 0 on emulator", "partition 0;1 on emulator"]
    for panel in panels:
        # the bars end at the planned bytes and the device's, up to what the plan leaves out
        tops = sorted(bar.get_y() + bar.get_height() for bar in panel.patches)[-2:]
        for line in panel.lines:
            assert max(line.get_ydata()) <= 1.02 * max(tops)
    assert "cores, emulator without a GPU;" in results.origin
    assert "nbflow_ptx emulator" in results.done.devices.iloc[0]


def test_a_rank_on_the_host_beside_one_on_a_device(tmp_path: Path) -> None:
    """The weights of two ranks are summed, the device's memory is that of the second."""
    changes = ['settings.device="cpu;emulator"', 'axes.partition=["0;1"]']
    code, _, (point,) = swept(tmp_path, *changes, "axes.batch=[1]", 'axes.weights=["f32"]')
    stand_in.reset()
    assert code == 0
    assert point["device"] == "cpu,emulator"
    assert point["devices"].startswith("cpu: ")
    assert point["vram_bytes"] == pytest.approx(point["plan_vram_bytes"], rel=0.02)
    whole = sum(point[f"plan_{name}_bytes"] for name in ("weight", "kv", "workspace"))
    assert point["plan_vram_bytes"] < 0.7 * whole


def test_parts_in_the_hosts_memory(tmp_path: Path) -> None:
    """Less of the device's memory, as planned, for each setting; the settings are columns."""
    write_model(tmp_path / "model")
    file = tmp_path / "offload.toml"
    file.write_text(
        SWEEP[: SWEEP.index("[axes]")].replace("MODEL", str(tmp_path / "model"))
        + "[[zip]]\nkv_host_percent = [0, 50, 0, 0]\nembeddings_on_host = [false, false, true, "
        "false]\ncpu_layers = [0, 0, 0, 1]\n"
    )
    reset()
    code = run_sweep(SweepOptions(file, tmp_path))
    stand_in.reset()
    assert code == 0
    points = read_points(tmp_path / "devices")[1]
    names = ("kv_host_percent", "embeddings_on_host", "cpu_layers", "partition_chosen")
    by_setting = {tuple(point[name] for name in names): point for point in points}
    assert list(by_setting) == [
        (0.0, 0, 0, "0"), (50.0, 0, 0, "0"), (0.0, 1, 0, "0"), (0.0, 0, 1, "0;1")
    ]  # fmt: skip
    whole, *less = by_setting.values()
    for point in points:
        assert point["vram_bytes"] == pytest.approx(point["plan_vram_bytes"], rel=0.02)
    for point, part in zip(less, (whole["kv_allocated_bytes"] / 2, 64 * 32 * 4), strict=False):
        assert whole["plan_vram_bytes"] - point["plan_vram_bytes"] == part
        assert whole["vram_bytes"] - point["vram_bytes"] >= 0.9 * part
    one_layer = whole["kv_allocated_bytes"] / 2
    assert whole["plan_vram_bytes"] - less[2]["plan_vram_bytes"] > one_layer


def test_bench_compares_with_the_devices_bandwidth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cupy: Any
) -> None:
    reset()
    write_model(tmp_path)
    words = ["bench", str(tmp_path), "--device", "emulator", "-p", "0", "-n", "1", "-r", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["devices"] == ["emulator: nbflow_ptx emulator of sm_80 on the CPU, no GPU"]
    assert row["vram_bytes"] > row["weight_bytes"] + row["kv_bytes"]
    # the emulator reads some MB/s, a processor GB/s
    assert 1e4 < row["read_bandwidth_bytes_per_s"] < 1e9
    assert row["read_share"] == row["read_bytes_per_s"] / row["read_bandwidth_bytes_per_s"]
    assert "VRAM MiB" in table([row])
    assert "no GPU; read bandwidth" in table([row])


@pytest.mark.gpu
def test_a_sweep_on_a_gpu(tmp_path: Path) -> None:
    """The driver allocates in steps of 2 MB, and loads the code of kernels."""
    changes = ['settings.device="cuda"', 'axes.partition=["0"]']
    code, folder, points = swept(tmp_path, *changes)
    assert code == 0
    for point in points:
        assert 0 <= point["vram_bytes"] - point["plan_vram_bytes"] < 1 << 27
        assert point["devices"].startswith("cuda:0: ")
    (launch,) = json.loads((folder / "provenance.json").read_text())["launches"]
    assert launch["emulator"] is None
    assert launch["ranks"][0]["gpus"][0]["driver_version"]

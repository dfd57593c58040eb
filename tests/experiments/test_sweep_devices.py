"""The setting `device`, memory of devices that ranks share, and facts about GPUs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import FakeEngine, FakeModel

from nbflow.utils import nvml
from nbflow_experiments.config.points import make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.measures import Context, memory
from nbflow_experiments.report import memory as figure
from nbflow_experiments.report.data import load_results
from nbflow_experiments.settings import OFFLOAD_SETTINGS, check_value
from nbflow_experiments.store import gpu_facts
from nbflow_experiments.store.results_reader import parse_where, read_points
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError

FEW = ('sweep.measures=["memory"]', 'axes.partition=["0"]')
NAMES = ("cpu", "cuda", "cuda:1", "emulator", "cpu,cuda")


@pytest.mark.parametrize("name", NAMES)
def test_devices_that_can_be_named(name: str) -> None:
    assert check_value("device", name, "[settings]") == name
    assert check_value("device", name.replace(",", "; ").upper(), "[settings]") == name
    assert parse_where(f"device={name.replace(',', ';')},batch=1")["device"] == name


@pytest.mark.parametrize("name", ["gpu", "cudaa", "cuda:", "cuda:x", "cpu:1", "", "cpu,"])
def test_devices_that_do_not_exist(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown device .*available: cpu, cuda, emulator"):
        check_value("device", name, "[settings]")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("0", r"names 2 devices, partition '0' 1 ranks"),
        ("0&1;2", r"names 2 devices, partition '0&1;2' 3 ranks"),
        ("auto", r"partition = 'auto' names no ranks"),
    ],
)
def test_one_device_for_each_rank(sweep_file: Path, partition: str, message: str) -> None:
    changes = ['settings.device="cpu,cuda"', f'axes.partition=["{partition}"]']
    with pytest.raises(UsageError, match=message):
        load_sweep(sweep_file, changes)


@pytest.mark.usefixtures("fake")
def test_the_device_is_part_of_the_identity(sweep_file: Path) -> None:
    names = ["cpu", "cuda", "cuda:1", "emulator"]
    ids = [
        {p.id for p in make_points(load_sweep(sweep_file, [f'settings.device="{name}"']))}
        for name in names
    ]
    assert len(set.union(*ids)) == sum(map(len, ids)) == 12 * len(names)


ON_DEVICE = ('settings.device="cuda"', 'axes.partition=["0"]', "axes.batch=[1]")


@pytest.mark.usefixtures("fake")
def test_settings_that_move_parts_to_the_host(sweep_file: Path) -> None:
    """Points without them have the ids that they had before there were any."""
    plain = {p.id for p in make_points(load_sweep(sweep_file, ON_DEVICE))}
    unset = ["settings.kv_host_percent=0", "settings.embeddings_on_host=false"]
    assert {p.id for p in make_points(load_sweep(sweep_file, [*ON_DEVICE, *unset]))} == plain
    axes = ["axes.kv_host_percent=[0, 12.5]", "axes.embeddings_on_host=[0, true]"]
    lists = {"cpu_layers": ["0-2"]}
    points = make_points(load_sweep(sweep_file, [*ON_DEVICE, *axes], lists=lists))
    assert len({p.id for p in points}) == len(points) == 12 * len(plain)
    assert plain < {p.id for p in points}
    settings = {tuple(p.config[name] for name in OFFLOAD_SETTINGS) for p in points}
    assert len(settings) == 12
    assert (12.5, 1, 2) in settings
    changes = [*ON_DEVICE, "settings.cpu_layers=1", 'settings.ranks="auto"']
    assert {p.config["ranks"] for p in make_points(load_sweep(sweep_file, changes))} == {2}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (['settings.device="cpu"', "settings.kv_host_percent=50"], "50.0 has no effect on device"),
        (['settings.device="cpu"', "axes.cpu_layers=[0,1]"], "cpu_layers = 1 has no effect on d"),
        (["settings.embeddings_on_host=2"], "embeddings_on_host must be 0 or 1, false or true"),
        (['settings.embeddings_on_host="x"'], "embeddings_on_host must be 0 or 1"),
        (["settings.kv_host_percent=101"], r"kv_host_percent must be in 0\.\.100"),
        (["settings.cpu_layers=-1"], "cpu_layers must be at least 0"),
        (["settings.cpu_layers=1", 'axes.partition=["0&1"]'], "needs partition = '0' on one dev"),
    ],
)
def test_offload_that_cannot_be(sweep_file: Path, changes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_sweep(sweep_file, [*ON_DEVICE, *changes])


def test_a_device_that_is_missing_fails_its_points_alone(tmp_path: Path) -> None:
    if gpu_facts.describe_cuda() is not None:
        pytest.skip("there is a GPU")
    file = tmp_path / "missing.toml"
    file.write_text(
        '[sweep]\nname = "missing"\nmeasures = ["memory"]\n[settings]\nmodel = "tiny_python"\n'
        'prompt = 2\ndecode = 1\n[axes]\ndevice = ["cuda", "cpu", "cuda:7"]\n'
    )
    assert run_sweep(SweepOptions(file, tmp_path)) == 1
    rows = {row["device"]: row for row in read_points(tmp_path / "missing")[1]}
    assert [rows[name]["status"] for name in ("cuda", "cpu", "cuda:7")] == [
        "failed",
        "done",
        "failed",
    ]
    assert "device 'cuda': no CUDA driver found" in rows["cuda"]["error_message"]
    done = rows["cpu"]
    assert done.get("vram_bytes") is None
    assert done["devices"].startswith("cpu: ")
    for name in ("weight_bytes", "workspace_bytes"):
        assert done[name] == done[f"plan_{name}"]
    assert done["kv_allocated_bytes"] == done["plan_kv_bytes"]


class OnDevices(FakeModel):
    """Model of four ranks: two processes share a GPU, one has its own, one is on the host."""

    leads = True

    def memory(self) -> list[dict[str, int]]:
        rows = super().memory()
        for i, row in enumerate(rows[:3]):
            row |= {
                "step_bytes": 10, "graph_bytes": 4, "communicator_bytes": 0, "pool_bytes": 100 + i,
                "vram_before_bytes": 1000, "vram_load_bytes": 2000, "vram_bytes": 3000 + i,
                "vram_peak_bytes": 4000,
            }  # fmt: skip
        rows[0]["nvml_bytes"] = 7
        return rows

    def devices(self) -> list[dict[str, str]]:
        keys = (("gpu a", "1"), ("gpu a", "2"), ("gpu b", "3"), ("", "4"))
        return [
            {"device": "cuda:0" if key else "cpu", "hardware": "X", "key": key, "process": process}
            for key, process in keys
        ]


def on_devices(fake: FakeEngine) -> dict[str, float]:
    """Return the summaries of the measure for a model on devices."""
    model = OnDevices(fake, "q4", "0;1;2;3", False)
    config = {"weights": "q4", "batch": 1, "prompt": 2, "decode": 1}
    found = memory.run(Context(config, model, True))  # type: ignore[arg-type]
    assert found.devices == "cuda:0: X; cpu: X"
    return {r.metric: r.value for r in found.readings if r.rank is None}


def test_what_ranks_share_counts_once(fake: FakeEngine) -> None:
    found = on_devices(fake)
    assert found["step_bytes"] == 30
    assert found["vram_before_bytes"] == 2000
    assert found["vram_bytes"] == 3000 + 3002  # of each GPU, with its first rank
    assert found["pool_bytes"] == 100 + 101 + 102  # of each process
    assert found["nvml_bytes"] == 7
    assert "plan_vram_bytes" not in found  # the fake plan is that of hosts


class FakeNvml:
    """Stand-in for the module of nvidia-ml-py."""

    class NVMLError(Exception):
        pass

    def __init__(self, pid: int, fails: bool = False) -> None:
        self.pid, self.fails, self.open = pid, fails, 0

    def nvmlInit(self) -> None:
        if self.fails:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, name: bytes) -> bytes:
        return name

    def nvmlDeviceGetComputeRunningProcesses(self, handle: bytes) -> list[Any]:
        assert handle == b"0000:01:00.0"
        sizes = {1: 5, self.pid: 123}
        return [SimpleNamespace(pid=p, usedGpuMemory=n) for p, n in sizes.items()]


@pytest.mark.parametrize(
    ("offset", "fails", "expected"), [(0, False, 123), (1, False, None), (0, True, None)]
)
def test_memory_of_the_process_by_nvml(
    offset: int, fails: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = FakeNvml(os.getpid() + offset, fails)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert nvml.process_bytes("0000:01:00.0") == expected
    assert module.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.process_bytes("0000:01:00.0") is None


def test_facts_about_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    values = (
        "0, A GPU, 00000000:01:00.0, 570.1, 81559 MiB, 700.00 W, 345 MHz, 2619 MHz, 1980 MHz, 1"
    )
    program.write_text(f"#!/bin/sh\necho '{values}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = gpu_facts.describe_gpus() or []
    assert (found["name"], found["driver_version"], found["clocks.sm"]) == (
        "A GPU",
        "570.1",
        "345 MHz",
    )
    program.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert gpu_facts.describe_gpus() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpu_facts.describe_gpus() is None


def test_the_figure_of_a_sweep_with_devices(sweep_file: Path, fake: FakeEngine) -> None:
    """A panel for each partition and device; older results have neither plan nor device."""
    out, changes = sweep_file.parent / "out", ('axes.device=["cpu", "cuda"]', *FEW)
    assert run_sweep(SweepOptions(sweep_file, out, changes)) == 0
    results = load_results(out / "unit")
    drawing = figure.draw(results)
    titles = [panel.get_title() for panel in drawing.figure.axes]
    assert titles == ["partition 0", "partition 0 on cuda"]
    assert "Black lines are the memory plan" in drawing.caption
    older = results.points.drop(columns=[c for c in results.points if c.startswith("plan_")])
    drawing = figure.draw(replace(results, points=older.drop(columns=["kv_allocated_bytes"])))
    assert "Black lines" not in drawing.caption
    assert all(panel.patches for panel in drawing.figure.axes)

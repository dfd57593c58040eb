"""Sweeps quoted in docs/experiments.md: files, publication, tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fake_backend import FakeEngine

from nbflow_experiments.config.points import check_world, make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.measures import MEASURES
from nbflow_experiments.settings import SETTINGS
from nbflow_experiments.store.results_reader import read_points
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep

ROOT = Path(__file__).parents[2]
NAMES = (
    *("quantization", "throughput", "partitions", "batching", "shared_prefix", "cascade"),
    "speculation",
    "kv_rotation",
    "kv_cache",
)


@pytest.fixture
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "tools" / f"{request.param}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_sweeps_that_can_start(name: str) -> None:
    sweep = load_sweep(ROOT / "experiments" / "sweeps" / f"{name}.toml")
    assert sweep.name == name
    check_world(make_points(sweep), 1)
    command = f"nbflow sweep experiments/sweeps/{name}.toml"
    assert command in (ROOT / "experiments" / "sweeps" / f"{name}.toml").read_text(encoding="utf-8")


def test_every_setting_and_measure_is_documented() -> None:
    lines = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8").splitlines()
    named = {name for x in lines if x.startswith("| `") for name in x.split("|")[1].split("`")}
    assert set(SETTINGS) <= named
    assert set(MEASURES) <= named


@pytest.mark.parametrize("tool", ["measure/publish_sweep"], indirect=True)
def test_what_is_published(fake: FakeEngine, sweep_file: Path, tool: ModuleType) -> None:
    assert run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out")) == 0
    run, results = sweep_file.parent / "out" / "unit", sweep_file.parent / "results"
    launch = next((run / "launches").iterdir())
    data = json.loads(launch.read_text())
    launch.write_text(json.dumps(data | {"command": ["/opt/bin/nbflow", f"{ROOT}/a.toml"]}))
    provenance = {"schema_version": 1, "launches": [json.loads(launch.read_text())]}
    (run / "provenance.json").write_text(json.dumps(provenance))
    old = results / "unit" / "here" / "figures"
    old.mkdir(parents=True)
    (old / "removed.png").touch()
    (old.parent / "rows_of_another_tool.jsonl").touch()
    folder = tool.publish(run, results, "here")
    assert folder == results / "unit" / "here"
    assert {p.name for p in folder.iterdir()} == {
        "points.csv", "results.csv", "sweep.json", "provenance.json", "figures", "report.html",
        "rows_of_another_tool.jsonl",
    }  # fmt: skip
    assert not (old / "removed.png").exists()
    assert read_points(folder) == read_points(run)
    written = json.loads((folder / "provenance.json").read_text())["launches"][0]
    assert written["command"] == ["nbflow", "a.toml"]
    assert str(ROOT) not in (folder / "report.html").read_text()


@pytest.mark.parametrize("tool", ["docs/experiment_tables"], indirect=True)
def test_tables_are_made_of_the_points(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    assert all(make() == tool.MISSING for make in tool.TABLES.values())
    table = {
        "partitions": (
            "weights,partition,ranks,batch,prompt,decode,prefill_tokens_per_s,decode_tokens_per_s,traffic_bytes_per_token,traffic_predicted_bytes,predicted_decode_tokens_per_s",
            ["q4,0,1,1,8,2,100,50,0,0,60", "q4,0&1,2,1,8,2,1200.4,70,2500,25000,80.6"],
            ["| `0` | 1 | 100 | 50 | 60 | 0 | 0 |", "| `0&1` | 2 | 1,200 | 70 | 81 | 2.5 | 2.5 |"],
        ),
        "batching": (
            "weights,batch,batching_tokens_per_s,sequential_tokens_per_s,batching_speedup,batching_ttft_s,sequential_ttft_s",
            ["q4,1,10,10,1,0.1,0.1", "q4,2,30,10,3,0.1004,0.2"],
            ["| 1 | 10 | 10 | 1.00 | 100.0 | 100.0 |", "| 2 | 30 | 10 | 3.00 | 100.4 | 200.0 |"],
        ),
        "shared_prefix": (
            "weights,batch,prefix,prefix_cold_ttft_s,prefix_together_ttft_s,prefix_ttft_s,prefix_ttft_speedup",
            ["q4,1,0,0.04,0.04,0.04,1", "q4,1,64,0.04,0.03,0.02,2"],
            ["| 0 | 40.0 | 40.0 | 40.0 | 1.00 |", "| 64 | 40.0 | 30.0 | 20.0 | 2.00 |"],
        ),
        "cascade": (
            "weights,heads,kv,shared_keys,own_keys,batch,cascade_flat_s,cascade_shared_speedup,cascade_levels_speedup,cascade_byte_ratio",
            ["f32,8/4/32,f16,512,32,2,3e-4,1.5,0.75,1.9", "f32,8/4/32,f16,512,32,8,2e-3,3,2,4"],
            ["| 8/4/32 | f16 | 512 | 32 | 300 | 1.50 | 0.75 | 1.90 | 2,000 | 3.00 | 2.00 | 4.00 |"],
        ),
        "speculation": (
            "weights,draft,n_draft,batch,speculation_accepted_share,speculation_tokens_per_step,plain_tokens_per_s,speculation_tokens_per_s,speculation_speedup,speculation_same_share",
            ["q4,ngram,2,1,0.25,1.5,1000,900.2,0.9,1", "q4,ngram,4,1,,1,9,9,1,1"],
            [
                "| `ngram` | 2 | 1 | 25 | 1.50 | 1,000 | 900 | 0.90 | 100 % |",
                "| `ngram` | 4 | 1 |  | 1.00 |",
            ],
        ),
        "throughput": (
            "weights,kv,batch,decode_tokens_per_s",
            ["f16,f16,1,10", "f16,q8_0,1,20", "q4,f16,1,30"],
            ["| weights | f16, 1 | q8_0, 1 |", "| `f16` | 10 | 20 |", "| `q4` | 30 |  |"],
        ),
    }
    for name, (head, rows, expected) in table.items():
        folder = tmp_path / name / "here"
        folder.mkdir(parents=True)
        lines = [f"point,status,{head}", *(f"{i},done,{row}" for i, row in enumerate(rows))]
        (folder / "points.csv").write_text("\n".join(lines) + "\n")
        made = tool.TABLES[name]()
        for line in expected:
            assert line in made, made
        widths = {line.count("|") for line in made.splitlines()}
        assert len(widths) == 1, made
    for name, started in (("aaa", "2026-01-02"), ("zzz", "2026-01-01")):
        folder = tmp_path / "batching" / name
        folder.mkdir()
        (folder / "points.csv").write_text("")
        (folder / "provenance.json").write_text(json.dumps({"launches": [{"started": started}]}))
    assert tool.folder_of("batching").name == "aaa"

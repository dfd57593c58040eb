"""Sweeps over a user's weight format and over outliers, in process and under mpirun."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest
from mpirun import MPIRUN, mpirun

import nbflow_kernels as nk
from nbflow_experiments.config.points import estimate_bytes, make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError

ROOT = Path(__file__).parents[2]
SWEEP = """
[sweep]
measures = ["weight_error"]
plugins = ["formats/mine.py"]
[settings]
model = "tiny_python"
prompt = 4
decode = 2
[axes]
weights = ["q4", "nibbles_b32"]
outliers = [0, 0.005]
"""


@pytest.fixture
def sweep(tmp_path: Path):
    path = tmp_path / "own.toml"
    path.write_text(SWEEP)
    source = (ROOT / "tests" / "helpers" / "user_formats.py").read_text()
    (tmp_path / "formats").mkdir()
    file = tmp_path / "formats" / "mine.py"
    file.write_text(source + "\nimport nbflow_kernels as nk\n\nnk.register_format(Nibbles)\n")
    yield path
    if "nibbles_b32" in nk.FORMATS:
        nk.unregister_format("nibbles_b32")


def test_the_file_is_read_before_the_names_in_it(sweep: Path) -> None:
    found = load_sweep(sweep)
    assert found.plugins == (str(sweep.parent / "formats" / "mine.py"),)
    assert [(p["weights"], p["outliers"]) for p in found.points] == [
        *(("q4", 0.0), ("q4", 0.005)),
        *(("nibbles_b32", 0.0), ("nibbles_b32", 0.005)),
    ]


def test_the_source_of_a_format_is_part_of_its_points(sweep: Path) -> None:
    before = make_points(load_sweep(sweep))
    nk.unregister_format("nibbles_b32")
    file = sweep.parent / "formats" / "mine.py"
    file.write_text(file.read_text() + "# another version\n")
    after = make_points(load_sweep(sweep))
    same = [a.id == b.id for a, b in zip(before, after, strict=True)]
    assert same == [str(p.config["weights"]) == "q4" for p in before]
    sizes = [estimate_bytes(p)["weight_bytes"] for p in before]
    assert sizes[1] > sizes[0] > sizes[2]


def test_a_sweep_measures_them(sweep: Path, tmp_path: Path) -> None:
    assert run_sweep(SweepOptions(sweep, tmp_path / "out")) == 0
    table = pd.read_csv(tmp_path / "out" / "own" / "points.csv", dtype={"partition": str})
    assert set(table.status) == {"done"}
    rows = table.set_index(["weights", "outliers"])
    for name in ("q4", "nibbles_b32"):
        plain, kept = rows.loc[(name, 0.0)], rows.loc[(name, 0.005)]
        assert kept.weight_error_relative < plain.weight_error_relative
        assert kept.bits_per_weight == pytest.approx(kept.stored_bits_per_weight)
        assert kept.bits_per_weight > plain.bits_per_weight == nk.FORMATS[name].bits_per_weight


@pytest.mark.mpi
def test_every_rank_loads_the_file(sweep: Path, tmp_path: Path) -> None:
    if MPIRUN is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpirun: pip install -e '.[mpi]'")
    sweep.write_text(SWEEP.replace('plugins = ["formats/mine.py"]', ""))
    command = ["-m", "nbflow", "sweep", str(sweep)]
    command += ["--out", str(tmp_path / "out"), "--plugins", "formats/mine.py"]
    command += ["--set", 'axes.partition=["0&1"]', "--set", 'axes.weights=["nibbles_b32"]']
    done = mpirun(2, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    table = pd.read_csv(tmp_path / "out" / "own" / "points.csv")
    assert list(table.status) == ["done", "done"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.005", "0.5", r"outliers must be in 0..0.05, got 0.5"),
        ("0.005", '"a lot"', "outliers must be a number, got 'a lot'"),
        ('["q4", "nibbles_b32"]', '["q4", "f32"]', "outliers = 0.005 needs weights in a block"),
        ('plugins = ["formats/mine.py"]', "", "unknown weight format 'nibbles_b32'"),
        ('["formats/mine.py"]', '["other.py"]', "cannot read the plugin .*other.py"),
        ('["formats/mine.py"]', '"formats/mine.py"', "plugins must be a list of file names"),
    ],
)
def test_mistakes_are_named(sweep: Path, old: str, new: str, message: str) -> None:
    sweep.write_text(SWEEP.replace(old, new))
    with pytest.raises(UsageError, match=message):
        load_sweep(sweep)

"""README.md agrees with the code."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from mpirun import SOURCES

from nbflow import cli
from nbflow_kernels.benchmarks.formats import measure_errors
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.user import unregister_format
from nbflow_kernels.kv_cache.formats import kv_format
from nbflow_kernels.quantized_matmul import qmatmul
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.testing.format_support import OPERATIONS, cells

ROOT = Path(__file__).resolve().parents[2]
DOCS = ("columns", "formats", "memory", "ops", "performance", "tolerances", "experiments", "server")
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(
        "update_readme", ROOT / "tools/docs/update_tables.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{n}.md" for n in DOCS)])
def test_tables_are_up_to_date(tool, name):
    text = (ROOT / name).read_text(encoding="utf-8")
    fresh = tool.updated(text, tool.TABLES[name])
    assert fresh == text, f"{name}: run python tools/docs/update_tables.py"


def test_what_is_measured_is_there_for_every_format(tool):
    measured = tool.measured()["formats"]
    assert list(measured) == list(FORMATS), "run python tools/measure/formats.py"
    for name, row in measured.items():
        assert row["bits_per_weight"] == FORMATS[name].bits_per_weight
        assert row["gemv_f32_gb_per_s"] > 0
        assert (row["gemv_int8_gb_per_s"] is None) == (FORMATS[name].block_size == 1)
        assert row["error_search"] <= row["error_reference"]
        assert 0 <= row["model_weight_error_relative"] < 1


@pytest.mark.parametrize("name", ["f16", "q8_b32t1", "q4_0"])
def test_recorded_errors_are_what_the_quantizers_do(tool, name):
    row = tool.measured()["formats"][name]
    found = measure_errors(name, 64)  # a sixteenth of the weights that were measured
    for key, value in found.items():
        # relative spread of a mean square over 65536 weights: sqrt(2 / 65536) = 0.6 %
        assert value == pytest.approx(row[key], rel=0.02)


def test_every_format_is_in_the_sweep_over_the_bundled_model():
    data = tomllib.loads(
        (ROOT / "experiments" / "sweeps" / "formats.toml").read_text(encoding="utf-8")
    )
    assert data["axes"]["weights"] == list(FORMATS)


@pytest.mark.parametrize("name", ["f16", "q4_b32t1a", "q4_0"])
def test_cells_say_what_happens(name):
    found = dict(zip(OPERATIONS, cells(FORMATS[name]), strict=True))
    x, ones = np.ones((2, 64), np.float32), np.ones(64, np.float32)
    w = quantize(x, name, quantizer="reference")

    def works(call):
        try:
            call()
        except UsageError:
            return False
        return True

    calls = {
        "importance reference": lambda: quantize(x, name, quantizer="reference", importance=ones),
        "importance search": lambda: quantize(x, name, importance=ones),
        "outliers": lambda: quantize(x, name, outliers=0.01, quantizer="reference"),
        "GEMV, GEMM int8": lambda: qmatmul(x, w, activations="int8"),
        "KV append, gather, attention": lambda: kv_format(name),
    }
    for operation, call in calls.items():
        assert works(call) == (found[operation] == "yes"), operation


def test_examples_of_formats_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/formats.md").read_text(), re.S)
    assert len(blocks) == 3
    space = {"__name__": "example"}
    try:
        for block in blocks:
            exec(compile(block, "<formats.md>", "exec"), space)
        assert space["y"] == pytest.approx(64)
        assert space["w"].packed_nbytes > 0
    finally:
        unregister_format("signs_b16")
        unregister_format("fast_signs_b16")


def test_every_link_to_a_file_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+?)\)", TEXT):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_every_command_exists():
    names = re.findall(r"^    (?:mpirun -n \d+ )?nbflow (\w+)", TEXT, re.M)
    assert names
    for name in names:
        assert name in cli.COMMANDS


def test_python_example_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_comparison_states_the_range_of_the_recorded_ratios(tool):
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    stated = re.search(
        r"([\d.]+) to ([\d.]+) times in generation and ([\d.]+) to ([\d.]+) in pro", text
    )
    rows = [r for r in tool.engine_rows() if "peer" in r and r["activations"] == "int8"]
    rows = [r for r in rows if r["model"].startswith("1.1b") and r["batch"] == 1]
    found = []
    for test in ("tg32", "pp512"):
        ratios = [r["times_peer"] for r in rows if r["test"] == test]
        found += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    assert list(stated.groups()) == found


def test_layout_names_every_folder_of_the_engine_and_nothing_else():
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    lines = re.search(r"```\n(.*?)```", text, re.S)[1].splitlines()
    paths = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    tracked = {p.parent.relative_to(ROOT).parts[1] for p in (ROOT / "nbflow").glob("*/*.*")}
    assert [n for n in tracked - {"__pycache__"} if f"nbflow/{n}/" not in paths] == []


def test_install_commands_name_extras_of_the_checkout():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "nbflow-llm"  # the name nbflow belongs to another project on PyPI
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
    pages += [p for root in SOURCES[1:] for p in root.rglob("*.py")]
    pages += (ROOT / "nbflow").rglob("*.py")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"nbflow\[[\w,-]+\]", text), f"{page}: pip would fetch another project"
        for extras in re.findall(r"pip install -e '\.\[([\w,-]+)\]'", text):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), (
                f"{page}: {extras}"
            )

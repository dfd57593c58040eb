"""What README.md says is what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from nbflow import cli

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "tools/update_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(table):
    return [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]


def test_ops_table_is_up_to_date(tool):
    assert tool.ops_table() in TEXT


def test_formats_table_is_up_to_date(tool):
    fresh = rows(tool.formats_table())
    written = rows(re.search(r"(\| format \| short name.*\n(?:\|.*\n)+)", TEXT)[1].strip())
    assert [r[:5] for r in written] == [r[:5] for r in fresh]
    for old, new in zip(written[2:], fresh[2:], strict=True):
        # processors without fused multiply-add round a search step differently: 1 % of the error
        assert [float(v) for v in old[5:]] == pytest.approx([float(v) for v in new[5:]], rel=0.01)


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


def test_named_files_of_the_layout_exist():
    block = re.search(r"## Layout\n+```\n(.*?)```", TEXT, re.S)[1]
    for line in block.splitlines():
        path = line.split()[0]
        assert (ROOT / path).exists(), path

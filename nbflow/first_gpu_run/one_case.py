"""Check one case of an op on the device: ``python -m nbflow.first_gpu_run.one_case OP-NAME``."""

from __future__ import annotations

import importlib
import sys

from nbflow_kernels.op_registry import all_cases
from nbflow_kernels.testing import checks


def main(name: str) -> None:
    """Run a case and compare it with its reference."""
    case = next(case for case in all_cases() if case.id == name)
    checks.check(case, checks.placer(importlib.import_module("cupy")))


if __name__ == "__main__":
    main(sys.argv[1])

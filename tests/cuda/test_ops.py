"""Every CUDA op runs its cases: in the emulator, and on a device where one is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
from emulated_arrays import emulated

from nbflow_kernels import op_registry
from nbflow_kernels.errors import MissingExtraError
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.testing import checks

CASES = [
    case
    for case in op_registry.all_cases()
    if not case.timed and case.op not in op_registry.NO_CUDA
]


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_equals_reference(case: OpCase, cupy: Any) -> None:
    assert checks.check(case, emulated(cupy)) <= 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_equals_reference_on_a_device(case: OpCase) -> None:
    assert checks.check(case, checks.placer(importlib.import_module("cupy"))) <= 1.0


class Elsewhere(np.ndarray):
    """Looks like an array of another library on a CUDA device."""

    __cuda_array_interface__ = {"data": (256, False)}  # noqa: RUF012


FIRST = {case.op: case for case in reversed(CASES)}
del FIRST["get_seq_lens"]  # array operators, no kernel


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
@pytest.mark.parametrize("op", FIRST)
def test_without_cupy_the_extra_is_named(op: str) -> None:
    with pytest.raises(MissingExtraError, match=r"need CuPy: pip install -e '\.\[cuda1[23]\]'"):
        checks.run(FIRST[op], lambda array, _: np.ascontiguousarray(array).view(Elsewhere))

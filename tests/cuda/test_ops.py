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
from nbflow_kernels.quantized_matmul.cases import FORMS
from nbflow_kernels.testing import checks

CASES = [
    case
    for case in op_registry.all_cases()
    if not case.timed and case.op not in op_registry.NO_CUDA
]
# one row in float32 and seven in int8 have all of a format's code between them; the tests of
# products in any batch have the other two pairs, for each kind of codes
OTHERS = {
    f"qmatmul-{format}_{kind}" for format in FORMS for kind in ("odd", "one_row_int8")
}  # fmt: skip
EMULATED = [case for case in CASES if case.id not in OTHERS]


@pytest.mark.compiler
@pytest.mark.parametrize("case", EMULATED, ids=lambda case: case.id)
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

"""Every CUDA op runs its cases: in the emulator, and on a device where one is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from places import placer

from nbflow_kernels import checking, families
from nbflow_kernels.opcase import OpCase

FAMILIES = (
    "norm",
    "activation",
    "embedding",
    "position",
    "sparse",
    "masks",
    "logits",
    "penalties",
)  # fmt: skip
CASES = [
    case for family in FAMILIES for case in families.load(family, "cases").CASES if not case.timed
]


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_equals_reference(case: OpCase, cupy: Any) -> None:
    assert checking.check(case, placer(cupy)) <= 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_equals_reference_on_a_device(case: OpCase) -> None:
    assert checking.check(case, placer(importlib.import_module("cupy"))) <= 1.0

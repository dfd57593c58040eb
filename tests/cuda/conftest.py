"""Fixtures of the CUDA tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

import nbflow_ptx.cupy_stand_in as stand_in
from nbflow_ptx import nvrtc

HAS_COMPILERS = importlib.util.find_spec("numba_cuda") is not None and nvrtc.available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the compilers where they are missing."""
    if HAS_COMPILERS:
        return
    skip = pytest.mark.skip(reason="numba-cuda and NVRTC are missing (extra cuda-test)")
    for item in items:
        if item.get_closest_marker("compiler"):
            item.add_marker(skip)


@pytest.fixture
def cupy() -> Iterator[Any]:
    """Emulated CuPy on an empty device, all checks on."""
    stand_in.reset()
    yield stand_in
    stand_in.reset()

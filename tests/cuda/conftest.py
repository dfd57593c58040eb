"""Fixtures of the CUDA tests."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # places

import nbflow_ptx.cupy_stand_in as stand_in
from nbflow_ptx import nvrtc

HAS_COMPILERS = importlib.util.find_spec("numba_cuda") is not None and nvrtc.available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a device unless asked for; skip what needs missing compilers."""
    if "gpu" not in config.option.markexpr:
        chosen = [item for item in items if not item.get_closest_marker("gpu")]
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = chosen
    if not HAS_COMPILERS:
        skip = pytest.mark.skip(reason="numba-cuda and NVRTC are missing (extra cuda-test)")
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(skip)


@pytest.fixture(
    params=[
        pytest.param("emulator", marks=pytest.mark.compiler),
        pytest.param("device", marks=pytest.mark.gpu),
    ]
)
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """CuPy: emulated, all checks on; with ``-m gpu`` the real one."""
    if request.param == "device":
        yield importlib.import_module("cupy")
        return
    stand_in.reset()
    yield stand_in
    stand_in.reset()


@pytest.fixture
def cupy() -> Iterator[Any]:
    """Emulated CuPy on an empty device, all checks on."""
    stand_in.reset()
    yield stand_in
    stand_in.reset()

"""Fixtures of the kernel tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("cpu", "formats")]  # their modules

from nbflow_kernels.cpu import parallel_for  # noqa: E402


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(20240601)


@pytest.fixture(autouse=True)
def _same_number_of_threads() -> Iterator[None]:
    """Put the calling thread's pool back to what it was."""
    before = parallel_for.get_num_threads()
    yield
    parallel_for.set_num_threads(before)


@pytest.fixture
def split_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share even the smallest call among the threads."""
    monkeypatch.setattr(parallel_for, "MIN_WORK_PER_THREAD", 1)

"""Small models for the tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_models import write_llama

import nbflow


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=2, max_context=512)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[nbflow.LLM]:
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        yield model

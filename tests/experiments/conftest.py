from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the fake engine, also used by subprocesses

from fake_backend import FakeEngine

SWEEP = """
[sweep]
name = "unit"
description = "for the tests"
seed = 3
[settings]
model = "toy"
prompt = 8
decode = 4
repeats = 3
min_repetition_s = 0
eval_tokens = 128
eval_window = 32
[axes]
batch = [1, 2]
weights = ["f32", "q4", "q2"]
partition = ["0", "0&1"]
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return FakeEngine(tmp_path / "model").install(monkeypatch.setattr)


@pytest.fixture(scope="session")
def sweep_text() -> str:
    return SWEEP


@pytest.fixture
def sweep_file(tmp_path: Path, sweep_text: str) -> Path:
    path = tmp_path / "unit.toml"
    path.write_text(sweep_text)
    return path

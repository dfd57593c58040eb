"""The table of FlashInfer's own tests is that of the recorded outcomes."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "measure"))
    return importlib.import_module("flashinfer_tests")


def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "flashinfer" / name).read_text())
    return found


def test_the_page_has_the_table_and_the_numbers_of_the_recorded_outcomes(tool: Any) -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    section = page.partition("### FlashInfer's own tests")[2].partition("\n## ")[0]
    tests = _recorded("tests.json")["tests"]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines == list(tool.table(tests))
    passed = sum(test["outcome"] == "passed" for test in tests)
    assert f"{passed} of {len(tests)} pass" in section
    for name, outcomes in re.findall(r"\(([^()]*results/flashinfer/([^()]*\.json))\)", section):
        assert name.startswith("../")
        assert not any(t["outcome"] == "failed" for t in _recorded(outcomes)["tests"])


def test_every_recorded_test_has_an_outcome_and_its_file_a_commit(tool: Any) -> None:
    for path in (ROOT / "results" / "flashinfer").glob("*.json"):
        found = _recorded(path.name)
        assert {test["outcome"] for test in found["tests"]} <= set(tool.OUTCOMES)
        assert {tool.file_of(test["test"]) for test in found["tests"]} <= found["commits"].keys()


@pytest.mark.parametrize(
    ("test", "outcome", "reason", "wanted"),
    [
        ("t[1]", "passed", "", "passed"),
        ("t", "skipped", "needs SM100", "skipped"),
        ("t", "failed", "NoCounterpart: flashinfer.xqa", "no counterpart"),
        ("t", "failed", "TypeError: f() got an unexpected keyword argument 'x'", "no counterpart"),
        ("t", "failed", "UsageError: backend must be 'auto'", "refused"),
        ("t", "failed", "AssertionError: Regex pattern did not match.", "another message"),
        ("t", "failed", "AssertionError: Tensor-likes are not close!", "failed"),
        ("t", "failed", "OverLimit: more than 20 s of processor time", "over the limit"),
        ("t", "failed", "Failed: DID NOT RAISE <class 'RuntimeError'>", "no error"),
        ("t_rejects_capture[0]", "failed", "Failed: DID NOT RAISE", "meaningless on a CPU"),
    ],
)
def test_outcomes_are_classified(
    tool: Any, test: str, outcome: str, reason: str, wanted: str
) -> None:
    assert tool.outcome_of(test, outcome, reason) == wanted

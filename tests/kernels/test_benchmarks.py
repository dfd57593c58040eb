"""The benchmark driver: it checks before it times, and its rows carry units."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nbflow_kernels import op_registry
from nbflow_kernels.benchmarks import ops, roofline
from nbflow_kernels.benchmarks.__main__ import main
from nbflow_kernels.norm import cases as norm_cases


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read 8 MB only: these tests are about the driver, not about the machine."""
    monkeypatch.setattr(roofline, "PROBE_BYTES", 8 << 20)


@pytest.mark.usefixtures("small_probe")
def test_rows_have_units_and_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    arguments = ["rmsnorm-llama2_7b_decode", "--threads", "1", "--repeats", "3", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    (row,) = report["rows"]
    assert row["op"] == "rmsnorm"
    assert row["samples"] == 3
    assert 0 < row["min_s"] <= row["median_s"]
    # 4096 columns in and out and the weight, 4 bytes each
    assert row["gb_per_s"] == pytest.approx(4 * 3 * 4096 / row["median_s"] / 1e9)
    assert 0 <= row["error_share"] <= 1
    assert "rmsnorm-llama2_7b_decode --threads 1 --repeats 3" in row["repro"]


@pytest.mark.usefixtures("small_probe")
def test_a_failed_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(case for case in norm_cases.CASES if case.timed)
    monkeypatch.setattr(norm_cases, "CASES", [replace(case, rtol=1e-12, atol=0.0)])
    assert main(["rmsnorm", "--repeats", "2"]) == 1
    printed = capsys.readouterr()
    assert "check failed, not timed" in printed.err
    assert case.name not in printed.out


def test_wrong_usage_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rmsnrom"]) == 2
    assert "did you mean 'rmsnorm'" in capsys.readouterr().err
    assert main(["rmsnorm", "--repeats", "0"]) == 2
    assert "--repeats must be at least 1, got 0" in capsys.readouterr().err


def test_every_timed_case_states_bytes() -> None:
    for case in op_registry.all_cases():
        if case.timed:
            assert case.n_bytes > 0, case.id


@pytest.mark.usefixtures("small_probe")
def test_the_peer_is_named_and_computes_the_same() -> None:
    case = next(case for case in op_registry.load("matmul", "cases").CASES if case.name == "vector")
    row = ops.measure(case, repeats=2, bandwidth=1e9)
    assert row.peer is not None
    assert row.peer.startswith("numpy ")
    assert row.peer_median_s is not None

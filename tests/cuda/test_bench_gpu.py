"""The benchmark on a device, on the emulator: its logic, not its numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbflow_kernels import bench, bench_gpu, families
from nbflow_kernels.opcase import OpCase

pytestmark = pytest.mark.compiler


def _cases(*ids: str) -> list[OpCase]:
    """Small cases as if they were to be timed."""
    found = {case.id: case for case in families.all_cases()}
    return [replace(found[i], timed=True, n_bytes=1000, n_flops=10) for i in ids]


def test_rows_hold_times_bandwidths_and_errors(cupy: Any) -> None:
    cases = _cases("rmsnorm-small", "silu_and_mul-ragged", "rope_cos_sin_cache-linear")
    wrong = replace(cases[0], name="wrong", rtol=0.0, atol=0.0)
    report = bench_gpu.run([*cases, wrong], 2, cupy, copy_bytes=1 << 14)
    rows = report["rows"]
    assert [row["case"] for row in rows] == ["small", "ragged", "wrong"]  # a table has no variant
    for row in rows[:2]:
        assert row["error"] is None
        assert row["launched"] == "graph"
        assert 0 <= row["error_share"] <= 1
        assert row["samples"] == 2
        assert row["gb_per_s"] == pytest.approx(1e-6 / row["median_s"])
        share = row["gb_per_s"] * 1e9 / report["copy_bytes_per_s"]
        assert row["copy_percent"] == pytest.approx(100 * share)
    assert rows[2]["error"].startswith("CheckError: rmsnorm-wrong: result")
    assert rows[2]["median_s"] is None
    assert report["device"]["arch"] == "sm_80"
    assert report["matmul_error"].startswith("AttributeError")  # there is no cuBLAS
    text = bench_gpu.table(report)
    assert "rmsnorm-wrong: CheckError" in text
    assert "silu_and_mul-ragged: " in text
    json.dumps(report)


def test_cases_beyond_the_budget_are_rows(cupy: Any) -> None:
    report = bench_gpu.run(_cases("rmsnorm-small"), 1, cupy, budget_s=0.0, copy_bytes=1 << 14)
    assert report["rows"][0]["error"] == "no time left of 0 s"


def test_the_calls_of_a_sample_are_one_graph(cupy: Any) -> None:
    """Captured once, over all copies of the inputs; what cannot be is timed call by call."""
    x = cupy.zeros(2, np.int32)
    calls = [lambda: x[0:1].fill(1), lambda: x[1:2].fill(2)]
    samples, launched = bench_gpu._timed(cupy, calls, 3, 2)
    assert (launched, len(samples)) == ("graph", 2)
    assert x.get().tolist() == [1, 2]
    _, launched = bench_gpu._timed(cupy, [lambda: x.get()], 3, 2)
    assert launched == "calls"


def test_copies_exceed_the_cache() -> None:
    arguments = {"x": np.zeros(1000, np.uint8), "eps": 1.0}
    assert bench_gpu._n_copies(arguments, 1 << 20) == bench_gpu.MAX_COPIES
    assert bench_gpu._n_copies(arguments, 2500) == 5
    assert bench_gpu._n_copies({"x": np.zeros(1 << 20, np.uint8)}, 1000) == 1


def test_without_a_device_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if bench_gpu.cuda.detect().usable:
        pytest.skip("there is a device here")
    assert bench.main(["rmsnorm", "--suite", "gpu", "--out", str(tmp_path / "rows.json")]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()

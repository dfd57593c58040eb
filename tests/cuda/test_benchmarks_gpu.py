"""The benchmark on a device, on the emulator: its logic, not its numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels import cuda, op_registry
from nbflow_kernels.attention.cases import HALF
from nbflow_kernels.attention.cases import _case as attention_case
from nbflow_kernels.benchmarks import gpu, gpu_calls, gpu_worker
from nbflow_kernels.benchmarks.__main__ import main
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.quantized_matmul.cases import _case as product_case
from nbflow_kernels.testing import checks
from nbflow_ptx.cupy_stand_in.streams import perform

pytestmark = pytest.mark.compiler


def _cases(*ids: str) -> list[OpCase]:
    """Small cases as if they were to be timed."""
    found = {case.id: case for case in op_registry.all_cases()}
    return [replace(found[i], timed=True, n_bytes=1000, n_flops=10) for i in ids]


def test_rows_hold_times_bandwidths_and_errors(cupy: Any) -> None:
    cases = _cases("rmsnorm-small", "silu_and_mul-ragged", "rope_cos_sin_cache-linear")
    wrong = replace(cases[0], name="wrong", rtol=0.0, atol=0.0)
    limits = gpu.limits(cupy, 2, copy_bytes=1 << 14)
    chosen = gpu.in_order([*cases, wrong])
    assert [case.name for case in chosen] == ["small", "ragged", "wrong"]  # a table has no variant
    events = list(gpu.events(chosen, 2, cupy, limits, max_copies=4))
    assert [event["case"] for event in events[::2]] == [case.id for case in chosen]
    rows = [event["row"] for event in events[1::2]]
    for row in rows[:2]:
        assert row["error"] is None
        assert row["noise_percent"] >= 0
        assert row["peers"] == {}
        assert row["launched"] == "graph"
        assert 0 <= row["error_share"] <= 1
        assert row["samples"] == 2
        assert row["gb_per_s"] == pytest.approx(1e-6 / row["median_s"])
        share = row["gb_per_s"] * 1e9 / limits["copy_bytes_per_s"]
        assert row["copy_percent"] == pytest.approx(100 * share)
    assert rows[2]["error"].startswith("CheckError: rmsnorm-wrong: result")
    assert rows[2]["median_s"] is None
    assert limits["device"]["arch"] == "sm_80"
    assert limits["matmul_error"].startswith("AttributeError")  # the emulator has no cuBLAS
    text = gpu.table({**limits, "rows": rows})
    assert "rmsnorm-wrong: CheckError" in text
    assert "silu_and_mul-ragged: " in text


def test_a_device_that_is_lost_ends_the_process_behind_the_row(cupy: Any) -> None:
    def lost(self: Any) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    known = {"copy_bytes_per_s": None}
    events = gpu.events(_cases("rmsnorm-small") * 2, 1, cupy, known, max_copies=1)
    assert next(events) == {"case": "rmsnorm-small"}
    assert next(events)["row"]["case"] == "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda.Device, "synchronize", lost)
        with pytest.raises(RuntimeError, match="IllegalAddress"):
            next(events)


WORKER = """
import json, os, sys, time
job = json.load(sys.stdin)
def say(**event): print(json.dumps(event), flush=True)
if job["limits"] is None:
    say(limits={"copy_bytes_per_s": 5.0, "pid": os.getpid()})
for case in job["cases"]:
    say(case=case)
    op, name = case.split("-")
    if name == "hangs": time.sleep(100)
    if name == "dies": os.abort()
    say(row={"op": op, "case": name, "error": None, "median_s": 1.0, "gb_per_s": 1.0,
             "tflop_per_s": 1.0, "launched": "graph"})
    if name == "breaks": sys.exit(3)
"""


def test_a_case_that_hangs_or_dies_costs_one_row() -> None:
    (case,) = _cases("rmsnorm-small")
    names = ["a", "hangs", "b", "dies", "breaks", "c"]
    cases = [replace(case, name=name) for name in names]
    seen: list[int] = []
    command = [sys.executable, "-c", WORKER]
    report = gpu_worker.supervise(
        cases, 1, lambda report: seen.append(len(report["rows"])), silence_s=0.7, command=command
    )
    assert {row["case"]: row["error"] for row in report["rows"]} == dict.fromkeys(names) | {
        "hangs": "no answer for 1 s; its process was ended",
        "dies": "its process ended with SIGABRT",
    }
    assert [row["case"] for row in report["rows"]] == names
    assert seen == [1, 2, 3, 4, 5, 6]
    assert report["copy_bytes_per_s"] == 5.0


def test_cases_that_nobody_measures_are_rows() -> None:
    cases = _cases("rmsnorm-small")
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(5)"]
    for budget_s, why in (
        (0.0, "no time left of 0 s"),
        (60.0, "nothing was measured: its process ended with exit code 5"),
    ):
        report = gpu_worker.supervise(cases, 1, lambda _: None, budget_s=budget_s, command=command)
        assert [row["error"] for row in report["rows"]] == [why]
        assert "rmsnorm-small: " + why in gpu.table(report)


def test_the_measuring_process_does_its_job(cupy: Any) -> None:
    job = {
        "cases": ["argmax-llama3"], "repeats": 1, "formats": [],
        "limits": {"copy_bytes_per_s": 1e9},
    }  # fmt: skip
    said: list[dict[str, Any]] = []
    gpu_worker.work(job, cupy, said.append)
    assert json.loads(json.dumps(said)) == said
    assert said[0] == {"case": "argmax-llama3"}
    assert said[1]["row"]["error"] is None


def test_the_calls_of_a_sample_are_one_graph(cupy: Any) -> None:
    """Captured once, over all copies of the inputs; what cannot be is timed call by call."""
    x = cupy.zeros(2, np.int32)
    calls = [lambda: x[0:1].fill(1), lambda: x[1:2].fill(2)]
    samples, launched, note = gpu._timed(cupy, calls, 3, 2)
    assert (launched, len(samples), note) == ("graph", 2, None)
    assert x.get().tolist() == [1, 2]
    _, launched, note = gpu._timed(cupy, [lambda: x.get()], 3, 2)
    assert launched == "calls"
    assert note is not None
    assert "a copy to the host" in note


def test_a_call_with_a_workspace_is_a_graph(cupy: Any) -> None:
    """Workspaces are a stream's own: one that was made before the capture is used in it."""
    device = cuda.device_of(cupy.zeros(1, np.int32))
    first, second = (
        gpu._timed(
            cupy, [lambda: workspace(device, "test", 10, np.int32, zero=True).fill(0)], 2, 1
        )[1]
        for _ in range(2)
    )
    assert (first, second) == ("graph", "graph")


@contextmanager
def without_kernels(cupy: Any) -> Iterator[None]:
    """Replace kernels by launches that do nothing but are captured; nothing is compiled."""

    def prepare(self: cuda.Kernel, device: Any) -> Any:
        return lambda *_: perform(lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.Kernel, "prepare", prepare)
        patch.setattr(type(cupy.ndarray.__kernel_device__), "key", property(lambda _: ("none",)))
        yield


def _launched(case: OpCase, cupy: Any) -> tuple[str, str | None]:
    """Time a case as the benchmark does; return how it was launched, and why not as a graph."""
    arguments, out = checks.make_inputs(case), checks.make_out(case)
    calls = []
    for _ in range(2):
        there, out_there = checks.placed(case, arguments, out, checks.placer(cupy))
        calls.append(gpu_calls.make_call(case, there, out_there))
    return gpu._timed(cupy, calls, 3, 1)[1:]


def test_every_call_of_a_decode_step_is_a_graph(cupy: Any) -> None:
    """Products of few rows, and planned attention: a capture neither allocates nor copies."""
    cupy.reset(arch="sm_90")
    formats = ("f16", "q8_0", "q4_k", "q3h")  # without and with units, K-quants, with a base
    cases = [
        product_case(f"{format}_{T}", T, 64, 512, format, activations=activations)
        for format in formats
        for T in (1, 8, 16)
        for activations in ("f32", "bf16", "int8")
        if activations != "int8" or format != "f16"
    ]
    timed = [case for case in op_registry.all_cases() if case.timed]
    assert {gpu_calls.kind(case) for case in timed} == set(gpu_calls.KINDS)
    cases += [
        attention_case(name, 0, 300, 32, 8, 128, **options)
        for name, options in (
            ("plain", {}), ("half", HALF), ("q8_0", {"kv_format": "q8_0", "kv_layout": "HND"}),
            ("q4_0", {"kv_format": "q4_0", "kv_layout": "HND"}),
        )
    ]  # fmt: skip
    assert all(gpu_calls.kind(case) in gpu_calls.DECODE_KINDS for case in cases)
    with without_kernels(cupy):
        assert {case.id: _launched(case, cupy) for case in cases} == {
            case.id: ("graph", None) for case in cases
        }


@pytest.mark.parametrize("name", ["grouped", "llama3_like", "more_rows_than_keys"])
def test_planned_attention_has_the_bits_of_a_single_call(name: str, cupy: Any) -> None:
    cases = {case.name: case for case in op_registry.all_cases() if case.op.startswith("single_")}
    case = cases.get(name) or attention_case(name, 0, 90, 4, 2, 48, **HALF)
    arguments, _ = checks.placed(case, checks.make_inputs(case), {}, checks.placer(cupy))
    planned = gpu_calls.make_call(case, arguments, {})()
    single = getattr(nk, case.op)(**arguments)
    for ours, theirs in zip(checks.leaves(planned), checks.leaves(single), strict=True):
        assert ours.get().tobytes() == theirs.get().tobytes()


def test_a_decode_case_that_is_no_graph_is_an_error() -> None:
    (product,) = _cases("qmatmul-q4_0_one_row")
    assert gpu.not_a_graph(product, "graph", None) is None
    found = gpu.not_a_graph(product, "calls", "LaunchError: a copy")
    assert found == "not a graph, so the time includes Python: LaunchError: a copy"
    (norm,) = _cases("rmsnorm-small")
    assert gpu.not_a_graph(norm, "calls", "LaunchError: a copy") is None
    row = gpu.GpuRow("qmatmul", "x", found, median_s=1.0, gb_per_s=1.0, tflop_per_s=1.0)
    assert "1000000.0 us" in gpu.line(row)
    assert "not a graph" in gpu.line(row)


def test_the_kinds_of_a_decode_step_come_first() -> None:
    chosen = [case for case in op_registry.all_cases() if case.timed]
    kinds = [gpu_calls.KINDS.index(gpu_calls.kind(case)) for case in gpu.in_order(chosen)]
    assert kinds == sorted(kinds)
    assert kinds[0] == 0


def test_copies_exceed_the_cache() -> None:
    arguments = {"x": np.zeros(1000, np.uint8), "eps": 1.0}
    assert gpu._n_copies(arguments, 1 << 20) == gpu.MAX_COPIES
    assert gpu._n_copies(arguments, 2500) == 5
    assert gpu._n_copies({"x": np.zeros(1 << 20, np.uint8)}, 1000) == 1


def test_without_a_device_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if cuda.detect().usable:
        pytest.skip("there is a device here")
    assert main(["rmsnorm", "--suite", "gpu", "--out", str(tmp_path / "rows.json")]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()

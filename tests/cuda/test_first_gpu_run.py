"""The first run on a GPU: sections in processes, what is kept of them, and a dry run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow
import nbflow_kernels
from nbflow.first_gpu_run import checks, compile_ahead, summary, supervise
from nbflow.first_gpu_run.__main__ import main
from nbflow.first_gpu_run.journal import NAME, Journal
from nbflow.first_gpu_run.kernels import EMULATED
from nbflow.first_gpu_run.random_model import SHAPES, write
from nbflow.first_gpu_run.sections import SECTIONS, Context, Section
from nbflow_kernels.cuda import bundle
from nbflow_kernels.op_registry import all_cases

SECTION = """
import json, os, sys, time
name, channel = sys.argv[1], os.fdopen(int(sys.argv[4]), "w")
def send(said): print(json.dumps(said), file=channel, flush=True)
send({"fact": name, "pid": os.getpid()})
if name == "hangs":
    os.system("sleep 100")
if name == "dies": os.abort()
if name == "mute": sys.exit(3)
if name == "wrong":
    send({"kernel": "matmul", "error": "wrong result"})
send({"end": {"status": "skipped", "reason": "no nvcc"} if name == "skips" else {"status": "ok"}})
"""


def _sections(*names: str, limit_s: float = 30.0) -> list[Section]:
    return [Section(name, limit_s if name != "hangs" else 1.5, "", "") for name in names]


def _run(folder: Path, sections: list[Section], budget_s: float = 100.0) -> tuple[Journal, str]:
    said: list[str] = []
    command = [sys.executable, "-c", SECTION]
    journal = supervise.run(folder, sections, budget_s, False, said.append, command)
    return journal, "\n".join(said)


def test_a_section_that_hangs_or_dies_costs_that_section(tmp_path: Path) -> None:
    names = ["good", "hangs", "dies", "mute", "skips", "wrong", "last"]
    journal, said = _run(tmp_path, _sections(*names))
    ends = {name: (end["status"], end.get("reason")) for name, end in journal.ends.items()}
    assert ends == {
        "good": ("ok", None),
        "hangs": ("timeout", "killed after 2 s"),
        "dies": ("died", "its process ended with SIGABRT"),
        "mute": ("died", "its process ended with exit code 3"),
        "skips": ("skipped", "no nvcc"),
        "wrong": ("errors", "1 of 2 results are errors"),
        "last": ("ok", None),
    }
    assert all(journal.sections[name][0]["fact"] == name for name in names)
    assert "skips: skipped in 0 s no nvcc" in said
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    events = [line["event"] for line in lines if line.get("kernel") != "matmul"]
    assert events == 7 * ["begin", "row", "end"]
    text = summary.text(journal, _sections(*names, "never"))
    assert "dies               died" in text
    assert "never              not run" in text


def test_what_was_finished_is_not_repeated(tmp_path: Path) -> None:
    """A run that was killed in the middle of a line and of a section continues there."""
    journal, _ = _run(tmp_path, _sections("first"))
    journal.add("second", "begin")
    journal.add("second", "row", fact="half")
    with journal.path.open("a") as file:
        file.write('{"section": "second", "eve')
    journal, _ = _run(tmp_path, _sections("third"), budget_s=1.0)
    assert [journal.is_finished(name) for name in ("first", "second", "third")] == [
        True, False, False,
    ]  # fmt: skip
    _run(tmp_path, _sections("second", "third"))
    journal = Journal(tmp_path)
    assert all(journal.is_finished(name) for name in ("first", "second", "third"))
    assert [row["fact"] for row in journal.sections["second"]] == ["second"]


def test_the_output_of_pytest_becomes_results(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = []
    context = Context(False, 1.0, Path(), rows.append)
    lines = [
        "tests/cuda/test_ops.py::test_op[a-device] PASSED   [  1%]\n",
        "[gw1] [ 10%] FAILED tests/cuda/test_ops.py::test_op[b c-device] \n",
        "[gw0] [ 20%] SKIPPED tests/cuda/test_ops.py::test_op[d-device]\n",
        "something else\n",
        "=========== short test summary info ============\n",
        "FAILED tests/cuda/test_ops.py::test_op[b c-device] - CheckError: 5\n",
    ]
    counts = checks.watch_tests(context, lines)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert rows == [
        {"test": "tests/cuda/test_ops.py::test_op[b c-device]", "error": "failed"},
        {"why": "FAILED tests/cuda/test_ops.py::test_op[b c-device] - CheckError: 5"},
    ]
    assert "something else" in capsys.readouterr().out


def test_files_that_cannot_be_imported_do_not_keep_the_others_from_running(tmp_path: Path) -> None:
    """As on a machine that lacks a package which one of the tests needs."""
    (tmp_path / "test_lacks.py").write_text("import no_such_package\n")
    (tmp_path / "test_runs.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_it() -> None:\n    pass\n"
    )
    command = [*checks.pytest_command(), "-p", "no:xdist", str(tmp_path)]
    command = [word for word in command if word not in ("-n", str(min(8, os.cpu_count() or 1)))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    rows: list[dict[str, Any]] = []
    counts = checks.watch_tests(Context(False, 1.0, Path(), rows.append), done.stdout.splitlines())
    assert counts["passed"] == 1
    assert any("test_lacks.py" in row.get("why", "") for row in rows)


def test_the_output_of_the_sanitizer_is_judged() -> None:
    assert checks.judge(0, "========= ERROR SUMMARY: 0 errors\n") == {"errors": 0}
    found = checks.judge(1, "========= ERROR SUMMARY: 12 errors\n")
    assert found == {"errors": 12, "error": "12 errors, exit code 1"}
    races = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    assert checks.judge(0, races)["errors"] == 1
    assert "no summary, exit code 255: Device" in str(
        checks.judge(255, "Device not supported")["error"]
    )


@pytest.fixture
def gguf() -> Any:
    """Return the package, which a bare machine with a GPU lacks."""
    return pytest.importorskip("gguf", reason="the package gguf is not installed")


def test_names_of_cases_exist() -> None:
    known = {case.id for case in all_cases()}
    assert known.issuperset(checks.SANITIZED)
    assert known.issuperset(name for names in EMULATED.values() for name in names)


@pytest.mark.parametrize("format", ["f16", "q8_0"])
def test_a_random_model(format: str, tmp_path: Path, gguf: Any) -> None:
    write(tmp_path / "model.gguf", SHAPES["tiny"], format)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    matrix, norm = found["blk.0.ffn_down.weight"], found["blk.0.ffn_norm.weight"]
    assert matrix.tensor_type.name == format.upper()
    assert matrix.shape.tolist() == [128, 64]
    values = gguf.dequantize(matrix.data, matrix.tensor_type).astype(np.float32)
    assert np.std(values) == pytest.approx(128**-0.5, rel=0.05)
    assert (norm.data == 1).all()
    assert len(found) == 3 + 9


def test_a_random_model_with_experts(tmp_path: Path, gguf: Any) -> None:
    write(tmp_path / "model.gguf", SHAPES["tiny-moe"], "q8_0")
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert found["blk.0.ffn_down_exps.weight"].shape.tolist() == [32, 64, 8]
    assert found["blk.0.ffn_gate_inp.weight"].shape.tolist() == [64, 8]
    with nbflow.load(tmp_path / "model.gguf") as model:
        assert np.isfinite(model.logits([1, 5, 9])).all()


def test_a_random_hybrid(tmp_path: Path, gguf: Any) -> None:
    write(tmp_path / "model.gguf", SHAPES["tiny-hybrid"], "q8_0")
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert found["blk.0.ssm_in.weight"].shape.tolist() == [64, 2 * 128 + 2 * 32 + 2]
    assert found["blk.5.attn_q.weight"].shape.tolist() == [64, 64]
    with nbflow.load(tmp_path / "model.gguf", state="q8_0") as model:
        assert np.isfinite(model.logits([1, 5, 9])).all()


def test_kernels_that_no_op_launches_are_compiled_ahead() -> None:
    ahead = {kernel.name.partition("<")[0] for kernel in compile_ahead.unlaunched()}
    ahead |= {"one_mma", "reverse", "read_peer"}  # the probes
    for folder in ("benchmarks", "cuda"):  # those without ops
        for source in (Path(nbflow_kernels.__path__[0]) / folder).glob("*.cu"):
            text = re.sub(r"__(launch_bounds|cluster_dims)__\(.*?\)", "", source.read_text())
            names = re.findall(r"__global__ void\s+(\w+)\(", text)
            assert names, source
            assert ahead.issuperset(names), source


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.bundle"
    bad.write_bytes(b"nothing")
    for words, message in (
        ([], "--out DIR names the folder"),
        (["--out", str(tmp_path), "--sections", "gemw"], "did you mean 'gemv'"),
        (["--out", str(tmp_path), "--budget", "0"], "--budget must be above 0"),
        (["--out", str(tmp_path), "--bundle", str(bad)], "is not a whole bundle"),
        (["--write-bundle", str(tmp_path / "none" / "file")], "none does not exist"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(bundle.VARIABLE, "")
            assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SECTIONS)


NOT_ON_A_BARE_MACHINE = ("tokenizers", "safetensors", "jinja2", "tomli_w")
"""Packages of the base install besides NumPy and Numba."""


@pytest.mark.compiler
def test_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sections on the emulated device, on a machine with NumPy and Numba alone."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in NOT_ON_A_BARE_MACHINE:
        (hidden / f"{name}.py").write_text("raise ModuleNotFoundError(f'No module {__name__}')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hidden), *filter(None, sys.path)]))
    chosen = ["facts", "arithmetic", "kernels", "gemv", "model_1.1b_q4_0", "tests", "sanitizer"]
    words = ["--out", str(tmp_path), "--emulator"]
    assert main([*words, "--sections", ",".join(chosen), "--budget", "900"]) == 0
    journal = Journal(tmp_path)
    rows = journal.sections
    assert {name: journal.ends[name]["status"] for name in chosen} == {
        **dict.fromkeys(chosen, "ok"), "tests": "skipped", "sanitizer": "skipped",
    }  # fmt: skip
    assert next(row for row in rows["facts"] if row["fact"] == "device")["arch"] == "sm_90"
    (alignment,) = [row for row in rows["arithmetic"] if row["probe"] == "alignment"]
    assert alignment["fraction_bits"] == 25
    kinds = {row["kernel"] for row in rows["kernels"]}
    assert {"cluster", "200 KB of shared memory", "Numba"} <= kinds
    skipped = [row for name in ("arithmetic", "kernels") for row in rows[name] if "skipped" in row]
    assert skipped == []
    errors = [
        row for section in ("arithmetic", "kernels") for row in rows[section] if "error" in row
    ]
    assert errors == []
    (row,) = [row["benchmark"] for row in rows["gemv"]]
    assert (row["error"], row["launched"]) == (None, "graph")
    timed, held = rows["model_1.1b_q4_0"][2:4]
    assert timed["tokens_per_s"] > 0
    assert (timed["steps_by_graph"] > 0, timed["steps_by_kernel"]) == (True, 0)
    assert held["counted_share"] == pytest.approx(1.0, abs=0.05)
    assert held["weight_share_of_plan"] == pytest.approx(1.0, abs=0.02)
    text = (tmp_path / "summary.txt").read_text()
    assert capsys.readouterr().out == text
    assert "tg1 x 1:" in text
    assert main([*words, "--budget", "1"]) == 0  # the other sections only, and no time for them
    assert {name: journal.ends.get(name) for name in chosen} == {
        name: Journal(tmp_path).ends.get(name) for name in chosen
    }

"""The plugins of docs/bring_your_own.md, in processes outside of the checkout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mpirun import PYTHONPATH, mpirun

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor
from nbflow.executor.weight_loader import WeightLoader
from nbflow.program import build
from nbflow.spec import resolve
from nbflow_kernels.attention.variants import ATTENTION
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import load_plugin

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_own.md"
FILES = dict(re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.M | re.S))
"""Files of the page by name."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def nbflow_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nbflow", *words], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH}, check=False,
    )  # fmt: skip


@pytest.mark.mpi
def test_a_strategy_on_the_command_line_and_on_ranks(folder: Path) -> None:
    words = ["run", "tiny_python", "-p", "def ", "-n", "6", "--json", "--seed", "3"]
    words += ["--plugins", str(folder / "edt.py"), "--decoding", "edt:theta=0.5,t0=1.5"]
    alone = nbflow_in(folder, *words)
    assert alone.returncode == 0, alone.stderr
    ranks = mpirun(2, "-m", "nbflow", *words, "--partition", "0&1")
    assert ranks.returncode == 0, ranks.stderr
    assert json.loads(ranks.stdout)["ids"] == json.loads(alone.stdout)["ids"]
    refused = nbflow_in(folder, *words[:-1], "edt:theta=11")
    assert refused.returncode == 2
    assert "decoding 'edt': theta must be in 0..10, got 11" in refused.stderr


def test_a_measure_in_a_sweep(folder: Path) -> None:
    done = nbflow_in(folder, "sweep", "likely.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    out = folder / "runs" / "likely"
    table = pd.read_csv(out / "points.csv", dtype={"partition": str})
    assert list(table.status) == ["done", "done"]
    assert table.likely_share.between(0, 1, inclusive="neither").all()
    (launch,) = (json.loads(p.read_text()) for p in (out / "launches").glob("*.json"))
    digest = hashlib.sha256((folder / "likely.py").read_bytes()).hexdigest()
    assert launch["ranks"][0]["plugins"] == [
        {"path": str(folder / "likely.py"), "sha256": digest, "registers": ["measure likely"]}
    ]
    assert json.loads((out / "sweep.json").read_text())["about"]["likely"].startswith("Share of")
    # an edited plugin makes other points
    (folder / "likely.py").write_text(FILES["likely.py"] + "# edited\n")
    again = nbflow_in(folder, "sweep", "likely.toml", "--resume", "--dry-run")
    assert again.returncode == 0, again.stderr
    ids = set(re.findall(r"\b[0-9a-f]{12}\b", again.stdout))
    assert not ids & set(table.point)


def test_a_variant_in_a_model(folder: Path) -> None:
    """Prompts, decode steps and shards agree with the float64 reference."""
    with pytest.raises(UsageError, match=r"unknown attention variant 'sigmoid'.*--plugins"):
        resolve("tiny_python", spec=folder / "sigmoid.toml")
    load_plugin(folder / "sigmoid.py")
    try:
        resolved = resolve("tiny_python", spec=folder / "sigmoid.toml")
        program = build(resolved.spec)
        ids = np.arange(3, 43) % resolved.spec.vocab_size
        with open_weights(resolved.path) as file:
            want = ReferenceExecutor(program, WeightLoader(program, file, None)).logits(ids)
        plain = nbflow.load("tiny_python", kv="f32")
        with plain:
            assert np.abs(plain.logits(ids) - want).max() > 0.1
        for partition in ("0", "0&1", "0;1"):
            with nbflow.load(
                "tiny_python", spec=folder / "sigmoid.toml", kv="f32", partition=partition
            ) as model:
                got = model.logits(ids)
                # float32 through 4 layers, as the models of tests/models
                np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
                out = model.generate(ids, max_tokens=4, ignore_eos=True)
                whole = model.logits([*ids, *out.ids])[len(ids) - 1 : -1]
                assert list(whole.argmax(axis=1)) == out.ids  # decode steps know their positions
    finally:
        ATTENTION.remove("sigmoid")

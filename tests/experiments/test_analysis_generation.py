"""Drift of free generation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow import cli
from nbflow.spec import resolve
from nbflow_experiments.analysis import Noise, StoredWeights, analysis_windows, generation_drift
from nbflow_experiments.analysis.treatments import Format
from nbflow_kernels.errors import UsageError

MODEL = "tiny_python"


def test_share_is_that_of_equal_beginnings(tmp_path: Path) -> None:
    windows = analysis_windows(MODEL, tokens=512, window=64)
    quantized = nbflow.quantize_checkpoint(MODEL, tmp_path / "stored", "q2").path
    stored = StoredWeights(quantized, resolve(MODEL).spec)
    try:
        found = generation_drift(MODEL, ["f32", Format("q2"), stored], windows, tokens=8)
    finally:
        stored.close()
    assert list(found.tokens.unique()) == [1, 2, 4, 8]
    shares = {name: rows.same_share.to_numpy() for name, rows in found.groupby("change")}
    assert np.all(shares["f32"] == 1.0)
    assert np.all(np.diff(shares["q2"]) <= 0)
    assert shares["q2"][-1] < 1.0  # 2 bits part within 8 tokens on some of the 8 prompts
    assert np.array_equal(shares["q2"], shares[stored.label])  # the same bytes, from a file
    exact, rounded = [], []
    for weights, into in (("f32", exact), ("q2", rounded)):
        with nbflow.load(MODEL, weights=weights, kv="f32", quantizer="search") as model:
            for window in windows:
                into.append(model.generate(list(map(int, window[:32])), max_tokens=8).ids)
    same = [a[:4] == b[:4] for a, b in zip(exact, rounded, strict=True)]
    assert shares["q2"][2] == np.mean(same)
    with pytest.raises(UsageError, match="whole models in formats, or quantized checkpoints"):
        generation_drift(MODEL, [Noise(Format("q4"))], windows, tokens=8)


def test_command_writes_table_and_figure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [MODEL, "--weights", "q2", "--parts", "generation", "--tokens", "256", "--window", "64"]
    with pytest.raises(SystemExit) as end:
        cli.main(["analyze", *words, "--out", str(out)])
    assert not end.value.code
    assert (out / "generation.csv").read_text().startswith("change,tokens,prompts,same_share")
    assert (out / "figures" / "generation.png").stat().st_size > 5000

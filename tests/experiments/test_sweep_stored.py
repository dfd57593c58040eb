"""Sweeps over checkpoints that store block formats: weights = "stored"."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_checkpoints import write_packed

import nbflow
from nbflow import cli
from nbflow_experiments import backend
from nbflow_experiments.config.points import make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_experiments.store.results_reader import points_frame


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model as GPTQ stores it, 4.125 bits per weight."""
    out = tmp_path_factory.mktemp("stored") / "tiny"
    nbflow.quantize_checkpoint("tiny_python", out, "gptq", quantizer="reference")
    return out


def sweep_file(folder: Path, model: Path | str, weights: str = "") -> Path:
    path = folder / "sweep.toml"
    axes = f"[axes]\nweights = {weights}\n" if weights else ""
    path.write_text(
        f'[sweep]\nname = "s"\nmeasures = ["decode", "weight_error"]\n[settings]\n'
        f'model = "{model}"\nprompt = 4\ndecode = 2\nrepeats = 1\nmin_repetition_s = 0.0\n{axes}'
    )
    return path


def test_the_default_is_what_a_checkpoint_of_blocks_stores(checkpoint: Path, tmp_path: Path):
    for model, wanted in ((checkpoint, "stored"), ("tiny_python", "f32")):
        points = make_points(load_sweep(sweep_file(tmp_path, model)))
        assert [point.config["weights"] for point in points] == [wanted]
    assert backend.stored_bits(str(checkpoint)) == 4.125


def test_stored_and_requantized_weights_in_one_sweep(checkpoint: Path, tmp_path: Path):
    path = sweep_file(tmp_path, checkpoint, '["stored", "int4_g128", "q8_0"]')
    with pytest.raises(SystemExit, match="0"):
        cli.main(["sweep", str(path), "--out", str(tmp_path / "runs")])
    rows = points_frame(tmp_path / "runs" / "s").set_index("weights")
    assert rows.bits_per_weight.to_dict() == {"stored": 4.125, "int4_g128": 4.125, "q8_0": 8.5}
    assert rows.stored_bits_per_weight["stored"] == 4.125
    assert rows.weight_error_relative.isna()["stored"]
    assert 0 < rows.weight_error_relative["q8_0"] < 0.01


@pytest.mark.parametrize(("method", "bits"), [("nf4", 4.5), ("gptq_act_order", 4.375)])
def test_checkpoints_of_other_quantizers(method: str, bits: float, tmp_path: Path):
    """The perplexity is that of the same values as floats; 4 layers of float32 sums: 1e-5."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 20)
    found = []
    for model in write_packed(tmp_path, method):
        path = sweep_file(tmp_path, model)
        path.write_text(
            path.read_text()
            .replace("weight_error", "perplexity")
            .replace("[settings]", f'[settings]\neval_text = "{text}"\neval_tokens = 128')
            .replace("prompt = 4", 'kv = "f32"\nprompt = 4\neval_window = 64')
        )
        out = tmp_path / f"runs_{model.name}"
        with pytest.raises(SystemExit, match="0"):
            cli.main(["sweep", str(path), "--out", str(out)])
        found.append(points_frame(out / "s").iloc[0])
    stored, floats = found
    assert (stored.weights, floats.weights) == ("stored", "f32")
    assert stored.bits_per_weight == bits
    assert stored.decode_tokens_per_s > 0
    assert stored.perplexity == pytest.approx(floats.perplexity, rel=1e-5)


def test_outliers_need_a_format(checkpoint: Path, tmp_path: Path):
    path = sweep_file(tmp_path, checkpoint, '["stored"]')
    path.write_text(path.read_text().replace("[settings]", "[settings]\noutliers = 0.005"))
    with pytest.raises(nbflow.UsageError, match="needs weights in a block format, got stored"):
        load_sweep(path)

"""Errors of tensors, each number against a straightforward computation in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from small_models import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.calibration import ActivationStats, write_stats
from nbflow_experiments.analysis import (
    Format,
    Noise,
    StoredWeights,
    all_tensor_errors,
    read_statistics,
    tensor_errors,
    totals,
)
from nbflow_experiments.analysis import histograms as shapes
from nbflow_experiments.analysis.code_entropy import code_use
from nbflow_experiments.analysis.histograms import RELATIVE_EDGES, SCALED_EDGES, Weights
from nbflow_experiments.analysis.tensor_error import tensor_error
from nbflow_experiments.analysis.treatments import Checkpoint
from nbflow_experiments.backend import weight_pairs
from nbflow_experiments.measures.weight_error import squares
from nbflow_kernels.errors import UsageError

ROWS, COLUMNS = 48, 200  # the last block of a row is shorter than the others
RNG = np.random.default_rng(5)
W = RNG.normal(0.01, 0.3, (ROWS, COLUMNS)).astype(np.float32)
W[3, 7] = 4.0  # 13 times the others' size
W[5] = 0.0


def planted() -> np.ndarray:
    """Return the weights with errors at known positions."""
    found = W.copy()
    found[3, 7] -= 1.5  # the largest error
    found[10] *= 1.25  # a row, relative error 1/4
    found[:, 20] += 0.5  # a column
    found[5, 64:96] += 0.125  # a block of zeros
    return found


@pytest.fixture(scope="module", params=[1 << 20, 900], ids=["one chunk", "chunks of four rows"])
def found(request: pytest.FixtureRequest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "CHUNK_WEIGHTS", request.param)
        return tensor_error(W, nk.quantize(planted(), "f32"))


def test_numbers_of_a_planted_error(found) -> None:
    w, q = W.astype(np.float64), planted().astype(np.float64)
    e = q - w
    exact = {  # sums of 9,600 numbers in another order: 1e-12 is 100 times their rounding
        "mse": np.mean(e**2),
        "relative_error": np.linalg.norm(e) / np.linalg.norm(w),
        "sqnr_db": 10 * np.log10(np.sum(w**2) / np.sum(e**2)),
        "mean_error": e.mean(),
        "cosine": np.sum(w * q) / np.linalg.norm(w) / np.linalg.norm(q),
    }
    for name, value in exact.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    assert found.max_abs_error == np.abs(e).max() == 1.5
    assert found.stored_bits == 32
    assert found.n_weights == W.size
    assert found.codes is None
    assert math.isnan(found.entropy_coded_bits)


def test_rates_at_an_error(found) -> None:
    w = W.astype(np.float64)
    assert found.gaussian_bits == pytest.approx(0.5 * np.log2(w.var() / found.mse), rel=1e-9)
    loss = found.gaussian_bits - found.shannon_bits
    assert loss == pytest.approx(
        0.5 * np.log2(2 * np.pi * np.e * w.var()) - found.weights.density_bits, rel=1e-9
    )


def test_rows_columns_and_blocks(found) -> None:
    w, e = W.astype(np.float64), planted().astype(np.float64) - W
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = np.linalg.norm(e, axis=1) / np.linalg.norm(w, axis=1)
        columns = np.linalg.norm(e, axis=0) / np.linalg.norm(w, axis=0)
    assert rows[5] == np.inf  # a row of zeros with errors
    assert (found.rows.worst, found.rows.largest) == (5, np.inf)
    assert found.columns.worst == 20
    assert found.columns.largest == pytest.approx(columns[20], rel=1e-12)
    assert found.rows.median == pytest.approx(np.median(rows), rel=1e-12)
    blocks = []
    for start in range(0, COLUMNS, 32):
        part, norm = e[:, start : start + 32], w[:, start : start + 32]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.linalg.norm(part, axis=1) / np.linalg.norm(norm, axis=1)
        blocks.append(np.where(np.linalg.norm(part, axis=1) == 0, 0, ratio))
    flat = np.concatenate(blocks)
    assert found.blocks.counts.sum() == len(flat) == ROWS * 7
    assert (found.blocks.counts == np.histogram(flat, RELATIVE_EDGES)[0]).all()
    assert (found.rows.counts == np.histogram(rows, RELATIVE_EDGES)[0]).all()
    relative = np.abs(e) / np.sqrt(np.mean(w**2))
    assert (found.error_counts == np.histogram(relative, RELATIVE_EDGES)[0]).all()


def test_weights_alone(found) -> None:
    w = W.astype(np.float64)
    alone, centred = found.weights, w - w.mean()
    rms = np.sqrt(np.mean(w**2))
    assert alone.rms == pytest.approx(rms, rel=1e-12)
    assert alone.std == pytest.approx(w.std(), rel=1e-12)
    kurtosis = np.mean(centred**4) / np.mean(centred**2) ** 2 - 3
    assert alone.kurtosis == pytest.approx(kurtosis, rel=1e-9)
    assert alone.outlier_share == np.mean(np.abs(w) >= 4 * rms) > 0
    assert (alone.counts == np.histogram(w / rms, SCALED_EDGES)[0]).all()
    crests = []
    for row in w:
        for start in range(0, COLUMNS, 32):
            block = row[start : start + 32]
            size = np.sqrt(np.mean(block**2))
            crests.append(np.abs(block).max() / size if size else 1.0)
    assert found.crest == pytest.approx(np.mean(crests), rel=1e-12)


def test_density_of_known_distributions() -> None:
    rng = np.random.default_rng(0)
    normal = Weights.of(rng.normal(0, 0.25, (256, 1024)).astype(np.float32))
    # 1024 bins over 9 standard deviations are narrow enough (their own loss is 3e-6 bits); the
    # standard error of the mean of -log2 p is sqrt(1/2) / ln 2 / 512 = 0.002 bits
    assert normal.density_bits == pytest.approx(0.5 * np.log2(2 * np.pi * np.e / 16), abs=0.01)
    even = Weights.of(rng.uniform(-1, 1, (256, 1024)).astype(np.float32))
    assert even.density_bits == pytest.approx(1.0, abs=0.001)  # log2 of its width
    assert even.kurtosis == pytest.approx(-1.2, abs=0.02)  # 5 standard errors
    same = tensor_error(np.ones((2, 32), np.float32), nk.quantize(np.zeros((2, 32)), "q8"))
    assert (same.gaussian_bits, same.shannon_bits, same.relative_error) == (0, 0, 1)


def test_an_exact_format_loses_nothing() -> None:
    same = tensor_error(W, nk.quantize(W, "f32"))
    assert (same.mse, same.relative_error, same.sqnr_db) == (0, 0, math.inf)
    assert same.gaussian_bits == same.shannon_bits == math.inf
    assert same.rows.counts[0] == ROWS
    zeros = np.zeros((4, 32), np.float32)
    assert tensor_error(zeros, nk.quantize(zeros, "q4")).relative_error == 0


def test_use_of_codes() -> None:
    # Plain q4_0 takes -8 .. 7 steps: each row holds every other one
    steps = np.tile(np.arange(-8, 8, 2, dtype=np.float32), (5, 4))
    use = code_use(nk.quantize(steps, "q4_0", quantizer="reference"))
    assert use.counts.tolist() == [20, 0] * 8
    assert (use.used_share, use.entropy_bits, use.stored_bits) == (0.5, 3.0, 4.0)
    assert code_use(nk.quantize(steps, "q3h", quantizer="reference")).stored_bits == 3.5
    grid = nk.QuantTensor("iq2_s", (1, 256), np.zeros((1, 82), np.uint8))
    assert math.isnan(code_use(grid).stored_bits)  # codes are not stored one by one
    # 4.5 stored, 4 of them codes; these have 3 bits of entropy
    found = tensor_error(steps, nk.quantize(steps, "q4_0", quantizer="reference"))
    assert (found.stored_bits, found.entropy_coded_bits) == (4.5, 3.5)
    # -0 and 0 of a 4-bit float are one level, and padding does not count
    padded = code_use(nk.QuantTensor("mxfp4", (1, 3), np.zeros((1, 17), np.uint8)))
    assert len(padded.counts) == 15
    assert padded.counts.sum() == 3


def test_tensors_that_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match=r"\(48, 200\) cannot be compared"):
        tensor_error(W, nk.quantize(W[:4], "q4"))


# ---- of a model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysis") / "llama"
    write_llama(folder, n_layers=2)
    return folder


def test_the_table_says_what_the_sweep_measures() -> None:
    table = tensor_errors("tiny_python", ["q4"])
    lost = norm = 0.0
    for name, exact, approximate, n_bytes in weight_pairs("tiny_python", "q4"):
        error, size = squares(exact, approximate)
        row = table[table.tensor == name].iloc[0]
        assert row.relative_error == pytest.approx(math.sqrt(error / size), rel=1e-12)
        assert row.stored_bytes == n_bytes
        lost, norm = lost + error, norm + size
    assert len(table) == 28
    whole = totals(table).iloc[0]
    assert whole.relative_error == pytest.approx(math.sqrt(lost / norm), rel=1e-12)
    assert (whole.tensors, whole.stored_bits) == (28, 5.0)


def test_pattern_quantizer_and_outliers(llama: Path) -> None:
    formats = [
        "q4",
        Format("q4", "reference"),
        Format("q4", outliers=0.01),
        Format("q4", "outliers", outliers=0.02),
        Noise(Format("q4")),
    ]
    table = tensor_errors(llama, formats, tensors="layers.1.attn.?.weight, embed.weight")
    assert table.weights.unique().tolist() == [
        "q4", "q4 (reference)", "q4 (outliers 0.01)", "q4 (outliers, outliers 0.02)",
        "noise like q4",
    ]  # fmt: skip
    assert set(table.kind) == {"q", "k", "v", "o", "embedding"}
    error = table.groupby("weights", sort=False).mse.sum()
    assert error["q4 (outliers 0.01)"] < error["q4"] < error["q4 (reference)"]
    assert error["q4 (outliers, outliers 0.02)"] < error["q4"]
    # noise of the error's size: sums of 13,312 normal squares, 1 standard deviation is 1.2 %
    assert error["noise like q4"] == pytest.approx(error["q4"], rel=0.06)
    sizes = table.groupby("weights").stored_bits.mean()
    assert sizes["q4 (outliers 0.01)"] > sizes["q4"]


def test_what_another_file_holds(llama: Path, tmp_path: Path) -> None:

    nbflow.quantize_checkpoint(llama, tmp_path / "in_q4", "q4", quantizer="reference")
    with Checkpoint(llama) as checkpoint:
        stored = StoredWeights(tmp_path / "in_q4", checkpoint.spec)
    table = tensor_errors(llama, [stored, Format("q4", "reference")])
    ours, theirs = (table[table.weights == label] for label in ("q4 (reference)", stored.label))
    assert (ours.mse.to_numpy() == theirs.mse.to_numpy()).all()
    assert (theirs.format == "q4_b32t1a").all()
    stored.close()
    with Checkpoint("tiny_python") as other, pytest.raises(UsageError, match="is it that model"):
        StoredWeights(tmp_path / "in_q4", other.spec)


def test_statistics_of_the_inputs(llama: Path, tmp_path: Path) -> None:
    name = "layers.0.attn.q.weight"
    squares = np.ones(64)
    squares[:8] = 1e4
    write_stats(tmp_path / "x.safetensors", [ActivationStats((name,), squares, 1)])
    known = read_statistics(tmp_path / "x.safetensors", str(llama))
    weighed, plain = (Format("q3", statistics=s) for s in (known, None))
    assert weighed.label == "q3 (weighted)"
    with Checkpoint(llama) as checkpoint:
        exact = checkpoint.matrix(name)
    lost = [np.square(nk.dequantize(t.encode(name, exact)) - exact) for t in (weighed, plain)]
    assert lost[0][:, :8].sum() < lost[1][:, :8].sum()
    assert lost[0].sum() > lost[1].sum()


def test_wrong_input(llama: Path) -> None:
    for weights, options, message in (
        (["q4_x"], {}, "q4_k"),
        ([], {}, "one or more"),
        (["q4", "q4"], {}, "different formats"),
        (["q4"], {"tensors": "*.wq.*"}, "they are called .*layers.*.attn.q.weight"),
    ):
        with pytest.raises(UsageError, match=message):
            tensor_errors(llama, weights, **options)
    with pytest.raises(UsageError, match="unknown quantizer 'awk'"):
        Format("q4", "awk")
    with pytest.raises(UsageError, match="does not support outliers"):
        Format("q4", "hqq", outliers=0.01)
    with pytest.raises(UsageError, match="needs outliers, a share"):
        Format("q4", "outliers")
    with pytest.raises(UsageError, match=r"layers.0.attn.q.weight: quantizer 'gptq' needs"):
        tensor_errors(llama, [Format("q4", "gptq")])


def test_names_of_kinds_and_layers() -> None:
    assert all_tensor_errors.layer_of("layers.12.attn.q.weight") == 12
    assert all_tensor_errors.layer_of("embed.weight") == -1
    assert all_tensor_errors.kind_of("layers.2.shared.down.weight") == "shared.down"

"""Statistics of activations, and divergence by position and frequency of tokens."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow
from nbflow.calibration.collect import collect_stats
from nbflow_experiments.analysis import activation_statistics, analysis_windows, layer_errors
from nbflow_experiments.analysis.activation_statistics import _Sums

WINDOWS = analysis_windows("tiny_python", tokens=256, window=64)


def test_statistics_of_known_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 50))
    x[:, 7] *= 10
    sums = _Sums(np.zeros((4, 50)))
    for part in np.split(x, 4):
        sums.add(part)
    row = sums.row("layers.3.attn.q.weight")
    assert (row["layer"], row["kind"], row["rows"]) == (3, "q", 4000)
    centred = x - x.mean()
    assert row["input_kurtosis"] == pytest.approx((centred**4).mean() / x.var() ** 2 - 3, rel=1e-9)
    assert row["rms"] == pytest.approx(np.sqrt((x**2).mean()))
    assert row["crest"] == pytest.approx(np.abs(x).max() / row["rms"])
    assert row["outlier_channels"] == 1
    assert 9 < row["channel_ratio"] < 11  # the median of 50 estimates of 1, each within 2 %
    assert row["top_percent_share"] == pytest.approx((x[:, 7] ** 2).sum() / (x**2).sum())


def test_inputs_of_a_model():
    table = activation_statistics("tiny_python", WINDOWS)
    with nbflow.load("tiny_python", weights="f32", kv="f32") as model:
        stats = [s for s in collect_stats(model, WINDOWS) if s.names[0].startswith("layers.")]
    assert table.tensor.tolist() == [s.names[0] for s in stats]
    assert table.kind.tolist() == ["q", "o", "gate", "down"] * 4
    rms = [np.sqrt(s.squares.sum() / (s.n_rows * len(s.squares))) for s in stats]
    np.testing.assert_allclose(table.rms, rms, rtol=1e-9)
    down = table[table.kind == "down"]
    assert (down.input_kurtosis > 3).all()  # products of two activations
    assert (table.channel_ratio >= 1).all()


def test_tokens_by_position_and_frequency():
    found = layer_errors("tiny_python", ["q3", "f32"], WINDOWS)
    table, (whole, _) = found.tokens, found.models.kld_mean_nats
    for by, rows in table[table.change == "q3"].groupby("by"):
        assert rows.tokens.sum() == 4 * 63
        mean = (rows.tokens * rows.kld_mean_nats).sum() / rows.tokens.sum()
        assert mean == pytest.approx(whole, rel=1e-9), by
        assert (rows.low.to_numpy()[1:] == rows.high.to_numpy()[:-1] + 1).all() or by == "count"
    first = table[(table.change == "q3") & (table.by == "position")].iloc[0]
    assert (first.low, first.high, first.tokens) == (1, 1, 4)
    assert (table[table.change == "f32"].kld_mean_nats == 0).all()

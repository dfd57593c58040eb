"""The stored results of the demo sweep are those that the code gives, where timing has no part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep

ROOT = Path(__file__).parents[2]
KEY = ["weights", "partition", "batch"]
SOME = (
    'axes.weights=["f32", "q4", "q3h"]',
    'axes.partition=["0", "0&1"]',
    "axes.batch=[1]",
    "settings.repeats=1",
    "settings.warmup=0",
    "settings.min_repetition_s=0",
)
EXACT = (
    *("bits_per_weight", "stored_bits_per_weight", "weight_bytes", "kv_bytes"),
    *("traffic_measured_bytes", "traffic_predicted_bytes", "traffic_bytes_per_token"),
    "nonfinite_share",
)
# Sums in float32 depend on the vector width of the processor; f32 differs from the reference by
# its float16 cache alone.
CLOSE = {
    "weight_error_relative": {"rtol": 1e-4},
    "weight_error_worst_tensor_relative": {"rtol": 1e-4},
    "perplexity": {"rtol": 1e-4},
    "perplexity_stderr": {"rtol": 1e-3},
    "nll_mean_nats": {"rtol": 1e-4},
    "kld_mean_nats": {"rtol": 2e-3, "atol": 1e-6},
    "kld_median_nats": {"rtol": 1e-2, "atol": 1e-6},
    "kld_p99_nats": {"rtol": 1e-2, "atol": 2e-6},
    "top1_agreement_share": {"atol": 2e-3},
}


def table(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"partition": str}).set_index(KEY).sort_index()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("demo")
    file = ROOT / "experiments" / "sweeps" / "demo.toml"
    assert run_sweep(SweepOptions(file, out, SOME)) == 0
    return table(out / "demo" / "points.csv")


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/demo/*/points.csv")), ids=str)
def test_stored_numbers_without_timing_are_those_of_the_code(
    measured: pd.DataFrame, path: Path
) -> None:
    stored = table(path).loc[measured.index]
    assert len(measured) == 6
    for name in EXACT:
        assert stored[name].tolist() == measured[name].tolist(), name
    for name, tolerance in CLOSE.items():
        options = {"rtol": 0.0, **tolerance}
        np.testing.assert_allclose(stored[name], measured[name], err_msg=name, **options)


def test_a_table_of_results_is_stored() -> None:
    assert sorted(ROOT.glob("results/demo/*/points.csv"))

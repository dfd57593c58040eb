"""The axis `state` of sweeps on every recurrent family of the golden models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.spec import resolve
from nbflow_experiments.config.points import estimate_bytes, make_points
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_kernels.state_format import STATE_FORMATS

FOLDER = Path(__file__).parents[1] / "golden" / "families"
RECURRENT = (
    *("bamba", "falcon_h1", "falcon_h1_norm", "falcon_mamba", "granite4", "granite4_dense"),
    *("jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2"),
    *("minimax", "nemotron_3", "nemotron_3_bias", "nemotron_3_nano", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next"),
)
"""Their names: to resolve all models would take each process a second when it collects tests."""


def test_families() -> None:
    specs = {path.name: resolve(path).spec for path in sorted(FOLDER.iterdir())}
    assert tuple(name for name, spec in specs.items() if spec.is_recurrent) == RECURRENT
    families = {specs[name].family for name in RECURRENT}
    assert {"olmo_hybrid", "qwen3_next", "kimi_linear", "mamba", "mamba2", "jamba"} < families
    assert {"lfm2", "minimax", "falcon_h1", "granitemoehybrid", "nemotron_h", "bamba"} < families


@pytest.mark.parametrize("name", RECURRENT)
def test_points_differ_by_the_format_of_the_state(name: str, tmp_path: Path) -> None:
    """Errors grow with the rounding; a state in fewer bits takes fewer bytes."""
    file = tmp_path / "state.toml"
    file.write_text(
        f"""
        [sweep]
        measures = ["decode"]
        [settings]
        model = "{(FOLDER / name).as_posix()}"
        kv = "f32"
        prompt = 8
        decode = 4
        threads = 1
        [axes]
        state = ["f32", "bf16", "q8_0"]
        """
    )
    points = make_points(load_sweep(file))
    sizes = [estimate_bytes(point)["state_bytes"] for point in points]
    assert sizes[0] > sizes[1] >= sizes[2] > 0
    with np.load(FOLDER / name / "golden.npz") as arrays:
        ids, exact = arrays["ids"], arrays["logits"]
    errors = []
    for point in points:
        options = {key: point.config[key] for key in ("kv", "state", "threads")}
        assert options["state"] in STATE_FORMATS
        with nbflow.load(FOLDER / name, **options) as model:
            errors.append(np.abs(model.logits(ids) - exact).max() / np.abs(exact).max())
    assert errors[0] < 2e-6
    assert 1e-5 < errors[1] < 0.25  # 2**-8 of a state, times up to 64 by the norms behind it
    assert 1e-5 < errors[2] < 0.25

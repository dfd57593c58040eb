"""Recurrent layers with the CUDA kernels, in the emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbflow

FAMILIES = Path(__file__).parents[1] / "golden" / "families"


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "falcon_mamba"])
def test_models_with_recurrent_layers(name):
    """Chunks of a prompt, then a batch; roundings as in tests/models/test_families.py.

    Step by step, sums of the recurrence are rounded more often than in the chunks of the CPU.
    """
    folder = FAMILIES / name
    with np.load(folder / "golden.npz") as file:
        ids, logits, continuation = file["ids"], file["logits"], file["continuation"]
    with nbflow.load(folder, kv="f32", max_step_tokens=17, device="emulator") as model:
        found = model.logits(ids[:20])
        assert np.abs(found - logits[:20]).max() < 5e-6 * np.abs(logits).max()
        both = model.generate_batch([ids, ids[:5]], max_tokens=3)
        assert both[0].ids == continuation[:3].tolist()


@pytest.mark.parametrize(("name", "format"), [("qwen3_5", "q8_0"), ("falcon_h1", "bf16")])
def test_formats_of_states(name, format):
    """States are rounded at the same tokens as on the CPU, some of them to the other neighbour."""
    folder = FAMILIES / name
    with np.load(folder / "golden.npz") as file:
        ids, exact = file["ids"][:40], file["logits"][:40]
    found = {}
    for device in ("cpu", "emulator"):
        with nbflow.load(folder, kv="f32", state=format, device=device, threads=1) as model:
            found[device] = model.logits(ids)
    rounding = np.abs(found["cpu"] - exact).max()
    assert np.abs(found["emulator"] - found["cpu"]).max() < 0.2 * rounding
    assert rounding > 1e-4 * np.abs(exact).max()

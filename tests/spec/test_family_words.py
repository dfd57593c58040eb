"""Words of family files for models of 2025 and 2026: their effect, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nbflow.program import build
from nbflow.spec import resolve
from nbflow.spec.family import family_of_config, load_family
from nbflow.spec.from_config import build_spec
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"


def changed(name, tmp_path, text):
    """Return the spec of a golden model whose family is extended by some text."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    family = family_of_config(config, "config.json").name
    path = tmp_path / "changed.toml"
    path.write_text(f'description = "changed"\nextends = "{family}"\n{text}\n')
    found = load_family(path)
    return build_spec(found, config, name=name, where="config.json", checkpoint_tensors=None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "llama31",
            "[structure]\nattention_temperature_scale = 0.1",
            "attention_temperature_scale = 0.1 needs attention_temperature_floor",
        ),
        (
            "llama31",
            "[structure]\nattention_temperature_scale = 0.1\nattention_temperature_floor = 0",
            "attention_temperature_floor",
        ),
        ("llama31", '[structure]\nactivation = "xielu"', "'xielu' needs gated = false"),
        ("deepseek_v3", "[structure]\nqk_norm_after_rope = true", "goes without latent attention"),
        (
            "llama31",
            '[config]\nwindow = { keys = ["x"], where = "y" }',
            "goes with lists of layers",
        ),
        (
            "exaone_moe",
            '[config]\ndense_layers = { keys = ["num_experts"], where = "dense" }',
            "num_experts: must be text",
        ),
    ],
)
def test_contradictions_are_refused(name, text, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        changed(name, tmp_path, text)


def test_temperature_in_layers_without_rotation(tmp_path):
    text = (
        "[structure]\nattention_temperature_scale = 0.1\nattention_temperature_floor = 8192\n"
        'attention_temperature_offset = 1\nattention_temperature_layers = "unrotated"'
    )
    spec = changed("smollm3", tmp_path, text)  # layer 1 of 3 does not rotate
    found = [op.layer for op in build(spec).ops if op.kind == "temperature"]
    assert found == [1]


def test_norms_follow_the_rotation():
    kinds = [op.kind for op in build(resolve(FOLDER / "hunyuan").spec).ops if op.layer == 0]
    assert kinds.index("rope") < kinds.index("norm", kinds.index("linear"))


def test_layers_behind_the_last_are_ignored():
    spec = resolve(FOLDER / "bailing_moe_v2").spec
    assert "model.layers.2.*" in spec.ignored_tensors
    assert "model.layers.1.*" not in spec.ignored_tensors


def test_a_multimodal_model_is_its_text_model():
    config = {"model_type": "sphinx", "text_config": {"model_type": "qwen3_moe"}}
    assert family_of_config(config, "config.json").name == "qwen3_moe"
    known = {"model_type": "gemma3", "text_config": {"model_type": "qwen3_moe"}}
    assert family_of_config(known, "config.json").name == "gemma3"
    for bad in ({"model_type": "sphinx", "text_config": []}, {"model_type": ["llama"]}):
        with pytest.raises(UsageError, match="unknown model_type"):
            family_of_config(bad, "config.json")


def test_the_base_of_hunyuans_frequencies():
    spec = resolve(FOLDER / "hunyuan").spec
    assert spec.rope.scaling is None
    np.testing.assert_allclose(spec.rope.theta, 1e4 * 50.0 ** (12 / 10), rtol=1e-12)

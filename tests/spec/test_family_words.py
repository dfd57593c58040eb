"""Words of family files for models of 2025 and 2026: their effect, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nbflow.checkpoint.readers.gguf import config_of
from nbflow.program import build
from nbflow.spec import family, resolve
from nbflow.spec.family import family_of_config, load_family
from nbflow.spec.from_config import build_spec
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"


def changed(name, tmp_path, text):
    """Return the spec of a golden model whose family is extended by some text."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    base = family_of_config(config, "config.json").name
    path = tmp_path / "changed.toml"
    path.write_text(f'description = "changed"\nextends = "{base}"\n{text}\n')
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
            '[structure]\nposition = "sinusoidal"',
            "position 'sinusoidal' needs sinusoids 'fairseq', 'paper' or 'alternating'",
        ),
        ("llama31", '[structure]\nsinusoids = "paper"', "and others none, got position 'rope'"),
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
        (
            "llama31",
            '[config]\ndense_layers = { has = { x = "blk.{i}.y" } }',
            "has gives the words of layer_types, or of a list with where",
        ),
        (
            "llama31",
            '[config]\nactivation = { keys = ["x"], largest = true }',
            "largest goes with numbers",
        ),
        ("codegen", "[structure]\nqkv_groups = 3", "qkv_groups must divide n_heads and n_kv_heads"),
        ("gpt2", "[structure]\noutput_gate_by_head = true", "matrices that are not transposed"),
        ("nemotron_3", '[structure]\nactivation = "xielu"', "another activation than xielu"),
        (
            "nemotron_3",
            "[structure]\nrouter_weighs_inputs = true",
            "goes without expert_latent_size",
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


def test_the_family_of_a_model_is_found_without_parsing_the_others(monkeypatch):
    wanted = {kind: family._served()[kind] for kind in ("llama", "gguf-llama", "Yi", "t5")}
    monkeypatch.setattr(family, "_served", dict)
    family._server_of.cache_clear()
    assert {kind: family._server_of(kind) for kind in wanted} == wanted
    assert family._server_of('lla"]\ud800') is None


def test_the_base_of_hunyuans_frequencies():
    spec = resolve(FOLDER / "hunyuan").spec
    assert spec.rope.scaling is None
    np.testing.assert_allclose(spec.rope.theta, 1e4 * 50.0 ** (12 / 10), rtol=1e-12)


def test_letters_of_a_pattern_say_which_layers_have_experts():
    spec = resolve(FOLDER / "nemotron_3").spec
    assert spec.moe.layers == {1, 3}
    assert [op.layer for op in build(spec).ops if op.kind == "experts"] == [1, 3]


def test_tensors_say_the_kind_of_each_layer():
    """70 layers, as many numbers in the metadata; the largest counts."""
    heads = [2 if i % 7 == 3 else 0 for i in range(70)]
    experts = [i % 7 in (1, 5) for i in range(70)]
    metadata = gguf_metadata(heads)
    names = [
        f"blk.{i}.{'attn_q' if heads[i] else 'ffn_gate_inp' if experts[i] else 'ssm_in'}.weight"
        for i in range(70)
    ]
    config = config_of(metadata)
    found = family_of_config(config, "x.gguf")
    spec = build_spec(found, config, name="x", where="x.gguf", checkpoint_tensors=names)
    assert spec.n_kv_heads == 2
    assert spec.moe.layers == {i for i in range(70) if experts[i]}
    kinds = [kind.mixer[0] for kind in spec.layer_kinds]
    assert kinds.count("attention") == 10
    assert [i for i, kind in enumerate(kinds) if kind == "none"] == sorted(spec.moe.layers)
    with pytest.raises(UsageError, match="layer_types: must be one of"):
        build_spec(
            found, config, name="x", where="x.gguf", checkpoint_tensors=[*names[:-1], "other"]
        )


def gguf_metadata(kv_heads):
    """Return the metadata of a Nemotron 3 with these key/value heads per layer."""
    keys = {
        "vocab_size": 97, "embedding_length": 32, "block_count": len(kv_heads),
        "feed_forward_length": [12] * len(kv_heads), "attention.head_count": 4,
        "attention.head_count_kv": kv_heads, "attention.key_length": 8, "context_length": 64,
        "attention.layer_norm_epsilon": 1e-5, "ssm.conv_kernel": 4, "ssm.inner_size": 64,
        "ssm.time_step_rank": 4, "ssm.group_count": 2, "ssm.state_size": 16, "expert_count": 8,
        "expert_used_count": 3, "expert_feed_forward_length": 12,
    }  # fmt: skip
    return {"general.architecture": "nemotron_h_moe"} | {
        f"nemotron_h_moe.{key}": value for key, value in keys.items()
    }

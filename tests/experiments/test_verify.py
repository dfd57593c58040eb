"""`nbflow verify`: against recorded values, and against transformers where it is installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbflow.checkpoint import open_weights
from nbflow.cli import main
from nbflow.executor import ReferenceExecutor
from nbflow.executor.weight_loader import WeightLoader
from nbflow.program import build
from nbflow.spec import resolve
from nbflow.spec.family import families
from nbflow_experiments.verify.compare import Check, Report
from nbflow_experiments.verify.recording import read_recording
from nbflow_experiments.verify.shrink import shrink
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "families"


def verify(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    """Run the command; return the exit code and what it prints."""
    with pytest.raises(SystemExit) as stopped:
        main(["verify", *map(str, words), "--json"])
    out = capsys.readouterr()
    assert stopped.value.code in (0, 1), out.err
    return stopped.value.code, json.loads(out.out)


def test_a_right_specification(capsys: pytest.CaptureFixture[str]) -> None:
    """Logits of transformers that come with the tests."""
    folder = GOLDEN / "qwen3"
    code, found = verify(capsys, folder, "--against", folder / "golden.npz")
    assert (code, found["agrees"], found["first"]) == (0, True, None)
    names = [check["name"] for check in found["checks"]]
    assert names == [
        "float64 reference", "whole", "in pieces of 7 tokens", "partition 0&1", "partition 0;1"
    ]  # fmt: skip
    assert all(check["difference"] < 1e-5 for check in found["checks"])  # float32 of two layers


def test_a_wrong_rotation_is_found_and_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first layer's attention differs, and the right word is proposed."""
    folder = GOLDEN / "qwen3"
    resolved = resolve(folder)
    ids = np.load(folder / "golden.npz")["ids"]
    hidden: dict[int, np.ndarray] = {}
    program = build(resolved.spec)

    def trace(op: Any, array: np.ndarray) -> None:
        if op.out == "x":
            hidden[-1 if op.layer is None else op.layer] = array.copy()

    with open_weights(resolved.path) as file:
        logits = ReferenceExecutor(program, WeightLoader(program, file, None), trace).logits(ids)
    npz = tmp_path / "recorded.npz"
    np.savez(npz, ids=ids, logits=logits, hidden=[hidden[i] for i in sorted(hidden)])
    spec = tmp_path / "wrong.toml"
    spec.write_text('family = "qwen3"\n[override]\nrope_style = "interleaved"\n')
    code, found = verify(capsys, folder, "--spec", spec, "--against", npz)
    assert code == 1
    assert found["first"].startswith("layer 0")
    assert found["values"][0]["name"] == "the embedding"
    assert found["values"][0]["difference"] < 1e-12  # the same float64 computation
    assert found["remedies"] == ["rope_style = 'half'"]


def test_a_wrong_embedding_is_told_from_a_wrong_layer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = GOLDEN / "m2m_100"
    with pytest.raises(SystemExit):
        main(["verify", str(folder), "--against", str(GOLDEN / "qwen3" / "golden.npz")])
    assert "only decoders without an encoder can be verified" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": np.arange(3)}, "logits is missing"),
        ({"ids": np.arange(3.0), "logits": np.zeros((3, 5))}, "ids must be whole numbers"),
        ({"ids": np.arange(3), "logits": np.zeros((2, 5))}, r"finite numbers \(3, V\), got"),
        ({"ids": np.arange(3), "logits": np.full((3, 5), np.nan)}, "finite numbers"),
        (
            {"ids": np.arange(3), "logits": np.zeros((3, 5)), "hidden": np.zeros((2, 4, 8))},
            r"hidden must be \(layers, 3, E\), got \(2, 4, 8\)",
        ),
    ],
)
def test_recordings_are_checked(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "r.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        read_recording(tmp_path / "r.npz")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "torch"], "--against must be hf or FILE.npz"),
        (["--against", "none.npz"], "cannot read none.npz"),
        (["--against", "hf", "--set", "x"], "--set must be KEY=VALUE"),
        (["--against", "hf", "--tokens", "0"], "--tokens must be in 1..4096"),
        (["--against", "hf", "--partitions", "0x1"], "partition must be rank numbers"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", str(GOLDEN / "qwen3"), *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_could_not_run_does_not_agree() -> None:
    skipped, same = Check("partition 0&1", float("nan")), Check("whole", 0.0)
    assert not Report([skipped]).agrees
    assert Report([same, skipped]).agrees


def test_a_large_configuration_becomes_small() -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936, "eos_token_id": 151645, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention"] * 48, "tie_word_embeddings": False,
    }  # fmt: skip
    small = shrink(config, families()["qwen3_moe"])
    assert config["hidden_size"] == 2048
    assert small == config | {
        "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 16, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 48,
        "num_experts": 16, "vocab_size": 160, "eos_token_id": 151645 % 160,
        "layer_types": ["full_attention"] * 4,
    }  # fmt: skip


def test_a_small_configuration_keeps_layers_that_share_keys_and_values() -> None:
    config = {
        "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 30, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 10,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
        "eos_token_id": [1, 106],
    }  # fmt: skip
    small = shrink(config, families()["gemma3n"])
    assert (small["num_hidden_layers"], small["num_kv_shared_layers"]) == (4, 2)
    assert small["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert small["eos_token_id"] == [1, 106]


@pytest.mark.parametrize(
    ("name", "config", "small"),
    [
        # keys of single layers keep their layers, one of each kind
        (
            "gemma4",
            {
                "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
                "head_dim": 256, "layer_types": (["sliding"] * 5 + ["full"]) * 5,
                "per_layer_config": {str(i).zfill(2): {"head_dim": 512} for i in range(5, 30, 6)},
            },
            {
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "layer_types": ["sliding"] * 3 + ["full"],
                "per_layer_config": {"3": {"head_dim": 32}},
            },
        ),
        # so do lists of numbers, and those from one
        (
            "kimi_linear",
            {
                "num_hidden_layers": 12, "first_k_dense_replace": 1,
                "linear_attn_config": {"full_attn_layers": [5, 9], "kda_layers": [1, 2]},
            },
            {
                "num_hidden_layers": 4, "first_k_dense_replace": 1,
                "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]},
            },
        ),
        # letters
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M-M-M-*-M", "hidden_size": 64, "mamba_num_heads": 128,
             "mamba_head_dim": 64, "num_hidden_layers": 9, "ssm_state_size": 128},
            {"hybrid_override_pattern": "M-M*", "hidden_size": 64, "mamba_num_heads": 8,
             "mamba_head_dim": 1024, "num_hidden_layers": 4, "ssm_state_size": 16},
        ),
        # every n-th layer
        (
            "jamba",
            {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4},
            {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 3},
        ),
        # columns of states stay a share of the stream's
        (
            "granitemoehybrid",
            {"hidden_size": 4096, "num_attention_heads": 32, "mamba_n_heads": 128,
             "mamba_d_head": 64, "mamba_expand": 2},
            {"hidden_size": 64, "num_attention_heads": 4, "mamba_n_heads": 8,
             "mamba_d_head": 16, "mamba_expand": 2},
        ),
        # an even number of rotated columns
        (
            "mimo_v2_flash",
            {"head_dim": 192, "num_attention_heads": 64, "partial_rotary_factor": 0.334},
            {"head_dim": 18, "num_attention_heads": 4, "partial_rotary_factor": 0.334},
        ),
    ],
)  # fmt: skip
def test_a_small_configuration_has_each_kind_of_layer(
    name: str, config: dict[str, Any], small: dict[str, Any]
) -> None:
    assert shrink(config, families()[name]) == small


def test_heads_of_latent_attention_stay_as_many_as_keys() -> None:
    config = {
        "model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128,
        "hidden_size": 7168,
    }  # fmt: skip
    small = shrink(config, families()["deepseek_v3"])
    assert small["num_attention_heads"] == small["num_key_value_heads"] < 128


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "gemma2", "gpt2", "qwen3_moe", "phi"])
def test_against_transformers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("transformers", reason="pip install torch transformers")
    shutil.copy(GOLDEN / name / "config.json", tmp_path / "config.json")
    code, found = verify(capsys, tmp_path, "--against", "hf", "--partitions", "0&1")
    assert (code, found["agrees"]) == (0, True), found
    spec = tmp_path / "wrong.toml"
    spec.write_text(f'family = "{name}"\n[override]\nactivation = "relu2"\n')
    code, found = verify(capsys, tmp_path, "--against", "hf", "--spec", spec)
    assert code == 1
    assert found["first"] == "layer 0, feed-forward network" or name in ("gemma2", "phi")
    assert any(text.startswith("activation = ") for text in found["remedies"])

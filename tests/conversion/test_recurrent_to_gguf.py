"""`nbflow quantize` to GGUF of models with recurrent layers: what llama.cpp computes, and we."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from logits_of_files import logits, logits_of_llama_cpp
from small_models import write_checkpoint

import nbflow
from nbflow.conversion.gguf_recurrent import ARCHITECTURES
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
KIMI = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4,
        "short_conv_kernel_size": 4}  # fmt: skip
QWEN = {
    "num_hidden_layers": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"use_bias": False},
    "falcon_mamba": {"mixer_rms_eps": 1e-5, "use_bias": False},
    "mamba2": {"use_bias": False},
    "jamba": {},
    "granite4": {},
    "granite4_dense": {},
    "falcon_h1": {},
    "lfm2": {"conv_bias": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "nemotron_h": {"time_step_min": 0.0},
    "nemotron_3": {"time_step_min": 0.0},
    "qwen3_next": {"mlp_only_layers": [], "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "kimi_linear": {"linear_attn_config": KIMI},
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
}
"""Golden model -> changes of its configuration to what llama.cpp computes."""


def config_of(model: str) -> dict[str, Any]:
    """Return the configuration of a golden model."""
    config: dict[str, Any] = json.loads((FAMILIES / model / "config.json").read_text())
    return config.get("text_config", config)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a random checkpoint and the GGUF file written from it, in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder / "model", config_of(request.param) | MODELS[request.param])
    path = folder / "x.gguf"
    nbflow.quantize_checkpoint(folder / "model", path, "f32", rules=["*=f32"])
    return folder / "model", path


def test_all_families_are_written() -> None:
    written = {resolve(FAMILIES / model).spec.family for model in MODELS}
    assert written == set(ARCHITECTURES)


def test_logits_are_those_of_the_checkpoint(pair: tuple[Path, Path]) -> None:
    """Factors round each weight once; sums over heads in another order are off by 4e-6."""
    ids = np.arange(1, 21)
    ours, again = (logits(path, ids, kv="f32") for path in pair)
    assert np.abs(again - ours).max() < 1e-5 * np.abs(ours).max()


def test_llama_cpp_computes_the_same(pair: tuple[Path, Path]) -> None:
    """llama.cpp's sums in float32 are off by up to 1e-5, its decay of Kimi Linear by 4e-5."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python (extra bench) is compiled on install")
    ids = np.arange(1, 33)
    ours, theirs = logits(pair[0], ids, kv="f32"), logits_of_llama_cpp(pair[1], ids)
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max()
    assert np.array_equal(ours.argmax(1), theirs.argmax(1))


def test_small_tensors_stay_in_float32(tmp_path: Path) -> None:
    """llama.cpp wants taps and rates in float32, whatever the format of the matrices."""
    write_checkpoint(tmp_path / "model", config_of("mamba2") | MODELS["mamba2"])
    nbflow.quantize_checkpoint(tmp_path / "model", tmp_path / "x.gguf", "q8_0", rules=["*=q8_0"])
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    formats = {name: tensors[f"blk.0.ssm_{name}"].tensor_type.name for name in (
        "in.weight", "out.weight", "conv1d.weight", "a", "d", "norm.weight")}  # fmt: skip
    assert formats == {
        "in.weight": "Q8_0", "out.weight": "Q8_0", "conv1d.weight": "F32", "a": "F32", "d": "F32",
        "norm.weight": "F32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "changes", "note"),
    [
        ("nemotron_h", {}, "no least time step: those below 0.001"),
        ("falcon_mamba", {"use_bias": False}, "one epsilon: norms within the layers get 1e-05"),
    ],
)
def test_notes_on_what_files_lose(
    model: str, changes: dict[str, Any], note: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", config_of(model) | changes)
    done = nbflow.quantize_checkpoint(tmp_path / "model", tmp_path / "x.gguf", "f16")
    assert any(note in text for text in done.notes)


def test_what_files_cannot_hold(tmp_path: Path) -> None:
    tied = config_of("falcon_h1") | {"tie_word_embeddings": True}
    cases = {
        "hold the factors in the matrices": tied,
        "cannot store biases": config_of("lfm2"),
        "cannot store delta": config_of("kimi_linear"),
    }
    for i, (message, config) in enumerate(cases.items()):
        write_checkpoint(tmp_path / str(i), config)
        with pytest.raises(UsageError, match=message):
            nbflow.quantize_checkpoint(tmp_path / str(i), tmp_path / "x.gguf", "f32")

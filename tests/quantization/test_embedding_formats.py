"""Formats of the token embedding, per-layer embeddings and the head, by patterns that name them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nbflow
import nbflow_kernels as nk
from nbflow.planner import planned_model
from nbflow.planner.memory_plan import plan_memory
from nbflow.quantization.policy import weight_formats
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
OPTIONS = {"kv": "f32", "threads": 1}


@pytest.mark.parametrize(
    ("name", "weights", "stored"),
    [
        ("qwen3", "embed.weight=q8_0", {"model.embed_tokens.weight": "q8_0"}),
        (
            "qwen3",
            "head.*=q4_0; embed.*=q5_1",
            {"lm_head.weight": "q4_0", "model.embed_tokens.weight": "q5_1"},
        ),
        ("gemma", "embed.weight=q8_0", {"model.embed_tokens.weight": "q8_0"}),  # the head, too
        ("gemma3n", "layer_embed.*=q8_0", {"model.embed_tokens_per_layer.weight": "q8_0"}),
    ],
)
@pytest.mark.parametrize("partition", ["0", "0&1"])
def test_logits_are_those_of_the_rounded_tables(name, weights, stored, partition, tmp_path):
    """Float32 sums of 32 columns; other tensors keep their stored format."""
    folder = tmp_path / name
    shutil.copytree(FOLDER / name, folder)
    tensors = load_file(folder / "model.safetensors")
    for key, format in stored.items():
        wide = tensors[key].astype(np.float32)
        tensors[key] = nk.dequantize(nk.quantize(wide, format)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    ids = np.load(FOLDER / name / "golden.npz")["ids"]
    options = {"kv": "f32", "partition": partition, "quantizer": "search"}
    with nbflow.load(FOLDER / name, weights=weights, **options) as model:
        found = model.logits(ids)
    with nbflow.load(folder, **OPTIONS) as model:
        wanted = model.logits(ids)
    with nbflow.load(FOLDER / name, **OPTIONS) as model:
        exact = model.logits(ids)
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()
    assert np.abs(found - exact).max() > 1e-4 * np.abs(exact).max()


def test_only_patterns_that_begin_with_their_names():
    formats = weight_formats("embed.weight=q8_0; *=q4_0")
    assert formats.of("embed.weight", (96, 32)) == "q8_0"
    assert formats.of("head.weight", (96, 32)) is None
    assert formats.of("layer_embed.weight", (96, 32)) is None
    assert weight_formats("*.weight=q4_0").of("embed.weight", (96, 32)) is None
    assert weight_formats("embed.*=q4_0").of("embed.in.weight", (96, 32)) is None
    assert weight_formats("q4_0").of("head.weight", (96, 32)) is None


def test_planned_bytes_are_those_of_the_loaded_model():
    weights = "embed.weight=q8_0; head.weight=q5_1; *=q4_0"
    (rank,) = plan_memory(FOLDER / "qwen3", weights=weights).ranks
    with nbflow.load(FOLDER / "qwen3", threads=1, weights=weights) as model:
        assert rank.weight_bytes == model.memory()[0]["weight_bytes"]
    assert planned_model(FOLDER / "qwen3", weights).format_of("embed.weight") == "q8_0"


def test_the_head_of_a_tied_model_has_no_format_of_its_own():
    with pytest.raises(UsageError, match=r"the head of this model is its embedding, embed\.weight"):
        nbflow.load(FOLDER / "gemma", weights="head.weight=q4_0", threads=1)

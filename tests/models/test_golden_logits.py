"""Logits of checkpoints written by other programs, against those programs' logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow.spec import resolve

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA2C_PROMPT = [1, 260, 7, 301, 44, 44, 269, 3, 99]
STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She "
    'said, "I want to play with your ball, but I can\'t find it."\n'
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to "
    "do.\"\nLily didn't want to help her mom, so she"
)


def relative(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("name", ["biased", "tied"])
@pytest.mark.parametrize("partition", ["0", "0;1", "0&1", "0&1;2&3"])
def test_llama_logits_equal_those_of_transformers(name, partition):
    folder = GOLDEN / "llama" / name
    ids, logits = np.load(folder / "ids.npy"), np.load(folder / "logits.npy")
    with nbflow.load(folder, kv="f32", partition=partition) as model:
        assert relative(model.logits(ids), logits) < 1e-5  # float32 on both sides


def test_llama_in_odd_pieces():
    folder = GOLDEN / "llama" / "biased"
    ids, logits = np.load(folder / "ids.npy"), np.load(folder / "logits.npy")
    for budget in (1, 3, 17):
        with nbflow.load(folder, kv="f32", max_step_tokens=budget) as model:
            assert relative(model.logits(ids), logits) < 1e-5


@pytest.mark.parametrize(
    ("file", "logits"),
    [
        ("legacy_shared.bin", "logits_shared.npy"),
        ("legacy_unshared.bin", "logits_unshared.npy"),
        ("v1_unshared.bin", "logits_unshared.npy"),
    ],
)
def test_llama2c_logits_equal_those_of_llama2c(file, logits):
    expected = np.load(GOLDEN / "llama2c" / logits)
    with nbflow.load(GOLDEN / "llama2c" / file, kv="f32") as model:
        assert relative(model.logits(LLAMA2C_PROMPT), expected) < 1e-5


@pytest.mark.parametrize("kind", ["shared", "unshared"])
def test_llama2c_int8_files_run(kind):
    path = GOLDEN / "llama2c" / f"v2_{kind}.bin"
    spec = resolve(path).spec
    program = build(spec)
    with open_weights(path) as file:
        reference = ReferenceExecutor(program, WeightLoader(program, file, None))
    with nbflow.load(path, kv="f32") as model:
        logits = model.logits(LLAMA2C_PROMPT)
    assert relative(logits, reference.logits(np.array(LLAMA2C_PROMPT))) < 1e-5
    # int8 rounding moves the logits of this random model, but by less than their own size
    assert 1e-3 < relative(logits, np.load(GOLDEN / "llama2c" / f"logits_{kind}.npy")) < 0.3


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no checkpoint stories260K in {STORIES}")
@pytest.mark.parametrize("partition", ["0", "0;1", "0&1"])
def test_stories260k_tells_the_published_story(partition):
    with nbflow.load(
        STORIES / "stories260K.bin", tokenizer=STORIES / "tok512.bin", partition=partition
    ) as model:
        result = model.generate("", max_tokens=200)
        assert model.tokenizer.decode(result.prompt_ids + result.ids) == STORY


def test_bfloat16_checkpoints_keep_their_type(tmp_path):
    folder = GOLDEN / "llama" / "biased"
    tensors = load_file(folder / "model.safetensors")
    header, data = {}, b""
    for name, array in tensors.items():
        bits = (array.view(np.uint32) >> 16).astype(np.uint16)  # cut to bfloat16
        tensors[name] = (bits.astype(np.uint32) << 16).view(np.float32)
        at = [len(data), len(data) + bits.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": at}
        data += bits.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16" / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + data
    )
    (tmp_path / "f32").mkdir()
    save_file(tensors, tmp_path / "f32" / "model.safetensors")
    ids = np.load(folder / "ids.npy")
    results = {}
    for kind in ("bf16", "f32"):
        (tmp_path / kind / "config.json").write_text((folder / "config.json").read_text())
        with nbflow.load(tmp_path / kind, kv="f32") as model:
            results[kind] = model.logits(ids), model.memory()[0]["weight_bytes"]
    np.testing.assert_array_equal(results["bf16"][0], results["f32"][0])
    assert results["bf16"][1] < 0.6 * results["f32"][1]


def test_golden_configurations_are_what_they_claim():
    config = json.loads((GOLDEN / "llama" / "biased" / "config.json").read_text())
    assert config["attention_bias"]
    assert config["mlp_bias"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]

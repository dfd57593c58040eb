"""Hadamard-rotated KV caches: equal in exact arithmetic, smaller errors in block formats."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from cache_options import check_partition, check_prompt_in_pieces, error
from small_models import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.kv_cache.rotation import with_rotation
from nbflow.program import build, fuse
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
MODELS = [
    "gemma2", "gpt_neox", "qwen3", "granite4", "gpt_oss_limit", "llama4_text", "mpt",
    "mimo_v2_flash",
]  # fmt: skip
"""Windows and soft caps, partial rotary embedding, q/k norms, recurrent layers, attention sinks,
chunks with a temperature, ALiBi, heads of several sizes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=2, hidden_size=96, n_heads=3, n_kv_heads=3, head_dim=32)
    return folder


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(3).integers(0, 101, 50)


def _reference(folder: Path, ids: np.ndarray, kv: str | None) -> np.ndarray:
    spec = resolve(folder).spec
    program = fuse(build(spec if kv is None else with_rotation(spec, "hadamard", kv)))
    with open_weights(folder) as file:
        return ReferenceExecutor(program, WeightLoader(program, file, None)).logits(ids)


@pytest.mark.parametrize("kv", ["q4_0", "f16/q8_0", "q8_0/f32"])
@pytest.mark.parametrize("name", MODELS)
def test_rotation_changes_nothing_in_exact_arithmetic(name, kv):
    folder = FAMILIES / name
    ids = np.arange(2, 14) % resolve(folder).spec.vocab_size
    # float64 sums of up to 64 terms, 4 layers, against the largest logit
    assert error(_reference(folder, ids, kv), _reference(folder, ids, None)) < 1e-12


def test_sides_in_formats_of_floats_are_not_rotated(checkpoint):
    spec = resolve(checkpoint).spec

    def kinds(kv: str) -> list[tuple[str, ...]]:
        program = build(with_rotation(spec, "hadamard", kv))
        return [op.inputs for op in program.ops if op.kind == "hadamard" and op.layer == 0]

    assert kinds("f16") == kinds("f8_e4m3") == []
    assert kinds("q8_0/f16") == [("q", "k")]
    assert kinds("f16/q8_0") == [("v",), ("a",)]
    assert kinds("q8_0") == [("q", "k"), ("v",), ("a",)]


def test_blocks_are_the_largest_power_of_two_of_a_head(checkpoint):
    spec = resolve(checkpoint).spec
    for head, keys, values in ((128, 128, 64), (96, 32, 32), (80, 16, 16), (256, 256, 64)):
        changed = dataclasses.replace(spec, head_dim=head)
        assert (changed.rotation_block("keys"), changed.rotation_block("values")) == (keys, values)


def test_engine_equals_the_reference_up_to_the_format(checkpoint, ids):
    expected = _reference(checkpoint, ids, None)
    with nbflow.load(checkpoint, kv="q8_0", kv_rotation="hadamard") as model:
        # 8 bits: each number off by 1/254 of the largest of its block, averaged over the context
        assert 0 < error(model.logits(ids), expected) < 2e-2


@pytest.mark.parametrize("partition", ["0&1&2", "0;1"])
def test_partitions_agree_with_one_rank(checkpoint, ids, partition):
    check_partition(checkpoint, ids, partition, kv_rotation="hadamard")


def test_prompt_in_pieces_is_bitwise_equal(checkpoint, ids):
    check_prompt_in_pieces(checkpoint, ids, kv_rotation="hadamard")


def test_divergence_of_the_bundled_model_is_smaller():
    text = np.random.default_rng(0).integers(3, 2000, 160)
    logits = {}
    for name, options in {
        "exact": {"kv": "f32"},
        "plain": {"kv": "q4_0/f32"},
        "rotated": {"kv": "q4_0/f32", "kv_rotation": "hadamard"},
    }.items():
        with nbflow.load("tiny_python", **options) as model:
            logits[name] = model.logits(text)
    plain = np.square(logits["plain"] - logits["exact"]).mean()
    assert np.square(logits["rotated"] - logits["exact"]).mean() < 0.8 * plain


def test_outlier_channels_of_keys_are_spread():
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, 200, 64)).astype(np.float32)
    k[:, [5, 40]] *= 20

    def error(queries: np.ndarray, keys: np.ndarray) -> float:
        stored = nk.dequantize(nk.quantize(keys, "q4_0", quantizer="reference"))
        return float(np.square((stored - keys) @ queries.T).mean())

    plain = error(q, k)
    rotated = error(*(nk.hadamard_transform(x, 64) for x in (q, k)))
    # one outlier of 20 widens the step of both its blocks 20-fold; rotated, the block's largest
    # number is about 20 * sqrt(2 / 64) * 2 = 7: 9 times smaller squares
    assert rotated < plain / 4


@pytest.mark.parametrize(
    ("name", "words"), [("deepseek_v2_lite", "latent vectors"), ("minicpm3", "latent vectors")]
)
def test_latent_caches_are_refused(name, words):
    with pytest.raises(UsageError, match=words):
        nbflow.load(FAMILIES / name, kv="q8_0", kv_rotation="hadamard")


def test_unknown_rotation_is_refused(checkpoint):
    with pytest.raises(UsageError, match="kv_rotation"):
        nbflow.load(checkpoint, kv="q8_0", kv_rotation="fourier")


def test_odd_heads_are_refused(checkpoint):
    spec = resolve(checkpoint).spec
    spec = dataclasses.replace(spec, head_dim=5, rope=dataclasses.replace(spec.rope, dim=0))
    with pytest.raises(UsageError, match="heads of 5 numbers"):
        with_rotation(spec, "hadamard", "q8_0")

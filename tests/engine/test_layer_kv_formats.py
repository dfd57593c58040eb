"""KV cache formats by layer: parsing, bytes of storage and plans, rotation, and results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.distributed import make_plan
from nbflow.kv_cache.rotation import with_rotation
from nbflow.planner import planned_model
from nbflow.planner.stage_cost import RankWork
from nbflow.program import build
from nbflow.program.cost import StepShape, kv_layer_bytes, kv_token_bytes
from nbflow.spec import resolve
from nbflow.spec.kv_formats import parse_kv
from nbflow_kernels.errors import UsageError

KV = "q4_0;0:f16;-1:q8_0/lm3"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=4, hidden_size=64, n_heads=2, n_kv_heads=2, head_dim=32)
    return folder


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(3).integers(0, 101, 40)


def names(kv: str, n_layers: int) -> list[str]:
    return ["/".join(f.name for f in parse_kv(kv).of(i, n_layers)) for i in range(n_layers)]


def test_the_first_entry_of_a_layer_decides() -> None:
    assert names("q8_0/q4_0", 2) == ["q8_0/q4_0"] * 2
    expected = ["f16/f16", "q4_0/q4_0", "q4_0/q4_0", "q8_0/lm3"]
    assert names(KV, 4) == expected
    assert names("f16; 1-2:q4_0; 2-3:q8_0", 4) == [
        "f16/f16", "q4_0/q4_0", "q4_0/q4_0", "q8_0/q8_0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        ("q4_0;0", "must be LAYERS:FORMAT"),
        ("q4_0;0,1:f16", "must be LAYERS:FORMAT"),
        ("q4_0;3-1:f16", "ends before it begins"),
        ("q4_0;0:f15", "unknown kv_format 'f15'"),
        ("q4_0;4:f16", "kv names layer 4, and the model has 4 layers"),
        ("q4_0;-5:f16", "kv names the last 5"),
    ],
)
def test_wrong_entries_are_named(checkpoint, kv, words):
    with pytest.raises(UsageError, match=words):
        nbflow.load(checkpoint, kv=kv)


def test_storage_and_plans_count_the_bytes_of_each_layer(checkpoint):
    program = build(resolve(checkpoint).spec)
    # heads of 32: 64 bytes of float16, 18 of q4_0, 34 of q8_0, 14 of lm3; two heads
    assert [kv_layer_bytes(program, KV, i) for i in range(4)] == [256, 72, 72, 96]
    with nbflow.load(checkpoint, kv=KV) as model:
        storage = model.workers[0].storage
        assert storage.page_bytes == storage.page_size * kv_token_bytes(program, KV)
    planned = planned_model(str(checkpoint))
    work = RankWork(planned, make_plan(planned.spec, "0").ranks[0])
    assert work.kv_token_bytes(KV) == kv_token_bytes(program, KV)
    step = StepShape(1, 1, 100, 1)
    read = {
        kv: sum(n * each.cost.kv_bytes for n, _, ops in work.segments(step, kv) for each in ops)
        for kv in (KV, "f16")
    }
    assert read[KV] / read["f16"] == pytest.approx((256 + 72 + 72 + 96) / (4 * 256))


def test_only_layers_in_block_formats_are_rotated(checkpoint):
    spec = with_rotation(resolve(checkpoint).spec, "hadamard", KV)
    rotated = [(op.layer, op.inputs) for op in build(spec).ops if op.kind == "hadamard"]
    assert {layer for layer, _ in rotated} == {1, 2, 3}
    assert (3, ("q", "k")) in rotated


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_a_format_for_all_layers_equals_the_same_by_layer(checkpoint, ids, rotation):
    options = {"kv_rotation": rotation}
    with nbflow.load(checkpoint, kv="q8_0", **options) as model:
        expected = model.logits(ids)
    with nbflow.load(checkpoint, kv="f32;0-1:q8_0;-2:q8_0", **options) as model:
        np.testing.assert_array_equal(model.logits(ids), expected)


@pytest.mark.parametrize("partition", ["0;1", "0&1"])
def test_stages_know_their_layers_of_the_whole_model(checkpoint, ids, partition):
    with nbflow.load(checkpoint, kv=KV) as model:
        expected = model.logits(ids)
    with nbflow.load(checkpoint, kv=KV, partition=partition) as model:
        found = model.logits(ids)
    # by tensor the sums of a layer round differently, and a code of 3 bits may fall to either side
    bound = 0 if partition == "0;1" else 0.05 * np.abs(expected).max()
    assert np.abs(found - expected).max() <= bound


def test_more_bits_in_one_layer_lower_the_error(checkpoint, ids):
    found = {}
    for kv in ("f32", "q4_0", "q4_0;-1:f32"):
        with nbflow.load(checkpoint, kv=kv) as model:
            found[kv] = model.logits(ids)
    plain, helped = (np.square(found[kv] - found["f32"]).mean() for kv in ("q4_0", "q4_0;-1:f32"))
    assert 0 < helped < plain


def test_latent_caches_have_one_format():
    folder = Path(__file__).parents[1] / "golden" / "families" / "deepseek_v2_lite"
    with pytest.raises(UsageError, match="one format in all layers"):
        nbflow.load(folder, kv="f16;0:f32")

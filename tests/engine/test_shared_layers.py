"""Layers that share keys and values, and what flows between layers besides the hidden state."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.distributed.plan import make_plan
from nbflow.planner.planned_model import planned_model
from nbflow.planner.stage_cost import RankWork
from nbflow.program import build, fuse, partition
from nbflow.program.cost import kv_token_bytes
from nbflow.program.partition import carried_layers
from nbflow.spec import check, resolve
from nbflow.spec.formula import evaluate
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"


def spec_of(name):
    return resolve(FAMILIES / name).spec


def test_layers_that_share_a_cache_have_no_pages():
    """4 layers, of which the last two read the pages of the first two."""
    spec = spec_of("gemma3n")
    assert [spec.kv_source(i) for i in range(4)] == [0, 1, 0, 1]
    assert build(spec).kv_layers == (0, 1)
    plain = dataclasses.replace(spec, kv_shared_layers=0)
    assert kv_token_bytes(build(plain), "f16") == 2 * kv_token_bytes(build(spec), "f16")
    names = spec.tensor_shapes()
    assert "layers.1.attn.k.weight" in names
    assert not {"layers.2.attn.k.weight", "layers.2.attn.k_norm.weight"} & names.keys()


def test_a_later_stage_gets_the_keys_and_values_that_it_reads():
    """6 layers, of which the last two read layer 1: both stages store its keys and values."""
    spec = spec_of("gemma4")
    assert [spec.kv_source(i) for i in range(6)] == [0, 1, 2, 3, 1, 1]
    assert carried_layers(spec, 3) == (1,)
    plan = make_plan(spec, "0;1")
    parts = [partition(build(spec), rank) for rank in plan.ranks]
    assert [part.kv_layers for part in parts] == [(0, 1, 2), (1, 3)]
    sent = [op.out for op in parts[0].ops if op.kind == "send"]
    assert sent == ["x", "pe", "k1", "v1"]
    assert sent == [op.out for op in parts[1].ops if op.kind == "recv"]
    model = planned_model(FAMILIES / "gemma4")
    for rank, part in zip(plan.ranks, parts, strict=True):
        assert RankWork(model, rank).kv_token_bytes("f16") == kv_token_bytes(part, "f16")


def test_stages_of_several_ranks_begin_before_the_shared_layers():
    with pytest.raises(UsageError, match="a stage begins with layer 2, behind layer 1 whose keys"):
        nbflow.load(FAMILIES / "gemma4", partition="0;1&2", threads=1)


@pytest.mark.parametrize("kv", ["q8_0", "f16/q4_0"])
def test_a_shared_cache_in_other_formats(kv):
    """Generation continues what the whole text gives, with the same bits."""
    folder = FAMILIES / "gemma3n"
    with np.load(folder / "golden.npz") as file:
        ids = file["ids"]
    with nbflow.load(folder, kv=kv, kv_rotation="hadamard", threads=1) as model:
        whole = model.logits(ids)
        new = model.generate(ids[:30], max_tokens=6).ids
        again = model.logits(np.concatenate([ids[:30], new]))
        assert np.argmax(again[29:35], axis=1).tolist() == list(new)
    with nbflow.load(folder, kv=kv, kv_rotation="hadamard", max_step_tokens=7, threads=1) as model:
        np.testing.assert_array_equal(model.logits(ids), whole)


def test_linears_of_layers_with_other_heads_are_not_fused_into_one_buffer():
    """Each buffer is columns of one fused buffer: layers without own keys read q by itself."""
    spec = dataclasses.replace(
        spec_of("qwen3"), values_from_keys="full", window=4, full_layers=frozenset({0})
    )
    program = fuse(build(spec))
    for op in program.ops:
        if op.kind == "linear" and "_" in op.out:
            assert all(program.buffers[part].base == op.out for part in op.out.split("_"))


def test_sizes_of_the_networks_of_layers():
    spec = spec_of("gemma4")
    assert [spec.ffn_size(i) for i in range(6)] == [48, 48, 48, 48, 96, 96]
    program = fuse(partition(build(spec), make_plan(spec, "0&1").ranks[1]))
    assert {name: program.buffers[name].width for name in ("f", "f96")} == {"f": 24, "f96": 48}


def changed(tmp_path, name, **config):
    folder = tmp_path / name
    shutil.copytree(FAMILIES / name, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_configurations_that_contradict_themselves(tmp_path):
    folder = changed(tmp_path, "gemma3n", num_kv_shared_layers=4)
    with pytest.raises(UsageError, match="no layer before the last 4 has the attention of layer 0"):
        resolve(folder)
    folder = changed(tmp_path / "streams", "gemma3n", altup_active_idx=3)
    with pytest.raises(UsageError, match=r"active_stream must be 0\.\.2, got 3"):
        resolve(folder)
    folder = changed(tmp_path / "share", "gemma3n", activation_sparsity_pattern=[1.5])
    with pytest.raises(UsageError, match="activation_sparsity_pattern: must be a number from 0 to"):
        resolve(folder)


def test_transforms_refuse_what_reads_the_residual_stream():
    for quantizer, match in (("hadamard", "cannot be rotated exactly"), ("awq", "'awq'")):
        with pytest.raises(UsageError, match=match):
            nbflow.load(FAMILIES / "gemma3n", weights="q4", quantizer=quantizer, threads=1)


def test_keys_with_a_bias_end_contexts_where_some_would_be_left_out(tmp_path):
    """Keys are cached with a column for the bias, and contexts end at keep_window_size."""
    spec = spec_of("doge")
    assert spec.heads_of(0).key_dim == spec.head_dim + 16
    assert resolve(changed(tmp_path, "doge", keep_window_size=40)).spec.max_context == 40
    with pytest.raises(UsageError, match="dynamic_mask_keys goes without logits_soft_cap"):
        dataclasses.replace(spec, logits_soft_cap=5.0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_experts_per_tok": 37}, r"retrieved_per_token must be 1\.\.36 with .* = 37"),
        ({"num_experts": 2}, r"must be 1\.\.1 with retrieved_experts = 2, got 5"),
        ({"num_experts": -1}, "num_experts"),
    ],
)  # fmt: skip
def test_numbers_of_retrieved_experts(tmp_path, changes, match):
    assert resolve(FAMILIES / "doge_moe").spec.retrieval_keys == 6  # 36 pairs name 37 experts
    with pytest.raises(UsageError, match=match):
        resolve(changed(tmp_path, "doge_moe", **changes))


def test_empty_tensors_are_not_missed(tmp_path):
    """transformers stores the matrices of no shared experts as matrices without rows."""
    folder = changed(tmp_path, "doge")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.0.mlp.shared.weight": np.zeros((0, 4), np.float32)}, path)
    with open_weights(folder) as file:
        check(resolve(folder).spec, file)
    save_file(tensors | {"model.layers.0.mlp.shared.weight": np.zeros((1, 4), np.float32)}, path)
    with open_weights(folder) as file, pytest.raises(UsageError, match="unused"):
        check(resolve(folder).spec, file)


def test_least_and_greatest_in_formulas():
    """ERNIE 4.5: the last layer with experts may be stated beyond the last layer."""
    numbers = {"n": 4, "last": 27}
    assert evaluate("max(0, n - 1 - last)", "here", numbers.get) == 0
    assert evaluate("min(n, last)", "here", numbers.get) == 4
    assert evaluate("max(n, missing)", "here", numbers.get) is None
    with pytest.raises(UsageError, match="not a formula"):
        evaluate("max(n)", "here", numbers.get)

"""Features unique to gpt-oss; test_families.py compares its logits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow
import nbflow_kernels as nk
from nbflow.calibration.collect import collect_stats
from nbflow.checkpoint import open_weights
from nbflow.distributed.plan import make_plan
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.executor.expert_bias import expert_biases
from nbflow.planner import planned_model
from nbflow.program import build, partition
from nbflow.spec import resolve
from nbflow_kernels.activation import reference as activation_reference
from nbflow_kernels.errors import UsageError
from nbflow_kernels.moe import reference as moe_reference

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
PUBLISHED = FAMILIES / "gpt_oss"
FLOATS = FAMILIES / "gpt_oss_floats"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj_blocks"
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_mxfp4_of_two_tensors_is_read_without_rounding():
    with open_weights(PUBLISHED) as weights, open_weights(PUBLISHED / "model.safetensors") as same:
        assert weights.dtype(GATE_UP) == same.dtype(GATE_UP) == "mxfp4"
        assert weights.shape(GATE_UP) == (5, 128, 32)
        scales = weights.entry(GATE_UP).scaled.scales.name
        assert scales == GATE_UP.replace("_blocks", "_scales")
        assert scales in weights.scales()
        assert scales not in weights.names()
        assert weights.n_bytes(GATE_UP) == 5 * 128 * 17
        entry = weights.entry(GATE_UP).scaled.codes
        n_bytes = entry.shape[0] * entry.shape[1]
        codes = np.fromfile(entry.file.path, np.uint8, n_bytes, offset=entry.offset)
        exponents = weights.array(scales).reshape(5, 128, 1).astype(np.int32)
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(5, 128, 32)
        values = np.where(pairs < 8, 1, -1) * E2M1[pairs & 7] * 2.0 ** (exponents - 127)
        np.testing.assert_array_equal(weights.array(GATE_UP), values)
        for rows, columns in (((130, 260), None), ((7, 9), (0, 32)), (None, (3, 21))):
            cut = slice(*(rows or (None,))), slice(*(columns or (None,)))
            found = weights.array(GATE_UP, rows, columns, flat=True)
            np.testing.assert_array_equal(found, values.reshape(-1, 32)[cut])
        some = weights.quantized(GATE_UP, (1, 3))
        assert some.shape == (2, 128, 32)
        assert some.tobytes() == weights.quantized(GATE_UP, (128, 384), flat=True).tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "higgs"}}, "quant_method = 'higgs'"),
    ],
)
def test_other_computations_are_refused(change: dict[str, Any], message: str, tmp_path: Path):
    config = json.loads((PUBLISHED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UsageError, match=message):
        planned_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"biases": frozenset({"moe.gate", "moe.up"})}, "all or none must have biases"),
        ({"activation": "swigluoai", "gated": False, "moe": None}, "needs gated = true"),
    ],
)
def test_specifications_that_cannot_be(change, message):
    with pytest.raises(UsageError, match=message):
        replace(resolve(PUBLISHED).spec, **change)


def test_one_bias_of_the_router():
    spec = resolve(PUBLISHED).spec
    with pytest.raises(UsageError, match="not both"):
        replace(spec, moe=replace(spec.moe, router_bias=True))


@pytest.mark.parametrize("folder", [PUBLISHED, FLOATS])
def test_ranks_hold_their_own_sinks_and_biases(folder):
    spec = resolve(folder).spec
    plan = make_plan(spec, "0&1", 1)
    with open_weights(folder) as file:
        held = [
            WeightLoader(program, file, None)
            for program in (build(spec), *(partition(build(spec), rank) for rank in plan.ranks))
        ]
        both = file.array("model.layers.0.mlp.experts.gate_up_proj_bias").astype(np.float32)
    whole, *parts = (_sinks_and_biases(weights, spec) for weights in held)
    for found, mine in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(found, np.concatenate(mine))
    np.testing.assert_array_equal(whole[1], both[:, 0::2])
    np.testing.assert_array_equal(whole[2], both[:, 1::2])


def _sinks_and_biases(weights, spec):
    """Return the sinks of the first layer, and the biases of gates, ups and downs."""
    ops = weights._program.ops
    sinks = next(i for i, op in enumerate(ops) if op.kind == "attention")
    experts = next(i for i, op in enumerate(ops) if op.kind == "experts")
    bias = expert_biases(ops[experts], spec, weights.bias[experts])
    assert bias.choice is None
    return weights.bias[sinks], bias.gate, bias.up, bias.down


def test_writing_keeps_mxfp4_or_converts_it(tmp_path):
    ids = np.arange(4, 20)
    kept, converted = tmp_path / "kept", tmp_path / "q8"
    nbflow.quantize_checkpoint(PUBLISHED, kept, "f32", rules=["*experts*=mxfp4"])
    nbflow.quantize_checkpoint(PUBLISHED, converted, "f32", rules=["*experts*=q8_0"])
    for folder in (kept, converted):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    with open_weights(PUBLISHED) as old, open_weights(kept) as new:
        assert new.quantized(GATE_UP).tobytes() == old.quantized(GATE_UP).tobytes()
        assert new.scales() == []
    logits = []
    for folder in (PUBLISHED, kept, converted):
        with nbflow.load(folder, threads=1) as model:
            logits.append(model.logits(ids))
    np.testing.assert_array_equal(logits[0], logits[1])
    # q8_0 rounds to 1/254 of a block's largest weight: some 0.5 % of a product, in three layers
    assert 0 < np.abs(logits[2] - logits[0]).max() < 0.03 * np.abs(logits[0]).max()


def test_what_experts_read_is_summed_with_their_biases():
    ids = np.arange(3, 15)
    with nbflow.load(FLOATS, kv="f32", threads=1) as model:
        found = {name: inputs for inputs in collect_stats(model, [ids]) for name in inputs.names}
    names = [f"layers.0.moe.{j}.down.weight" for j in range(5)]
    assert sum(found[name].n_rows for name in names) == 2 * len(ids)  # experts of a token
    for name in names:
        assert found[name].n_rows == found[name.replace("down", "up")].n_rows
    spec = resolve(FLOATS).spec
    traced = []
    with open_weights(FLOATS) as file:
        program = build(spec)
        weights = WeightLoader(program, file, None)
        index = next(i for i, op in enumerate(program.ops) if op.kind == "experts")
        executor = ReferenceExecutor(program, weights, trace=lambda op, x: traced.append(x))
        executor.logits(ids)
    x, router = traced[index - 2], traced[index - 1]
    _, chosen = moe_reference.moe_routing(router, **spec.moe.routing)
    bias = expert_biases(program.ops[index], spec, weights.bias[index])
    j = int(chosen[0, 0])
    gate, up = (_array(weights.operands[index][i * 5 + j]) for i in range(2))
    rows = x[(chosen == j).any(axis=1)]
    both = np.concatenate([rows @ gate.T + bias.gate[j], rows @ up.T + bias.up[j]], axis=1)
    hidden = activation_reference.swigluoai_and_mul(both, interleaved=False)
    # float32 against float64: a dozen roundings of 6e-8 on the way
    np.testing.assert_allclose(found[names[j]].sums, np.square(hidden).sum(axis=0), rtol=1e-5)


def _array(matrix: Any) -> np.ndarray:
    return nk.dequantize(matrix).astype(np.float64)


@pytest.mark.parametrize("quantizer", ["awq", "hadamard"])
def test_quantizers_that_fold_refuse_biases_of_experts(quantizer, tmp_path):
    importance = {"layers.0.attn.q.weight": np.ones(36, np.float32)}
    options = {"quantizer": quantizer, "importance": importance}
    with pytest.raises(UsageError, match="biases"):
        nbflow.quantize_checkpoint(FLOATS, tmp_path / "x", "q4", **options)


def test_plans_from_the_description_alone(tmp_path):
    model = planned_model("gpt_oss_20b")
    assert model.format_of("layers.0.moe.3.up.weight") == "mxfp4"
    assert model.format_of("layers.0.attn.q.weight") == "f16"
    assert model.format_of("layers.0.moe.up.bias") == "f32"
    shutil.copy(PUBLISHED / "config.json", tmp_path)
    assert planned_model(tmp_path).spec.n_parameters == resolve(PUBLISHED).spec.n_parameters

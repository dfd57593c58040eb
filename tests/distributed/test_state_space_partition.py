"""Mamba-2 on several ranks: groups of heads, parts of groups, and the norm over all heads."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.distributed import make_plan
from nbflow.planner.memory_plan import plan_memory
from nbflow.program import build, fuse, partition
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
TOLERANCE = 2e-6
"""See tests/models/test_families.py."""


def spec_with(tmp_path, name, **changes):
    lines = "\n".join(f"{key} = {value!r}" for key, value in changes.items())
    path = tmp_path / "own.toml"
    path.write_text(f'family = "{resolve(FOLDER / name).spec.family}"\n[override]\n{lines}\n')
    return path


def relative(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("name", ["granite4", "bamba", "falcon_h1", "falcon_h1_norm"])
def test_more_ranks_than_groups(name):
    """Two groups of two heads on four ranks, which share vectors and norms in pairs."""
    with np.load(FOLDER / name / "golden.npz") as file:
        ids, logits = file["ids"], file["logits"]
    with nbflow.load(FOLDER / name, kv="f32", partition="0&1&2&3", threads=1) as model:
        assert relative(model.logits(ids), logits) < TOLERANCE


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("0:3&1", {}),
        ("0&1;2&3", {}),
        ("0&1", {"ssm_norm": "before_gate"}),
        ("0&1", {"ssm_norm": "before_gate", "ssm_norm_groups": 4}),
    ],
    ids=str,
)
def test_one_group_gives_the_logits_of_one_rank(tmp_path, text, changes):
    options = {"kv": "f32", "threads": 1, "spec": spec_with(tmp_path, "granite4_dense", **changes)}
    ids, found = np.load(FOLDER / "granite4_dense" / "golden.npz")["ids"], []
    for partition_text in ("0", text):
        with nbflow.load(FOLDER / "granite4_dense", partition=partition_text, **options) as model:
            found.append(model.logits(ids))
    assert relative(found[1], found[0]) < TOLERANCE


@pytest.mark.parametrize("state", ["f32", "bf16", "q8_0"])
def test_bytes_are_those_of_the_plan(state):
    """A block of q8_0 lies in a row of a head's state, so that ranks round as one does."""
    folder, logits = FOLDER / "granite4_dense", []
    ids = np.load(folder / "golden.npz")["ids"]
    for text in ("0", "0&1"):
        options = {"partition": text, "state": state, "max_step_tokens": 64}
        limits = {"max_sequences": 3, "prefix_states": 2}
        plan = plan_memory(folder, **limits, **options)
        with nbflow.load(folder, threads=1, **options) as model:
            kv_bytes = max(rank.kv_bytes for rank in plan.ranks)
            with nbflow.LLMEngine(model, kv_bytes=kv_bytes, **limits) as engine:
                engine.submit(model.make_request([1, 2, 3], 2)).result(300)
                taken = model.memory()
            logits.append(model.logits(ids))
        for found, planned in zip(taken, plan.ranks, strict=True):
            for key in ("weight_bytes", "kv_bytes", "workspace_bytes"):
                assert found[key] == getattr(planned, key), key
    # Another order of sums changes a rounding of the state here and there.
    assert relative(logits[1], logits[0]) < {"f32": 2e-6, "bf16": 1e-2, "q8_0": 2e-2}[state]


def test_only_vectors_of_a_group_are_held_twice():
    spec = resolve(FOLDER / "granite4_dense").spec
    ranks = make_plan(spec, "0&1").ranks
    assert [rank.ssm_heads for rank in ranks] == [(0, 4), (4, 8)]
    held: dict[str, int] = {}
    for rank in ranks:
        ops = fuse(partition(build(spec), rank)).ops
        assert sum(op.kind == "sum_squares" for op in ops) == 2  # a norm of each recurrent layer
        for operand in (w for op in ops for w in op.weights if ".ssm." in w.name):
            size = math.prod(operand.shape(spec.shape_of(operand.name)))
            held[operand.name] = held.get(operand.name, 0) + size
    for name, size in held.items():
        of_group = name.split(".ssm.")[1].split(".")[0] in ("b", "c", "b_conv", "c_conv")
        assert size == math.prod(spec.shape_of(name)) * (2 if of_group else 1), name


@pytest.mark.parametrize(("text", "block"), [("0&1&2", 1), ("0&1", 64)])
def test_groups_that_cannot_be_dealt_out(text, block):
    with pytest.raises(UsageError, match=r"4 heads in 2 groups.*use fewer ranks per stage"):
        make_plan(resolve(FOLDER / "mamba2").spec, text, block)

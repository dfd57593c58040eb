"""Partition plans: every tensor is held once; only key/value heads are replicated."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math

import pytest
from small_models import make_spec

from nbflow.distributed import make_plan, parse_partition, ranks_of, split_replicas
from nbflow.distributed.plan import split_by_shares
from nbflow.planner import PlannedModel, planned_model
from nbflow.program import build, fuse, partition
from nbflow.spec.model_file import known_models
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError

PARTITIONS = (
    "0", "0;1", "0;1;2", "0&1", "0&1&2&3", "0&1;2&3", "2&0;1&3", "3;1&2;0", "0:3;1", "0;1:2&2:2",
)  # fmt: skip


@pytest.mark.parametrize("text", PARTITIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (6, 3), (8, 1), (12, 4)])
@pytest.mark.parametrize("block", [1, 32])
def test_every_matrix_element_is_held_exactly_once(text, heads, kv_heads, block):
    spec = make_spec(
        n_layers=5, n_heads=heads, n_kv_heads=kv_heads, head_dim=32, intermediate_size=288
    )
    plan = make_plan(spec, text, block)
    shapes = spec.tensor_shapes()
    replicated = ("attn.k", "attn.v", "norm")
    count = {name: 0 for name in shapes}
    for rank in plan.ranks:
        for op in fuse(partition(build(spec), rank)).ops:
            for operand in op.weights:
                part = operand.shape(shapes[operand.name])
                size = part[0] * (part[1] if len(part) > 1 else 1)
                count[operand.name] += size
                if operand.columns is not None:
                    assert operand.columns[0] % block == 0
    for name, shape in shapes.items():
        full = shape[0] * (shape[1] if len(shape) > 1 else 1)
        if any(word in name for word in replicated):
            assert count[name] >= full, name
        else:
            assert count[name] == full, name


def test_layers_are_dealt_out_unevenly():
    plan = make_plan(make_spec(n_layers=5), "0;1;2")
    assert [r.layers for r in plan.ranks] == [(0, 2), (2, 4), (4, 5)]


def test_key_value_heads_are_shared_when_fewer_than_ranks():
    plan = make_plan(make_spec(n_heads=8, n_kv_heads=2), "0&1&2&3")
    assert [r.kv_heads for r in plan.ranks] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [r.heads for r in plan.ranks] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_every_receiver_has_one_sender():
    plan = make_plan(make_spec(n_layers=3), "0;1&2;3")
    sends = {(r.rank, to) for r in plan.ranks for to in r.sends_to}
    receives = {(r.receives_from, r.rank) for r in plan.ranks if r.receives_from is not None}
    assert sends == receives == {(0, 1), (0, 2), (1, 3)}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "0;",
            "a",
            "0&&1",
            "0;1;0",
            "-1",
            "0 1",
            "0 1x",
            "0;1 2",
            "\u0661",
            "0/",
            "0:",
            "0:0;1",
        ),
        *("0/1;0", "0&1|2&3", "9" * 5000, "0:" + "9" * 400),
    ],
)
def test_bad_partition_strings(text):
    with pytest.raises(UsageError, match="partition"):
        ranks_of(text)


def test_shares_are_written_as_they_are_read():
    text = "0:0.000001;1:12345678.25;2:30;3"
    assert split_replicas(text) == (text,)


def test_replicas_are_partitions_of_their_own():
    assert split_replicas("0&1 / 2:2&3") == ("0&1", "2:2&3")
    assert ranks_of("0&1/2;3") == (0, 1, 2, 3)
    with pytest.raises(UsageError, match="2 replicas"):
        parse_partition("0/1")


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (8, [3, 1], [6, 2]),
        (5, [100, 1, 1], [3, 1, 1]),
        (2, [1, 5, 1], [0, 2, 0]),
        (7, [0.5, 0.25], [5, 2]),
    ],
)
def test_shares_are_kept_as_well_as_whole_numbers_can(total, shares, sizes):
    cuts = split_by_shares(total, shares)
    assert [b - a for a, b in cuts] == sizes
    assert cuts[0][0] == 0
    assert cuts[-1][1] == total


def test_uneven_shares_cut_layers_and_tensors():
    spec = make_spec(n_layers=8, n_heads=8, n_kv_heads=4, intermediate_size=192, vocab_size=100)
    by_layer = make_plan(spec, "0:3;1")
    assert [r.layers for r in by_layer.ranks] == [(0, 6), (6, 8)]
    by_tensor = make_plan(spec, "0:3&1")
    assert [r.heads for r in by_tensor.ranks] == [(0, 6), (6, 8)]
    assert [r.kv_heads for r in by_tensor.ranks] == [(0, 3), (3, 4)]
    assert [r.ffn for r in by_tensor.ranks] == [(0, 144), (144, 192)]
    assert by_tensor.ranks[0].vocab_widths == (75, 25)
    assert make_plan(spec, by_tensor.partition) == by_tensor
    assert [r.layers for r in make_plan(spec, "0;1&2").ranks] == [(0, 3), (3, 8), (3, 8)]


def test_inferflow_separators_are_understood():
    assert parse_partition("0|1, 2|3") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("0;1;2", {"n_layers": 2}, "only 2 layers"),
        ("0&1&2", {"n_heads": 2, "n_kv_heads": 2}, "use fewer ranks per stage"),
        ("0&1", {"intermediate_size": 32}, "too few for 2 ranks"),
        ("0:2&1&2", {"n_heads": 8, "n_kv_heads": 2}, "equal shares only"),
    ],
)
def test_partitions_that_do_not_fit(text, changes, words):
    with pytest.raises(UsageError, match=words):
        make_plan(make_spec(**changes), text, block_size=32)


def test_tensor_parallel_program_has_two_all_reduces_per_layer():
    spec = make_spec(n_layers=3)
    for rank in make_plan(spec, "0&1").ranks:
        kinds = [op.kind for op in fuse(partition(build(spec), rank)).ops]
        assert kinds.count("all_reduce") == 2 * spec.n_layers + 1  # one for the embedding
        assert kinds.count("all_gather") == 1


def test_fusing_leaves_ten_ops_per_layer():
    spec = make_spec(n_layers=3)
    ops = fuse(build(spec)).ops
    per_layer = [len(list(group)) for _, group in itertools.groupby(op.layer for op in ops)]
    assert per_layer == [1, 10, 10, 10, 3]


def test_program_prints_one_line_per_op():
    program = fuse(partition(build(make_spec()), make_plan(make_spec(), "0&1").ranks[0]))
    assert len(str(program).splitlines()) == len(program.ops) + 1


@functools.cache
def packaged() -> list[ModelSpec]:
    """Return the specifications of packaged models and encoders that need no checkpoint."""
    specs = []
    for name in sorted(known_models()):
        with contextlib.suppress(UsageError):
            specs.append(planned_model(name).spec)
    return [part for spec in specs for part in (spec, spec.encoder) if part is not None]


@pytest.mark.parametrize(
    ("text", "most_refused"),
    [("0:3;1", 0), ("0&1;2&3", 0), ("0&1&2&3", 0.2), ("0:3&1", 0.5)],
)
def test_packaged_models_are_cut_or_refused_with_the_reason(text, most_refused):
    """A stage holds each matrix once, split or replicated on every rank."""
    refused = 0
    for spec in packaged():
        model = PlannedModel(spec)
        try:
            plan = make_plan(spec, text, block_size=32)
        except UsageError:
            refused += 1
            continue
        for group in {rank.group for rank in plan.ranks}:
            held = collections.Counter()
            for number in group:
                rank = dataclasses.replace(plan.of(number), layers=(0, spec.n_layers))
                for op in partition(model.program, rank).ops:
                    for operand in op.weights:
                        size = math.prod(operand.shape(spec.shape_of(operand.name)))
                        held[operand.name] += size if op.layer is not None else 0
            for name, n in held.items():
                whole = math.prod(spec.shape_of(name))
                shared = "attn.k." in name or "attn.v." in name or len(spec.shape_of(name)) == 1
                if n:
                    assert n in (whole, whole * len(group)) or (shared and n > whole), (
                        spec.name,
                        name,
                    )
    assert len(packaged()) > 30
    assert refused <= most_refused * len(packaged()), f"{refused} of {len(packaged())}"

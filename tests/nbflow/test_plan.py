"""The partition is a pure function: all is held, and nothing twice but shared KV heads."""

from __future__ import annotations

import itertools

import pytest
from specs import make_spec

from nbflow.parallel import make_plan, parse_partition
from nbflow.program import build, fuse, partition
from nbflow_kernels.errors import UsageError

PARTITIONS = ("0", "0;1", "0;1;2", "0&1", "0&1&2&3", "0&1;2&3", "2&0;1&3", "3;1&2;0")


@pytest.mark.parametrize("text", PARTITIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (6, 3), (8, 1), (12, 4)])
@pytest.mark.parametrize("block", [1, 32])
def test_every_matrix_element_is_held_exactly_once(text, heads, kv_heads, block):
    spec = make_spec(
        n_layers=5, n_heads=heads, n_kv_heads=kv_heads, head_dim=32, intermediate_size=288
    )
    plan = make_plan(spec, text, block)
    shapes = spec.tensor_shapes()
    replicated = ("attn.k", "attn.v", "norm", "embed")
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


@pytest.mark.parametrize("text", ["", "0;", "a", "0&&1", "0;1;0", "-1", "0 1x"])
def test_bad_partition_strings(text):
    with pytest.raises(UsageError, match="partition"):
        parse_partition(text)


def test_inferflow_separators_are_understood():
    assert parse_partition("0|1, 2|3") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("0;1;2", {"n_layers": 2}, "only 2 layers"),
        ("0&1&2", {"n_heads": 2, "n_kv_heads": 2}, "use fewer ranks per stage"),
        ("0&1", {"intermediate_size": 32}, "too few for 2 ranks"),
    ],
)
def test_partitions_that_do_not_fit(text, changes, words):
    with pytest.raises(UsageError, match=words):
        make_plan(make_spec(**changes), text, block_size=32)


def test_tensor_parallel_program_has_two_all_reduces_per_layer():
    spec = make_spec(n_layers=3)
    for rank in make_plan(spec, "0&1").ranks:
        kinds = [op.kind for op in fuse(partition(build(spec), rank)).ops]
        assert kinds.count("all_reduce") == 2 * spec.n_layers
        assert kinds.count("all_gather") == 1


def test_fusing_leaves_ten_ops_per_layer():
    spec = make_spec(n_layers=3)
    ops = fuse(build(spec)).ops
    per_layer = [len(list(group)) for _, group in itertools.groupby(op.layer for op in ops)]
    assert per_layer == [1, 10, 10, 10, 3]


def test_program_prints_one_line_per_op():
    program = fuse(partition(build(make_spec()), make_plan(make_spec(), "0&1").ranks[0]))
    assert len(str(program).splitlines()) == len(program.ops) + 1

"""Replicas, quantized all-reduces and automatic partitions, on thread ranks."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.distributed.cpu_threads import shared_cores
from nbflow_kernels.errors import UsageError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=3, n_heads=8, n_kv_heads=4, intermediate_size=320, tied_head=True)
    return folder


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(3).integers(0, 101, 50)


@pytest.mark.parametrize("partition", ["0:3&1", "0&1;2:2&3", "0&1&2&3"])
def test_a_tied_head_is_split_with_the_embedding(checkpoint, ids, partition):
    with nbflow.load(checkpoint, kv="f32") as model:
        expected, table = model.logits(ids), model.spec.vocab_size * model.spec.hidden_size * 4
    with nbflow.load(checkpoint, kv="f32", partition=partition, threads=1) as model:
        # float32 sums in another order: about sqrt(320) * 2**-24 for each of 3 layers
        assert np.abs(model.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()
        for rank, engine in zip(model.plan.ranks, model.workers, strict=True):
            operands = zip(engine.program.ops, engine.weights.operands, strict=True)
            tables = [w for op, ws in operands if op.kind == "embedding" for w in ws]
            width = rank.vocab_widths[rank.index]
            assert [w.nbytes for w in tables] == ([width * 64 * 4] if rank.first else [])
            assert width * 64 * 4 < table


def test_replicas_share_a_batch_out(checkpoint, ids):
    prompts = [ids[:n].tolist() for n in (4, 1, 30, 7, 12)]
    with nbflow.load(checkpoint) as model:
        expected = [r.ids for r in model.generate_batch(prompts, max_tokens=6, ignore_eos=True)]
        logits = model.logits(ids)
    with nbflow.load(checkpoint, partition="0/1/2;3", threads=1) as model:
        results = model.generate_batch(prompts, max_tokens=6, ignore_eos=True)
        assert [r.ids for r in results] == expected
        np.testing.assert_array_equal(model.logits(ids), logits)
        one = model.generate(prompts[0], max_tokens=6, ignore_eos=True)
        assert one.ids == expected[0]
        assert list(model.stream(prompts[0], max_tokens=6, ignore_eos=True)) == expected[0]
        assert [m["rank"] for m in model.memory()] == [0, 1, 2, 3]
        with nbflow.LLMEngine(model) as engine:  # submitted requests, too
            handles = [engine.submit(model.make_request(p, 6, ignore_eos=True)) for p in prompts]
            assert [handle.result(60).ids for handle in handles] == expected
            assert sorted(sum(n.finished.values()) for n in engine.replica_stats()) == [1, 2, 2]


def test_quantized_all_reduce_sends_less_and_reports_its_error(checkpoint, ids):
    with nbflow.load(checkpoint, kv="f32") as model:
        expected = model.logits(ids)
    sent, errors = {}, {}
    for all_reduce in ("f32", "q8"):
        with nbflow.load(
            checkpoint, kv="f32", partition="0&1", threads=1, all_reduce=all_reduce
        ) as model:
            model.reset_traffic()
            logits = model.logits(ids)
            traffic = model.traffic()
            assert traffic["measured_bytes"] == traffic["predicted_bytes"]
            sent[all_reduce] = traffic["measured_bytes"]
            errors[all_reduce] = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
            # uniform within steps of 1/127 of the largest of 32: see test_collectives
            assert model.all_reduce_error() == 0 or 0.003 < model.all_reduce_error() < 0.008
            assert (model.all_reduce_error() > 0) == (all_reduce == "q8")
    assert sent["q8"] < sent["f32"]
    assert errors["f32"] < 1e-5
    # each of 6 sums has an error of about 0.6 %, the residual stream has none
    assert 1e-4 < errors["q8"] < 0.03
    with pytest.raises(UsageError, match="unknown all_reduce 'q7'"):
        nbflow.load(checkpoint, partition="0&1", all_reduce="q7")


def test_without_mpirun_the_planner_takes_one_rank(checkpoint):
    with nbflow.load(checkpoint, partition="auto") as model:
        assert model.plan.partition == "0"
    with pytest.raises(UsageError, match="unknown optimize 'speed'"):
        nbflow.load(checkpoint, partition="auto", optimize="speed")


@pytest.mark.parametrize(
    ("mine", "others", "threads"),
    [
        (range(4), [range(4)] * 2, 2),
        (range(2), [range(2), range(2, 4)], 2),
        (range(3), [range(3)] * 2, 1),
        (range(8), [range(8), range(4)], 6),
        (range(1), [range(1)] * 5, 1),
    ],
)
def test_cores_are_shared_out(mine, others, threads):
    ranks = [("host", frozenset(cores)) for cores in others] + [("elsewhere", frozenset(range(8)))]
    assert shared_cores(("host", frozenset(mine)), ranks) == threads

"""Replica router: replicas as threads, and as processes of mpirun."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from mpirun import MPIRUN, mpirun

import nbflow
from nbflow.engine.errors import EngineClosed, QueueFull
from nbflow.engine.replicas.router import MAX_AFFINITY_LOAD, ReplicaRouter
from nbflow.engine.search import BeamSearch
from nbflow_kernels.errors import UsageError

PROMPTS = ["def f(", "class A:\n    def", "import os\n", "for i in"]
LONG = list(range(100, 200))  # more than a page
SCRIPT = Path(__file__).parent / "replica_ranks.py"


@pytest.fixture(scope="module")
def model():
    with nbflow.load("tiny_python", partition="0/1", threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone():
    with nbflow.load("tiny_python", threads=1) as one:
        found = one.generate_batch(PROMPTS, 20, "top_p", seed=1, ignore_eos=True)
        beams = nbflow.beam_search(one, PROMPTS[0], 8, n=2)
        yield [g.ids for g in found], [g.ids for g in beams]


def asked(model, prompt, seed=0, n=20, **more):
    return model.make_request(prompt, n, "top_p", seed, True, **more)


def test_requests_are_shared_out(model, alone):
    with nbflow.LLMEngine(model) as engine:
        assert isinstance(engine, ReplicaRouter)
        handles = [engine.submit(asked(model, p, 1 + i)) for i, p in enumerate(PROMPTS)]
        assert [h.result(60).ids for h in handles] == alone[0]
        numbers = engine.replica_stats()
        assert [sum(n.finished.values()) for n in numbers] == [2, 2]
        total = engine.stats()
        assert total.finished == {"length": 4}
        assert total.pages_total == sum(n.pages_total for n in numbers)
        beams = engine.submit(model.make_request(PROMPTS[0], 8, BeamSearch(n=2))).results(60)
        assert [g.ids for g in beams] == alone[1]
        vectors = engine.embed([[1, 2, 3], [4, 5]])
        assert [v.shape for v in vectors] == [(model.spec.hidden_size,)] * 2
    assert engine.state == "closed"
    with pytest.raises(EngineClosed):
        engine.submit(asked(model, "x"))


def test_prompts_that_begin_alike_go_to_one_replica_unless_it_has_more_to_do(model):
    with nbflow.LLMEngine(model) as engine:
        engine.submit(asked(model, LONG, n=1)).result(60)
        again = [engine.submit(asked(model, [*LONG, i], n=1)) for i in range(4)]
        assert all(h.result(60).cached_tokens >= 64 for h in again)
        held = [engine.submit(asked(model, LONG, n=300)) for _ in range(2 * MAX_AFFINITY_LOAD + 4)]
        loads = [member.load for member in engine._engines]
        assert min(loads) >= MAX_AFFINITY_LOAD - 1
        for handle in held:
            handle.cancel()
        engine.flush()


def test_full_queues(model):
    with nbflow.LLMEngine(model, max_sequences=1, max_waiting=2) as engine:
        handles = []

        def submit_many():
            for _ in range(40):
                handles.append(engine.submit(asked(model, "x", n=400)))

        with pytest.raises(QueueFull, match="2 requests wait"):
            submit_many()
        assert len(handles) >= 4  # two wait for each
        for handle in handles:
            handle.cancel()


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_when_a_replica_fails(policy):
    with (
        nbflow.load("tiny_python", partition="0&1/2", threads=1) as model,
        nbflow.LLMEngine(model, on_failure=policy) as engine,
    ):
        broken = engine._own[0].model.workers[1]

        def planted(*_):
            raise RuntimeError("planted")

        broken.run_step = planted  # a rank among several: its engine cannot go on
        handles = [engine.submit(asked(model, "x", n=200)) for _ in range(4)]
        ends = [list(h)[-1] for h in handles]
        assert sorted(e.finish_reason for e in ends) == ["error", "error", "length", "length"]
        while engine._own[0].alive:
            time.sleep(0.01)
        assert engine.alive == (policy == "continue")
        assert "planted" in str(engine.failure)
        if policy == "stop":
            with pytest.raises(EngineClosed, match="planted"):
                engine.submit(asked(model, "x"))
            return
        again = [engine.submit(asked(model, "x", n=4)) for _ in range(3)]
        assert all(len(h.result(60).ids) == 4 for h in again)
        assert engine.replica_stats()[0] is None
        assert engine.stats().finished["length"] == 5


def test_wrong_use(model):
    with pytest.raises(UsageError, match="unknown on_failure"):
        nbflow.LLMEngine(model, on_failure="panic")
    with nbflow.LLMEngine(model) as engine:
        with pytest.raises(UsageError, match="several replicas"):
            engine.call("memory")
        with pytest.raises(UsageError, match="started once"):
            engine.start()
        with pytest.raises(UsageError, match="an engine runs"):
            model.generate("x", 1)


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_processes(alone, tmp_path):
    out = tmp_path / "told.json"
    done = mpirun(2, str(SCRIPT), "serve", str(out))
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert told["ids"] == alone[0]
    assert told["beams"] == alone[1]
    assert told["each"] == [2, 2]
    assert told["cached"] >= 64
    assert told["cancelled"] == ["abort", "abort"]
    assert told["logprobs"] == [3, len(LONG) - 1]
    # of 20: the first comes from the prompt, the last after the proposed ones; each process has
    # a draft of its own, which is the model itself
    assert told["accepted"] == [18, 18]
    assert told["embedded"] == 2
    assert told["state"] == "closed"


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_a_process_whose_engine_fails(alone, tmp_path):
    out = tmp_path / "told.json"
    done = mpirun(2, str(SCRIPT), "fail", str(out))
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert told["ends"] == ["error", "length"]
    assert "RuntimeError: planted" in told["why"]
    assert told["again"] == alone[0][0]
    assert told["alive"] is True
    assert told["state"] == "closed"

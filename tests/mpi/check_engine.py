"""Run under mpirun by test_engine_mpi.py: an engine whose ranks are MPI processes.

mpirun -n N python -m mpi4py check_engine.py FOLDER PARTITION...
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest

import nbflow
from nbflow.distributed import SelfComm, world
from nbflow.engine.search import BeamSearch
from nbflow.sampling import Greedy, Strategy
from nbflow.sampling.strategy import CompiledState
from nbflow_kernels.errors import UsageError

IDS = (np.arange(300) * 7 % 101).tolist()
PROMPTS = [IDS[i : i + 5 + 31 * i] for i in range(6)]


def main() -> None:
    folder, *partitions = sys.argv[1:]
    comm = world()
    with nbflow.load(folder, comm=SelfComm(), kv="f32") as model:
        expected = [model.generate(p, 12, ignore_eos=True).ids for p in PROMPTS]
    for partition in partitions:
        with nbflow.load(folder, partition=partition, kv="f32") as model:
            if model.participates:
                page = max(r["page_bytes"] for r in model.gather("page_memory"))
                engine = nbflow.LLMEngine(model, max_sequences=3, kv_bytes=6 * page)
                if engine.leads:
                    lead(engine, model, expected)
                else:
                    engine.follow()
                assert model.workers[0].table.n_used_pages == 0
                assert len(model.generate(PROMPTS[0], 3, ignore_eos=True).ids) == 3
        comm.barrier()
    if comm.rank == 0:
        print("the engine agrees")


@dataclass(frozen=True)
class Failing(Strategy):
    """Raise on the sampling rank after some tokens."""

    compiled = False

    def begin(self, prompt_ids, seed):
        return FailingState(Greedy(), seed)


class FailingState(CompiledState):
    def choose(self, logits):
        if self._n == 3:
            raise UsageError("planted where tokens are drawn")
        return super().choose(logits)


def check_wrong_requests(engine, model, expected) -> None:
    """Requests fail alone while another one runs, and the ranks continue."""
    other = engine.submit(model.make_request(PROMPTS[4], 12, "greedy", 0, True))
    wide = model.make_request(PROMPTS[0], 12, BeamSearch(4))
    drawn = model.make_request(PROMPTS[0], 12, Failing(), 0, True)
    sent = model.make_request(PROMPTS[0], 12, "greedy", 0, True, draft=lambda ids, n: [])
    for request, words in (
        (wide, "at most 3"),
        (drawn, "planted where"),
        (sent, "cannot send"),
    ):
        with pytest.raises(UsageError, match=words):
            engine.submit(request).result(300)
    with pytest.raises(UsageError, match="at most 3"):  # refused by every rank alike
        engine.call("submit", model.make_request(PROMPTS[0], 12, BeamSearch(4)))
    assert other.result(300).ids == expected[4]


def lead(engine, model, expected) -> None:
    with engine:
        check_wrong_requests(engine, model, expected)
        requests = [model.make_request(p, 12, "greedy", 0, True) for p in PROMPTS]
        cancelled = engine.submit(model.make_request(PROMPTS[5], 60, "greedy", 0, True))
        handles = [engine.submit(r) for r in requests]
        cancelled.cancel()
        assert [h.result(300).ids for h in handles] == expected
        assert cancelled.result(300).finish_reason in ("abort", "length")
        time.sleep(0.2)  # the others idle
        again = engine.submit(model.make_request(PROMPTS[5], 12, "greedy", 0, True))
        assert again.result(300).ids == expected[5]
        assert again.cached_tokens > 0
        rows = engine.embed([[1, 2, 3]])
        assert rows[0].shape == (model.spec.hidden_size,)
        stats = engine.stats()
        assert stats.pages_used == 0, stats


main()

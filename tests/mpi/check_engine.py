"""Run under mpirun by test_engine_mpi.py: an engine whose ranks are MPI processes.

mpirun -n N python -m mpi4py check_engine.py FOLDER PARTITION...
"""

from __future__ import annotations

import sys
import time

import numpy as np

import nbflow
from nbflow.parallel import Alone, world

IDS = (np.arange(300) * 7 % 101).tolist()
PROMPTS = [IDS[i : i + 5 + 31 * i] for i in range(6)]


def main() -> None:
    folder, *partitions = sys.argv[1:]
    comm = world()
    with nbflow.load(folder, comm=Alone(), kv="f32") as model:
        expected = [model.generate(p, 12, ignore_eos=True).ids for p in PROMPTS]
    for partition in partitions:
        with nbflow.load(folder, partition=partition, kv="f32") as model:
            if model.participates:
                page = max(r["page_bytes"] for r in model.gather("page_memory"))
                engine = nbflow.Engine(model, max_sequences=3, kv_bytes=6 * page)
                if engine.leads:
                    lead(engine, model, expected)
                else:
                    engine.follow()
                assert model.engines[0].table.n_held == 0
                assert len(model.generate(PROMPTS[0], 3, ignore_eos=True).ids) == 3
        comm.barrier()
    if comm.rank == 0:
        print("the engine agrees")


def lead(engine, model, expected) -> None:
    with engine:
        requests = [model.make_request(p, 12, "greedy", 0, True) for p in PROMPTS]
        cancelled = engine.submit(model.make_request(PROMPTS[5], 60, "greedy", 0, True))
        handles = [engine.submit(r) for r in requests]
        cancelled.cancel()
        assert [h.result(300).ids for h in handles] == expected
        assert cancelled.result(300).finish_reason in ("abort", "length")
        time.sleep(0.2)  # the others wait without work
        again = engine.submit(model.make_request(PROMPTS[5], 12, "greedy", 0, True))
        assert again.result(300).ids == expected[5]
        assert again.cached_tokens > 0
        rows = engine.embed([[1, 2, 3]])
        assert rows[0].shape == (model.spec.hidden_size,)
        stats = engine.stats()
        assert stats.pages_used == 0, stats


main()

"""Run under mpirun by test_mpi.py: an engine on ranks, requests that come, end and are cancelled.

mpirun -n 2 python -m mpi4py check_engine.py FOLDER
"""

from __future__ import annotations

import sys

import nbflow
from nbflow.parallel import Alone, world

PROMPTS = [[1, 2, 3], [4, 5], [6] * 20, [7, 8, 9, 10]]


def main() -> None:
    folder = sys.argv[1]
    with nbflow.load(folder, comm=Alone(), kv="f32") as model:
        expected = generated(model)
    for partition in ("0;1", "0&1"):
        with nbflow.load(folder, partition=partition, kv="f32") as model:
            engine = nbflow.Engine(model)
            if engine.leads:
                with engine:
                    serve(model, engine, expected)
            else:
                engine.follow()
            assert generated(model) == expected  # the model is free again
    if world().rank == 0:
        print("the engine agrees")


def generated(model) -> list[list[int]]:
    return [r.ids for r in model.generate_batch(PROMPTS, max_tokens=10, ignore_eos=True)]


def serve(model, engine, expected) -> None:
    for _ in range(2):
        handles = [engine.submit(model.make_request(p, 10, "greedy", 0, True)) for p in PROMPTS]
        other = engine.submit(model.make_request([1, 1], 40, "greedy", 0, True))
        assert handles[1].result(60).ids == expected[1]
        other.cancel()  # perhaps with a step on its way
        assert [h.result(60).ids for h in handles] == expected


main()

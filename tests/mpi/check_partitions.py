"""Run under mpirun by test_mpi.py: partitions against one rank, on real MPI ranks.

mpirun -n N python -m mpi4py check_partitions.py FOLDER PARTITION... [-- FOLDER PARTITION...]...
"""

from __future__ import annotations

import sys
from itertools import groupby

import numpy as np

import nbflow
from nbflow.distributed import SelfComm, world


def main() -> None:
    assert world().size > 1, "mpirun did not start several ranks"
    for is_model, words in groupby(sys.argv[1:], lambda word: word != "--"):
        if is_model:
            folder, *partitions = words
            check_model(folder, partitions)
    if world().rank == 0:
        print("all partitions agree")


def check_model(folder: str, partitions: list[str]) -> None:
    comm, ids = world(), np.random.default_rng(3).integers(0, 101, 40)
    for weights, outliers in ((None, 0.0), ("q4", 0.01)):
        # matrices are cut only where ranks share a layer: pipelines of whole ones run once
        chosen = [p for p in partitions if weights is not None or "&" in p]
        options = {"weights": weights, "outliers": outliers, "kv": "f32"}
        with nbflow.load(folder, comm=SelfComm(), **options) as model:
            expected = model.logits(ids)
            text = model.generate(ids[:9].tolist(), max_tokens=8, ignore_eos=True).ids
            batch = several(model, ids)
        for partition in chosen:
            with nbflow.load(folder, partition=partition, **options) as model:
                assert model.participates == (comm.rank in model.plan.numbers)
                if model.participates:
                    check(model, ids, expected, text, batch)
            comm.barrier()


def several(model, ids) -> list[list[int]]:
    prompts = [ids[:n].tolist() for n in (1, 17, 5, 30)]
    return [r.ids for r in model.generate_batch(prompts, max_tokens=6, ignore_eos=True)]


def check(model, ids, expected, text, batch) -> None:
    error = np.abs(model.logits(ids) - expected).max() / np.abs(expected).max()
    assert error < 1e-5, f"{model.plan.partition}: relative error {error}"
    model.reset_traffic()
    assert model.generate(ids[:9].tolist(), max_tokens=8, ignore_eos=True).ids == text
    assert several(model, ids) == batch
    traffic = model.traffic()
    assert traffic["measured_bytes"] == traffic["predicted_bytes"], traffic
    talks = "&" in model.plan.partition or ";" in model.plan.partition
    assert (traffic["measured_bytes"] > 0) == talks, traffic
    assert [m["rank"] for m in model.memory()] == list(model.plan.numbers)


main()

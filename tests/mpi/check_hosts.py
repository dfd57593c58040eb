"""Run on ranks of several hosts by test_hosts.py: partitions against one rank.

python -m mpi4py check_hosts.py FOLDER PARTITION...
"""

from __future__ import annotations

import platform
import sys

import numpy as np

import nbflow
from nbflow.distributed import SelfComm, world


def main() -> None:
    folder, *partitions = sys.argv[1:]
    comm = world()
    names = comm.bcast_object(comm.gather_object(platform.node()))
    assert len(set(names)) > 1, f"all ranks are on {names[0]}"
    assert comm.hosts() == [names.index(name) for name in names]
    ids = np.random.default_rng(3).integers(0, 101, 40)
    with nbflow.load(folder, comm=SelfComm(), kv="f32", threads=1) as model:
        expected = model.logits(ids)
    for partition in partitions:
        with nbflow.load(folder, partition=partition, kv="f32", threads=1) as model:
            model.reset_traffic()
            error = np.abs(model.logits(ids) - expected).max() / np.abs(expected).max()
            assert error < 1e-5, f"{partition}: relative error {error}"  # sums in another order
            traffic = model.traffic()
            assert traffic["measured_bytes"] == traffic["predicted_bytes"] > 0, traffic
        comm.barrier()
    if comm.rank == 0:
        print(f"all partitions agree on {', '.join(names)}")


main()

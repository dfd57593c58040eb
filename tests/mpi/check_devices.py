"""Run on MPI ranks by test_devices.py: devices of ranks, of which some hosts have none.

python -m mpi4py check_devices.py FOLDER

Rank 0 stands for a host on which nothing may look for a device; the others have the emulator.
"""

from __future__ import annotations

import sys

import numpy as np

import nbflow
import nbflow_kernels.cuda
import nbflow_ptx.nvrtc
from nbflow.distributed import SelfComm, world


def absent() -> None:
    raise AssertionError("a rank looked for the device of another one")


def main() -> None:
    comm = world()
    hosts = comm.hosts()
    print(f"hosts {hosts}\n" if comm.rank == 0 else "", end="", flush=True)
    if comm.rank == 0:
        nbflow_ptx.nvrtc.available = nbflow_kernels.cuda.detect = absent
    options = {"kv": "f32", "threads": 1, "partition": "0;1"}
    ids = [3, 9]
    with nbflow.load(sys.argv[1], comm=SelfComm(), kv="f32", threads=1) as model:
        expected = model.logits(ids)
    with nbflow.load(sys.argv[1], device="cpu,emulator", **options) as model:
        assert [e.executor.device.name for e in model.workers] == [("cpu", "emulator")[comm.rank]]
        assert np.abs(model.logits(ids) - expected).max() < 4e-6 * np.abs(expected).max()
    try:
        nbflow.load(sys.argv[1], device="cpu,cuda:99", **options)
    except (nbflow.UsageError, nbflow.MissingExtraError) as error:
        text = comm.gather_object(str(error))
        if text:
            print("\n".join(text), flush=True)


main()

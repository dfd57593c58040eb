"""Devices of real MPI ranks, on one host and on what MPI takes for two."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from mpirun import MPIRUN, mpirun

from nbflow_ptx import nvrtc

FOLDER = Path(__file__).parents[1] / "golden" / "families" / "llama31"
TWO_HOSTS = {"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"}
"""MPICH takes ranks of odd and even numbers for those of two hosts."""

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'"),
]


@pytest.mark.parametrize(("environment", "hosts"), [({}, [0, 0, 0]), (TWO_HOSTS, [0, 1, 0])])
def test_ranks_know_those_of_their_host(environment: dict[str, str], hosts: list[int]) -> None:
    code = (
        "from mpi4py import MPI\n"
        "from nbflow.distributed import world\n"
        "if 'MPICH' not in MPI.Get_library_version(): print('not MPICH\\n', end='')\n"
        "found, part = world().hosts(), world().split([2, 0])\n"
        "print(f'{world().rank} {found}\\n', end='', flush=True)\n"
        "assert part is None or part.hosts() == [0, 0]\n"
    )
    done = mpirun(3, "-m", "mpi4py", "-c", code, environment=environment)
    if environment and "not MPICH" in done.stdout:
        pytest.skip("only MPICH can take ranks of one host for those of two")
    lines = [line for line in done.stdout.splitlines() if line != "not MPICH"]
    assert sorted(lines) == [f"{rank} {hosts}" for rank in range(3)], done.stderr


@pytest.mark.compiler
@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None or not nvrtc.available(),
    reason="numba-cuda and NVRTC are missing (extra cuda-test)",
)
def test_each_rank_looks_for_its_own_device() -> None:
    """A rank without a device works next to one with; a missing device is an error of all."""
    script = str(Path(__file__).with_name("check_devices.py"))
    done = mpirun(2, "-m", "mpi4py", script, str(FOLDER), environment=TWO_HOSTS)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts, first, second = done.stdout.splitlines()
    assert hosts in ("hosts [0, 1]", "hosts [0, 0]")  # the latter without MPICH
    assert first.startswith("rank 1 failed while looking for its device: device 'cuda:99': ")
    assert second.startswith("device 'cuda:99': ")

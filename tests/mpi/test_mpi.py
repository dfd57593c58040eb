"""Real MPI ranks: this process starts mpirun and looks at what comes out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from specs import write_llama

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MPIRUN = next((str(p) for p in [BIN / "mpirun"] if p.exists()), shutil.which("mpirun"))

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install 'nbflow[mpi]'"),
]


def mpirun(n: int, *command: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    paths = [
        str(ROOT),
        str(ROOT / "kernels"),
        str(ROOT / "experiments"),
        os.environ.get("PYTHONPATH", ""),
    ]
    return subprocess.run(
        [str(MPIRUN), "-n", str(n), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=3, n_heads=8, n_kv_heads=2, intermediate_size=320)
    return folder


@pytest.mark.parametrize(
    ("n", "partitions"),
    [(2, ["0;1", "0&1", "1&0", "1"]), (4, ["0&1;2&3", "0&1&2&3", "3;1&2", "2;0", "0;1;2"])],
)
def test_partitions_agree_with_one_rank(checkpoint, n, partitions):
    script = Path(__file__).with_name("check_partitions.py")
    done = mpirun(n, "-m", "mpi4py", str(script), str(checkpoint), *partitions)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all partitions agree" in done.stdout


def test_run_prints_once(checkpoint):
    text = mpirun(
        2,
        "-m",
        "nbflow.cli",
        "run",
        "tiny_python",
        "-p",
        "def ",
        "-n",
        "8",
        "--partition",
        "0&1",
        "-q",
    )
    assert text.returncode == 0, text.stderr
    assert text.stdout.count("def ") == 1
    alone = subprocess.run(
        [sys.executable, "-m", "nbflow.cli", "run", "tiny_python", "-p", "def ", "-n", "8", "-q"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )
    assert text.stdout == alone.stdout


def test_a_partition_that_needs_more_ranks(checkpoint):
    done = mpirun(2, "-m", "nbflow.cli", "run", str(checkpoint), "--partition", "0;1;2")
    assert done.returncode == 2
    assert done.stderr.count("names rank 2, but mpirun started 2 ranks") == 1
    assert "Traceback" not in done.stderr


def test_a_rank_that_raises_stops_all(checkpoint):
    code = (
        "import sys; from nbflow import cli\n"
        "from nbflow.commands import run\n"
        "from nbflow.parallel import world\n"
        "def fail(arguments):\n"
        "    if world().rank == 1: raise RuntimeError('planted')\n"
        "    world().barrier()\n"
        "run.run = fail\n"
        "cli.main(['run', 'x'])\n"
    )
    done = mpirun(2, "-c", code, timeout=60)
    assert done.returncode != 0
    assert "planted" in done.stderr
    assert "rank 1 of 2 failed" in done.stderr

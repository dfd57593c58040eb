"""Partitions on real MPI ranks, started with mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import MPIRUN, PYTHONPATH, mpirun
from small_models import write_checkpoint, write_llama

from nbflow.planner import Device, Link, Machine, machine_toml

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=3, n_heads=8, n_kv_heads=2, intermediate_size=320)
    return folder


@pytest.mark.parametrize(
    ("n", "partitions"),
    [
        (2, ["0;1", "0&1", "1&0", "1", "0:2;1"]),
        (4, ["0&1;2&3", "0&1&2&3", "3;1&2", "2;0", "0;1;2"]),
    ],
)
def test_partitions_agree_with_one_rank(checkpoint, n, partitions):
    script = Path(__file__).with_name("check_partitions.py")
    done = mpirun(n, "-m", "mpi4py", str(script), str(checkpoint), *partitions)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all partitions agree" in done.stdout


EXPERTS = {
    "model_type": "qwen2_moe", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_ranks_that_hold_whole_experts_agree_with_one_rank(tmp_path):
    write_checkpoint(tmp_path / "model", EXPERTS)
    script = Path(__file__).with_name("check_partitions.py")
    done = mpirun(2, "-m", "mpi4py", str(script), str(tmp_path / "model"), "0&1", "1&0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all partitions agree" in done.stdout


LONG_ROPE = {
    "model_type": "phi3", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "original_max_position_embeddings": 12,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)],
    },
}  # fmt: skip
"""The script's prompts are within the original context, beyond it, and outgrow it."""


def test_sequences_that_outgrow_the_original_context_do_so_on_every_rank(tmp_path):
    write_checkpoint(tmp_path / "model", LONG_ROPE)
    script = Path(__file__).with_name("check_partitions.py")
    done = mpirun(2, "-m", "mpi4py", str(script), str(tmp_path / "model"), "0&1", "0;1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all partitions agree" in done.stdout


def test_run_prints_once(checkpoint):
    text = mpirun(
        2,
        "-m",
        "nbflow",
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
        [sys.executable, "-m", "nbflow", "run", "tiny_python", "-p", "def ", "-n", "8", "-q"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert text.stdout == alone.stdout


def test_a_partition_that_needs_more_ranks(checkpoint):
    done = mpirun(2, "-m", "nbflow", "run", str(checkpoint), "--partition", "0;1;2")
    assert done.returncode == 2
    assert done.stderr.count("names rank 2, but mpirun started 2 ranks") == 1
    assert "Traceback" not in done.stderr


def test_the_planner_chooses_a_partition_that_runs(tmp_path):
    """By tensor is best where links are fast, one rank where they are slow."""
    for bytes_per_s, latency_s, partition in ((1e12, 1e-9, "0&1"), (1e3, 1.0, "0")):
        machine = Machine(
            "m", (Device("d", 1e9, 1e9, {"f32": 1e12}),) * 2, 2,
            {"host": Link(latency_s, bytes_per_s)},
        )  # fmt: skip
        (tmp_path / "m.toml").write_text(machine_toml(machine))
        code = (
            "import nbflow\n"
            "from nbflow.distributed import world\n"
            f"options = {{'partition': 'auto', 'machine': {str(tmp_path / 'm.toml')!r}}}\n"
            "with nbflow.load('tiny_python', **options, threads=1) as model:\n"
            "    if model.participates and world().rank == 0: print(model.plan.partition)\n"
        )
        done = mpirun(2, "-m", "mpi4py", "-c", code)
        assert (done.returncode, done.stdout.strip()) == (0, partition), done.stderr

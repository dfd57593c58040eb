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


EXPERTS = {
    "model_type": "qwen2_moe", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}  # fmt: skip


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


def check_partitions(n: int, *models: tuple[Path, str]) -> None:
    """Compare partitions of models with one rank; each model comes with its partitions."""
    words = [w for folder, partitions in models for w in ("--", str(folder), *partitions.split())]
    script = Path(__file__).with_name("check_partitions.py")
    done = mpirun(n, "-m", "mpi4py", str(script), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all partitions agree" in done.stdout


def test_partitions_agree_with_one_rank(checkpoint, tmp_path):
    """Also whole experts on a rank, and sequences that outgrow the original context."""
    for name, config in (("experts", EXPERTS), ("long_rope", LONG_ROPE)):
        write_checkpoint(tmp_path / name, config)
    check_partitions(
        2, (checkpoint, "0;1 0&1 1&0 1 0:2;1"), (tmp_path / "experts", "0&1 1&0"),
        (tmp_path / "long_rope", "0&1 0;1"),
    )  # fmt: skip


def test_partitions_of_four_ranks_agree_with_one(checkpoint):
    check_partitions(4, (checkpoint, "0&1;2&3 0&1&2&3 3;1&2 2;0 0;1;2"))


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
    """By tensor is best where links are fast, one rank where they are slow; replicas for many
    sequences, whose tokens are those of one rank."""
    for name, bytes_per_s, latency_s in (("fast", 1e12, 1e-9), ("slow", 1e3, 1.0)):
        machine = Machine(
            "m", (Device("d", 1e9, 1e9, {"f32": 1e12}),) * 2, 2,
            {"host": Link(latency_s, bytes_per_s)},
        )  # fmt: skip
        (tmp_path / f"{name}.toml").write_text(machine_toml(machine))
    code = (
        "import nbflow\n"
        "from nbflow.distributed import SelfComm, world\n"
        "prompts = ['def f', 'import os', 'x = [']\n"
        "def ids(model): return [r.ids for r in model.generate_batch(prompts, max_tokens=4)]\n"
        "with nbflow.load('tiny_python', comm=SelfComm(), threads=1) as model: one = ids(model)\n"
        "for name, aim in (('fast', 'latency'), ('slow', 'latency'), ('slow', 'throughput')):\n"
        f"    machine = {str(tmp_path)!r} + f'/{{name}}.toml'\n"
        "    options = {'partition': 'auto', 'machine': machine, 'optimize': aim, 'threads': 1}\n"
        "    with nbflow.load('tiny_python', **options) as model:\n"
        "        same = not model.participates or ids(model) == one\n"
        "        if model.participates and world().rank == 0: print(model.plan.partition, same)\n"
    )
    done = mpirun(2, "-m", "mpi4py", "-c", code)
    printed = ["0&1 True", "0 True", "0/1 True"]
    assert (done.returncode, done.stdout.splitlines()) == (0, printed), done.stderr

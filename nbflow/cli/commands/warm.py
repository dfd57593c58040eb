"""`nbflow warm`: compile the kernels that a model needs, before its first request.

Loads the model and generates a few tokens: one sequence, four and a batch, greedy and sampled, with
and without log-probabilities.  What is compiled meanwhile stays in the kernel cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from numba.core import event

from nbflow.cli.options import add_model_arguments, is_printing_rank, load_model
from nbflow.distributed import world
from nbflow.engine.llm import LLM
from nbflow_kernels.compilation.jit_cache import cache_root
from nbflow_kernels.cpu.jit import CachedKernel
from nbflow_kernels.errors import UsageError

N_PROMPT = 32
"""Default of --n-prompt, where the context holds it."""
_N_TOKENS = 4
_VARIABLE = "NUMBA_CACHE_DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser, optional="tiny_python")
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="folder of the kernel cache (the default one)"
    )
    parser.add_argument(
        "-p", "--n-prompt", type=int, default=N_PROMPT, help=f"prompt length ({N_PROMPT})"
    )
    parser.add_argument("-b", "--batch", type=int, default=8, help="sequences of the batch (8)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    for name, number in (("--n-prompt", arguments.n_prompt), ("--batch", arguments.batch)):
        if not 1 <= number <= 65_536:
            raise UsageError(f"{name} must be 1..65536, got {number}")
    if arguments.to is not None and cache_root() != arguments.to.absolute():
        return _in_new_process(arguments.to.absolute())
    arguments.model = arguments.model or "tiny_python"
    started, counter = time.perf_counter(), _Counter()
    with event.install_listener("numba:compile", counter), load_model(arguments) as model:
        if model.participates:
            _generate(model, arguments.n_prompt, arguments.batch)
        prints = is_printing_rank(model)
    if not prints:
        return 0
    seconds = time.perf_counter() - started
    entries = [path.stat().st_size for path in cache_root().rglob("*.nb[ce]")]
    print(
        f"{counter.n} kernels compiled in this process; ready after {seconds:.1f} s; "
        f"{cache_root()} holds {len(entries)} entries, {sum(entries) / 2**20:.1f} MiB"
    )
    return 0


class _Counter(event.Listener):
    """Number of kernels compiled, without device functions."""

    def __init__(self) -> None:
        self.n = 0

    def on_start(self, event: Any) -> None:
        self.n += isinstance(event.data["dispatcher"], CachedKernel)

    def on_end(self, event: Any) -> None:
        pass


def _in_new_process(folder: Path) -> int:
    """Run the command with another cache folder, which imports have already fixed here."""
    if world().size > 1:
        raise UsageError(
            f"--to {folder} is for one process; under mpirun set the variable {_VARIABLE} for all"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--to {folder} cannot be made ({error.strerror})") from error
    command = [sys.executable, "-m", "nbflow", *sys.argv[1:]]
    environment = os.environ | {_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment).returncode


def _generate(model: LLM, n_prompt: int, batch: int) -> None:
    """Generate with each kind of step and of sampling."""
    n_tokens = min(_N_TOKENS, model.spec.max_context - 1)
    n_prompt = max(1, min(n_prompt, model.spec.max_context - n_tokens))
    prompts = [[(i + j) % model.spec.vocab_size for j in range(n_prompt)] for i in range(batch)]
    sampled = {"decoding": "auto", "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    groups = [[[0]], prompts[:4], prompts]  # products have kernels for up to 1, 4 and 8 rows
    for options in ({}, {"logprobs": 1}, sampled):
        for group in groups if batch > 4 else groups[::2]:
            model.generate_batch(group, n_tokens, ignore_eos=True, **options)

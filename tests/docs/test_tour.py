"""The Llama of `notebooks/` built from `nbflow_kernels` alone generates the engine's tokens."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from mpirun import MPIRUN, mpirun

import nbflow

SCRIPT = Path(__file__).resolve().parents[2] / "notebooks" / "from_weights_to_token.py"
PROMPT, N = "def read(self", 20


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with nbflow.load("tiny_python", weights="q3h", kv="q8_0") as model:
        return model.generate(PROMPT, max_tokens=N).ids


def tokens(output: str) -> list[int]:
    """Return the tokens that the script printed."""
    return json.loads(output)["tokens"]


def test_the_script_is_short_and_imports_kernels_only():
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    third_party = imported - set(sys.stdlib_module_names)
    assert third_party == {"nbflow_kernels", "numpy", "safetensors", "tokenizers", "mpi4py"}


@pytest.mark.skipif(MPIRUN is None, reason="needs the extra mpi")
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_its_tokens_are_the_engines(expected, n_ranks):
    options = ["--weights", "q3h", "--kv", "q8_0", "-p", PROMPT, "-n", str(N)]
    done = mpirun(n_ranks, str(SCRIPT), *options)
    assert done.returncode == 0, done.stderr
    assert tokens(done.stdout) == expected

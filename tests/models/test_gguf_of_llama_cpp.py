"""GGUF files that llama.cpp's converter wrote (tools/golden/gguf_files.py), hybrids above all.

Matrices are float16 in the file and in the checkpoint it was made from, so that logits equal those
of transformers up to some ten roundings of float32: 2e-6 of the largest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow.spec import check, resolve

FOLDER = Path(__file__).parents[1] / "golden" / "gguf"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TOLERANCE = 2e-6


def golden(name):
    with np.load(FOLDER / name / "golden.npz") as file:
        return file["ids"], file["logits"], file["continuation"]


def error(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("name", NAMES)
def test_reference_executor_in_pieces(name):
    ids, logits, _ = golden(name)
    path = FOLDER / name / "model.gguf"
    spec = resolve(path).spec
    program = build(spec)
    with open_weights(path) as file:
        check(spec, file)
        executor = ReferenceExecutor(program, WeightLoader(program, file, None))
    chunks = [executor.logits(ids[a:b]) for a, b in ((0, 7), (7, 8), (8, len(ids)))]
    assert error(np.concatenate(chunks), logits) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("partition", ["0", "0&1", "0;1"])
def test_compiled_executor(name, partition):
    """Logits in uneven chunks; a continuation, which the cache and the states determine."""
    ids, logits, continuation = golden(name)
    path, options = FOLDER / name / "model.gguf", {"kv": "f32", "max_step_tokens": 17}
    with nbflow.load(path, partition=partition, threads=1, **options) as model:
        assert error(model.logits(ids), logits) < TOLERANCE
        mine, _ = model.generate_batch([ids, ids[:5]], max_tokens=len(continuation))
        assert mine.ids == continuation.tolist()

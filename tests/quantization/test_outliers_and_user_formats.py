"""Models with outliers or user formats, on one rank and on several."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from small_models import write_llama
from user_formats import NoForm

import nbflow
import nbflow_kernels as nk
from nbflow import cli
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build, fuse
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

IDS = np.random.default_rng(3).integers(0, 101, 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=2, n_heads=8, n_kv_heads=2, intermediate_size=320)
    return folder


@pytest.fixture
def noform():
    nk.register_format(NoForm)
    yield "noform_b32"
    nk.unregister_format("noform_b32")


def reference_logits(folder, weights, outliers=0.0):
    program = fuse(build(resolve(folder).spec))
    with open_weights(folder) as file:
        encoding = QuantizerOptions(outliers=outliers)
        loaded = WeightLoader(program, file, weights, encoding=encoding)
        return ReferenceExecutor(program, loaded).logits(IDS)


def relative(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


def logits(folder, **options):
    with nbflow.load(folder, kv="f32", **options) as model:
        return model.logits(IDS), model.memory()


def test_outliers_reach_the_logits(checkpoint):
    expected = reference_logits(checkpoint, "q4", 0.02)
    found, memory = logits(checkpoint, weights="q4", outliers=0.02)
    assert relative(found, expected) < 1e-5  # as without outliers: float32 rounding
    plain, plain_memory = logits(checkpoint, weights="q4")
    assert relative(plain, expected) > 1e-3
    exact = reference_logits(checkpoint, None)
    assert relative(found, exact) < relative(plain, exact)
    extra = memory[0]["weight_bytes"] - plain_memory[0]["weight_bytes"]
    shapes = resolve(checkpoint).spec.tensor_shapes()
    n = sum(math.prod(s) for name, s in shapes.items() if name.startswith("layers.") and s[1:])
    assert 8 * 0.01 * n < extra < 8 * 0.06 * n


@pytest.mark.parametrize("partition", ["0;1", "0&1", "0&1;2&3"])
def test_a_rank_keeps_the_outliers_of_its_part(checkpoint, partition):
    expected, _ = logits(checkpoint, weights="q4", outliers=0.02)
    found, memory = logits(checkpoint, weights="q4", outliers=0.02, partition=partition)
    assert relative(found, expected) < 1e-5
    assert len(memory) == partition.count("&") + partition.count(";") + 1


def test_outliers_with_int8_activations(checkpoint):
    expected = reference_logits(checkpoint, "q4", 0.02)
    found, _ = logits(checkpoint, weights="q4", outliers=0.02, activations="int8")
    plain, _ = logits(checkpoint, weights="q4", activations="int8")
    assert relative(found, expected) < 0.05  # 0.5 % of each product, through two layers
    assert relative(found, expected) < relative(plain, expected)


@pytest.mark.parametrize("partition", ["0", "0&1"])
def test_models_in_a_users_format(checkpoint, noform, partition):
    expected = reference_logits(checkpoint, noform)
    found, memory = logits(checkpoint, weights=noform, partition=partition)
    assert relative(found, expected) < 1e-5
    assert all(m["weight_bytes"] > 0 for m in memory)
    int8, _ = logits(checkpoint, weights=noform, partition=partition, activations="int8")
    assert 1e-4 < relative(int8, expected) < 0.05
    both, _ = logits(checkpoint, weights=noform, partition=partition, outliers=0.01)
    assert relative(both, reference_logits(checkpoint, noform, 0.01)) < 1e-5


@pytest.mark.parametrize("weights", [None, "f16"])
def test_outliers_need_a_block_format(checkpoint, weights):
    with pytest.raises(UsageError, match=r"outliers=0.01 needs weights in a block format"):
        nbflow.load(checkpoint, weights=weights, outliers=0.01)
    with pytest.raises(UsageError, match=r"outliers must be in 0..0.05"):
        nbflow.load(checkpoint, weights="q4", outliers=0.5)


def test_command_line(tmp_path, capsys):
    source = Path(__file__).parents[1] / "helpers" / "user_formats.py"
    file = tmp_path / "mine.py"
    file.write_text(
        source.read_text() + "\nimport nbflow_kernels as nk\nnk.register_format(NoForm)\n"
    )
    command = ["run", "tiny_python", "-p", "def ", "-n", "2", "--json"]
    command += ["--weights", "noform_b32", "--plugins", str(file), "--outliers", "0.01"]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 0
        assert len(json.loads(capsys.readouterr().out)["ids"]) == 2
    finally:
        nk.unregister_format("noform_b32")
    with pytest.raises(SystemExit) as ended:
        cli.main([*command[:-4], "--plugins", str(tmp_path / "absent.py")])
    assert ended.value.code == 2
    assert "cannot read the plugin" in capsys.readouterr().err

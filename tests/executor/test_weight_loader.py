"""Matrices read directly into the layout of the CPU kernels equal those that are read first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.checkpoint import open_weights
from nbflow.distributed import make_plan
from nbflow.distributed.device import HOST
from nbflow.executor import WeightLoader
from nbflow.program import build, fuse
from nbflow.program import partition as cut
from nbflow.spec import resolve
from nbflow.utils.load_progress import progress
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import floats, layout_cpu


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random Llama in float16, whose matrices do not fill whole row groups."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_llama(folder, np.float16, n_heads=6, n_kv_heads=2, intermediate_size=320)
    return folder


def operands(
    model: Path, partition: str, packed: bool, weights: str | None = None
) -> tuple[list[Any], int]:
    """Return the operands of all ranks in the CPU layout, and the bytes read from the file."""
    spec, found = resolve(model).spec, []
    with open_weights(model) as file:
        for rank in make_plan(spec, partition, 32).ranks:
            held = WeightLoader(fuse(cut(build(spec), rank)), file, weights, packed=packed)
            if packed:
                matrices = [t for ts in held.operands for t in ts if isinstance(t, nk.QuantTensor)]
                assert matrices
                assert not any(t.has_storage for t in matrices)
            held.finalize(HOST)
            found += [t for ts in held.operands for t in ts]
        return found, file.bytes_read


@pytest.mark.parametrize("partition", ["0", "0&1"])
@pytest.mark.parametrize("format", ["f16", "bf16", "q4_0", "q3"])
def test_packed_while_read(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, format: str, partition: str
) -> None:
    model = source
    if format != "f16":
        model = nbflow.quantize_checkpoint(source, tmp_path / "out", format).path
    assert_same_when_packed(monkeypatch, model, partition)


@pytest.mark.parametrize("partition", ["0", "0&1"])
def test_quantized_while_read(
    monkeypatch: pytest.MonkeyPatch, source: Path, partition: str
) -> None:
    assert_same_when_packed(monkeypatch, source, partition, "q4")


def test_errors_while_quantizing_name_the_row(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][37, 5] = np.inf
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(UsageError, match=r"layers\.1\.ffn\.down.*got inf at \[37, 5\]"):
        operands(tmp_path, "0", packed=True, weights="q4")


def test_progress_counts_the_bytes_of_all_ranks(source: Path) -> None:
    progress.reset()
    n_bytes = sum(operands(source, part, packed=True)[1] for part in ("0", "0&1"))
    assert progress.bytes() == (n_bytes, n_bytes)


def assert_same_when_packed(
    monkeypatch: pytest.MonkeyPatch, model: Path, partition: str, weights: str | None = None
) -> None:
    wanted, n_bytes = operands(model, partition, packed=False, weights=weights)
    monkeypatch.setattr(floats, "_CHUNK_BYTES", 1)  # 16 rows at a time
    monkeypatch.setattr(layout_cpu, "CHUNK", 1)
    found, n_bytes_read = operands(model, partition, packed=True, weights=weights)
    assert n_bytes_read == n_bytes
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, nk.QuantTensor):
            assert (ours.format, ours.shape) == (theirs.format, theirs.shape)
            ours, theirs = ours.packed().data, theirs.packed().data
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))

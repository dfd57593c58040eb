"""Matrices read directly into the layout of the CPU kernels equal those that are read first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from nbflow_kernels.formats import floats, layout_cpu


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random Llama in float16, whose matrices do not fill whole row groups."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_llama(folder, np.float16, n_heads=6, n_kv_heads=2, intermediate_size=320)
    return folder


def operands(model: Path, partition: str, packed: bool) -> tuple[list[Any], int]:
    """Return the operands of all ranks in the CPU layout, and the bytes read from the file."""
    spec, found = resolve(model).spec, []
    with open_weights(model) as file:
        for rank in make_plan(spec, partition, 32).ranks:
            held = WeightLoader(fuse(cut(build(spec), rank)), file, None, packed=packed)
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
    wanted, n_bytes = operands(model, partition, packed=False)
    monkeypatch.setattr(floats, "_PIECE_BYTES", 1)  # 16 rows at a time
    monkeypatch.setattr(layout_cpu, "CHUNK", 1)
    found, n_bytes_read = operands(model, partition, packed=True)
    assert n_bytes_read == n_bytes
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, nk.QuantTensor):
            assert (ours.format, ours.shape) == (theirs.format, theirs.shape)
            ours, theirs = ours.packed().data, theirs.packed().data
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))

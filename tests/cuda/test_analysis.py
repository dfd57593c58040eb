"""Analysis with the kernels of a device: the errors are those of the CPU, to float rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_models import write_llama

import nbflow_ptx.cupy_stand_in as stand_in
from nbflow.cli import make_parser
from nbflow_experiments.analysis import attribution, layer_errors, tensor_errors
from nbflow_experiments.analysis.layer_errors import Change
from nbflow_experiments.commands import analyze
from nbflow_kernels.errors import UsageError
from nbflow_ptx.checks import NO_CHECKS

pytestmark = pytest.mark.compiler

WINDOWS = [[1, 5, 7, 9]]
CLOSE = {"rtol": 1e-3, "atol": 1e-6}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    write_llama(
        tmp_path / "model", n_layers=1, hidden_size=32, intermediate_size=32, n_heads=8,
        n_kv_heads=8, head_dim=12, vocab_size=64,
    )  # fmt: skip
    stand_in.reset(checks=NO_CHECKS)
    yield tmp_path / "model"
    stand_in.reset()


def test_errors_on_a_device(model: Path) -> None:
    here, there = (
        tensor_errors(model, ["q4"], tensors="*.attn.q.weight", device=device)
        for device in ("cpu", "emulator")
    )
    assert here.equals(there)
    found = [layer_errors(model, ["q4"], WINDOWS, device=name) for name in ("cpu", "emulator")]
    for table in ("layers", "modules", "models"):
        one, other = (getattr(errors, table).select_dtypes("number") for errors in found)
        assert one.columns.tolist() == other.columns.tolist()
        np.testing.assert_allclose(other, one, **CLOSE)
    options = {"by": ["layer"], "complement": False}
    units = [
        attribution(model, ["q4"], WINDOWS, device=name, **options).units.kld_mean_nats  # type: ignore[arg-type]
        for name in ("cpu", "emulator")
    ]
    np.testing.assert_allclose(units[1], units[0], **CLOSE)


def test_what_a_device_does_not_do(model: Path) -> None:
    with pytest.raises(UsageError, match="analysed on device 'cpu', got 'emulator'"):
        layer_errors(model, [Change(kv="q8_0")], WINDOWS, device="emulator")
    for words, message in (
        (["--parts", "kv", "--device", "emulator"], "--parts kv runs on the CPU"),
        (["--device", "cpu,cuda"], "--device names one device"),
        (["--device", "gpu"], "unknown device 'gpu'"),
    ):
        with pytest.raises(UsageError, match=message):
            analyze.run(make_parser("analyze").parse_args([str(model), *words]))

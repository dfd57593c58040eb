"""The memory plan's sizes of the workspaces of products are those that products allocate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import user_formats

import nbflow_kernels as nk
from nbflow_kernels.cuda import device_of
from nbflow_kernels.cuda.workspace import _buffers, release
from nbflow_kernels.matmul import cuda as float_cuda
from nbflow_kernels.quantized_matmul import cuda as products
from nbflow_kernels.quantized_matmul import cuda_dequant_gemm as panels

pytestmark = pytest.mark.compiler
TOKENS, ROWS = 50, 75
"""The sizes of `test_matmul_wgmma`, whose kernels these are."""


@pytest.fixture
def base3() -> Any:
    """Return the name of a user's format without an MMA layout."""
    nk.register_format(user_formats.Base3)
    yield user_formats.Base3.name
    nk.unregister_format(user_formats.Base3.name)


@pytest.mark.parametrize(
    ("arch", "format", "activations", "K", "names"),
    [
        ("sm_80", "q4_k", "bf16", 704, {"qmatmul panel", "matmul bf16 tokens", "matmul factors"}),
        ("sm_90", "q4_k", "bf16", 704, {"matmul swizzled tokens", "matmul factors"}),
        ("sm_80", "f32", "bf16", 136, {"qmatmul panel", "matmul bf16 tokens", "matmul factors"}),
        ("sm_80", "bf16", "f32", 136, {"matmul bf16 tokens", "matmul factors"}),
        ("sm_90", "bf16", "f32", 136, {"matmul swizzled tokens", "matmul factors"}),
        ("sm_80", "base3_b20", "f32", 140, {"qmatmul panel f32"}),
        ("sm_80", "base3_b20", "bf16", 140, {"qmatmul panel f32", "qmatmul panel"}),
    ],
)
@pytest.mark.usefixtures("base3")
def test_planned_workspaces_are_those_of_a_product(
    arch: str, format: str, activations: str, K: int, names: set[str], cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(float_cuda, "MIN_WGMMA_TOKENS", TOKENS)
    monkeypatch.setattr(products, "BF16_MAX_ROWS", TOKENS - 1)
    monkeypatch.setattr(panels, "PANEL_BYTES", 32 * 2 * K)  # three panels, the last one smaller
    monkeypatch.setenv("NBFLOW_WGMMA", "1")  # without comparing its bits first
    cupy.reset(arch=arch)
    rng = np.random.default_rng(K)
    w = nk.quantize(rng.standard_normal((ROWS, K), dtype=np.float32), format, quantizer="auto")
    x = cupy.asarray(rng.standard_normal((TOKENS, K), dtype=np.float32))
    device = device_of(x)
    release(device.key, device.stream)  # those of earlier tests
    there = w.to_device(x)
    nk.qmatmul(x, there, activations=activations)
    found = {
        key[2]: b.nbytes for key, b in _buffers.items() if key[:2] == (device.key, device.stream)
    }
    assert names <= set(found)
    planned = products.workspace_bytes(nk.FORMATS[format], ROWS, K, TOKENS, activations, device)
    assert planned == found

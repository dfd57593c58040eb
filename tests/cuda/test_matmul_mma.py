"""GEMV and GEMM by `mma.sync` with float16 and bfloat16 weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
import nbflow_ptx
from nbflow_kernels.matmul import cuda_mma
from nbflow_kernels.moe import cuda as experts
from nbflow_kernels.quantized_matmul import reference

pytestmark = pytest.mark.compiler
TOKENS, ROWS, COLUMNS = 66, 75, 584
"""More than `SMALL_MAX_TOKENS`; rows and columns that end within a tile and a step."""


def make(format: str) -> tuple[np.ndarray, nk.QuantTensor]:
    rng = np.random.default_rng(7)
    w = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32) / np.float32(COLUMNS**0.5)
    return rng.standard_normal((TOKENS, COLUMNS), dtype=np.float32), nk.quantize(w, format)


def allowed() -> float:
    """Return the tolerance of a sum (`quantized_matmul.cases`); activations are exact to 2**-22."""
    return 3 * (COLUMNS + 8) ** 0.5 * 1.4e-7


@pytest.mark.parametrize(
    ("format", "activations", "arch", "tile"),
    [
        ("f16", "f32", "sm_80", cuda_mma.MIDDLE),
        ("f16", "f32", "sm_89", cuda_mma.SMALL),
        ("bf16", "f32", "sm_90", cuda_mma.LARGE),
        ("f16", "bf16", "sm_80", cuda_mma.LARGE),
    ],
)
def test_a_row_is_right_and_has_the_same_bits_in_any_batch(
    format: str, activations: str, arch: str, tile: cuda_mma.GemmTile, cupy: Any
) -> None:
    """On devices with 163, 99 and 227 KB of shared memory in a thread block."""
    cupy.reset(arch=arch)
    device = cupy.ndarray.__kernel_device__
    parts = 1 if activations == "bf16" else 3 if format == "bf16" else 2
    assert cuda_mma.tile_of(device, TOKENS, parts) == tile
    x, w = make(format)
    there, x_there = w.to_device(cupy.zeros(1)), cupy.asarray(x)
    bias = np.linspace(-1, 1, ROWS, dtype=np.float32)
    options = {"bias": cupy.asarray(bias), "activations": activations}
    many = nk.qmatmul(x_there, there, **options).get()
    wanted = reference.qmatmul(x, w, bias=bias, activations=activations)
    assert np.abs(many - wanted).max() <= allowed()
    for n in (1, 11, 20):  # `gemv`, twice `gemv`, small tiles of `gemm`
        out = cupy.asarray(np.ones((n, ROWS), np.float32))
        nk.qmatmul(x_there[5 : 5 + n], there, **options, accumulate=True, out=out)
        assert np.array_equal(out.get(), many[5 : 5 + n] + np.float32(1))


def test_activations_of_any_size_keep_their_bits(cupy: Any) -> None:
    x, _ = make("f16")
    x = x[:4] * np.float32([[1e-30], [1e30], [1], [0]])
    for format in ("f16", "bf16"):
        w = make(format)[1]
        got = nk.qmatmul(cupy.asarray(x), w.to_device(cupy.zeros(1))).get()
        scale = np.abs(x).max(axis=1, keepdims=True)
        assert (np.abs(got - reference.qmatmul(x, w)) <= allowed() * scale).all()


def test_nan_and_infinity_stay_in_their_row(cupy: Any) -> None:
    x, w = make("bf16")
    x = x[:3]
    x[0, 7], x[2, 9] = np.nan, np.inf
    got = nk.qmatmul(cupy.asarray(x), w.to_device(cupy.zeros(1))).get()
    assert not np.isfinite(got[[0, 2]]).any()
    assert np.isfinite(got[1]).all()


def test_kernels_stay_in_registers() -> None:
    (kind, name, _), parts = cuda_mma.KINDS["uint16"], 1
    for entry, shape in (("gemv", None), ("gemm", cuda_mma.LARGE)):
        kernel = cuda_mma._kernel(entry, kind, name, parts, shape)
        code, symbol = kernel.compile("sm_90", "ptx")
        facts = nbflow_ptx.lint(code.decode(), "sm_90")[symbol]
        assert facts.registers is not None, facts.registers_from
        assert (facts.spill_stores, facts.spill_loads, facts.stack_bytes) == (0, 0, 0), entry
        assert (facts.fp64, facts.local_accesses) == (0, 0)
        assert facts.async_copies if shape else facts.wide_loads


@pytest.mark.parametrize("min_rows", [16, 0])
def test_a_matrix_per_segment_has_the_bits_of_single_products(
    min_rows: int, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "MIN_ROWS_TO_SYNC", min_rows)  # 0: one after the other
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((7, 304), np.float32), rng.standard_normal((3, 21, 304), np.float32)
    there, rows = cupy.asarray(x), rng.integers(0, 7, 15).astype(np.int32)
    bias = cupy.asarray(rng.standard_normal((3, 21), np.float32))
    weights, indptr = cupy.asarray(w.astype(np.float16)), np.array([0, 4, 4, 15], np.int32)
    got = nk.grouped_matmul(
        there, weights, cupy.asarray(indptr), rows=cupy.asarray(rows), bias=bias
    ).get()
    for e in (0, 2):
        part = slice(*indptr[e : e + 2].tolist())
        alone = nk.matmul(cupy.asarray(x[rows[part]]), weights[e], bias=bias[e]).get()
        assert got[part].tobytes() == alone.tobytes()

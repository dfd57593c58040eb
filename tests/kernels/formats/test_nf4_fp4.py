"""NF4 and FP4: values, bytes, products, quantizers, lookups of floats."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numba.extending import intrinsic

import nbflow_kernels as nk
from nbflow_kernels.cpu import isa, simd, simd_shuffle
from nbflow_kernels.cpu.simd import f32x16, i32x16
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.memory_size import layout_bytes
from nbflow_kernels.formats.nf4_fp4 import CODEBOOKS

NAMES = ["nf4_b64", "fp4_b128", "nf4_b16"]
PROCESSORS = [
    frozenset({"x86"}),
    frozenset({"x86", "ssse3", "avx2"}),
    frozenset({"x86", "ssse3", "avx2", "avx512bw"}),
]
# a processor that is not among them has its own features
RUNNABLE = [found for found in PROCESSORS if found <= isa.features()] or [isa.features()]


def _random(name: str, n_rows: int, n_columns: int) -> tuple[nk.QuantTensor, np.ndarray]:
    """Return a tensor of random codes and scales, and its weights in float64."""
    format, rng = nk.FORMATS[name], np.random.default_rng(len(name))
    n = n_rows * n_columns // format.block_size
    codes = rng.integers(0, 16, (n, format.block_size)).astype(np.uint8)
    scales = rng.uniform(1e-3, 1, n).astype(np.float32)
    table = np.array(CODEBOOKS[name[:3]], np.float64)
    weights = table[codes] * scales[:, None]
    data = format.blocks(codes, scales).reshape(n_rows, -1)
    return nk.QuantTensor(name, (n_rows, n_columns), data), weights.reshape(n_rows, n_columns)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_rounded_once(name: str) -> None:
    tensor, weights = _random(name, 21, 256)
    wanted = weights.astype(np.float32)
    np.testing.assert_array_equal(nk.dequantize(tensor), wanted)
    blocks = tensor.data.reshape(-1, tensor.format.block_bytes)
    np.testing.assert_array_equal(tensor.format.dequantize_blocks(blocks).reshape(21, 256), wanted)
    tensor.drop_storage()
    np.testing.assert_array_equal(nk.dequantize(tensor), wanted)
    assert tensor.packed_nbytes == layout_bytes(name, 21, 256)
    ids = np.array([20, 0, 7], np.int32)
    np.testing.assert_array_equal(nk.embedding(ids, tensor), wanted[ids])


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("n", [1, 5])
def test_products(name: str, n: int) -> None:
    tensor, weights = _random(name, 37, 256)
    x = np.random.default_rng(n).standard_normal((n, 256)).astype(np.float32)
    wanted, sizes = x @ weights.T, np.abs(x) @ np.abs(weights.T)
    out = np.full((n, 37), np.nan, np.float32)
    nk.qmatmul(x, tensor, out=out)
    # weights rounded to float32, then 256 products and sums in float32
    assert (np.abs(out - wanted) <= 260 * 2.0**-24 * sizes).all()
    out.fill(np.nan)
    nk.qmatmul(x, tensor, activations="bf16", out=out)
    # bfloat16 rounds both factors, by 2**-9 each, before the same sums
    assert (np.abs(out - wanted) <= (2.0**-8 + 2.0**-15) * sizes).all()
    with pytest.raises(UsageError, match=r"block format of integers, got .*use activations='f32'"):
        nk.qmatmul(x, tensor, activations="int8")


def test_experts_keep_float_products() -> None:
    tensor, weights = _random("nf4_b64", 3 * 20, 128)
    stack = nk.QuantTensor("nf4_b64", (3, 20, 128), tensor.data)
    x = np.random.default_rng(4).standard_normal((6, 128)).astype(np.float32)
    found = nk.grouped_matmul(x, stack, np.array([0, 2, 2, 6], np.int32), activations="int8")
    parts = weights.reshape(3, 20, 128)
    wanted = np.concatenate([x[:2] @ parts[0].T, x[2:] @ parts[2].T])
    sizes = np.concatenate([np.abs(x[:2]) @ np.abs(parts[0].T), np.abs(x[2:]) @ np.abs(parts[2].T)])
    assert (np.abs(found - wanted) <= 132 * 2.0**-24 * sizes).all()


@pytest.mark.parametrize("name", NAMES)
def test_quantizers(name: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((9, 200)).astype(np.float32)  # the last block is padded
    x[3] = 0
    x[4, :50] = -1e-6
    size, levels = nk.FORMATS[name].block_size, np.array(CODEBOOKS[name[:3]], np.float64)
    plain = nk.dequantize(nk.quantize(x, name, quantizer="reference"))
    for first in range(0, 200, size):
        block = x[:, first : first + size].astype(np.float64)
        largest = np.abs(block).max(axis=1)
        choices = largest[:, None, None] * levels
        nearest = np.abs(choices - block[..., None]).min(axis=2)
        off = np.abs(plain[:, first : first + size] - block)
        # a tie between two levels may be decided by the rounding of x / scale
        assert (off <= nearest + 1e-6 * largest[:, None]).all()
    best = nk.dequantize(nk.quantize(x, name))
    errors = [np.square(v.astype(np.float64) - x).sum() for v in (best, plain)]
    assert errors[0] < 0.95 * errors[1]
    weight = np.where(np.arange(200) < 20, 50, 1).astype(np.float32)
    weighted = nk.dequantize(nk.quantize(x, name, importance=weight))
    assert (weight * np.square(weighted - x)).sum() < (weight * np.square(best - x)).sum()
    with pytest.raises(UsageError, match="knows no importance"):
        nk.quantize(x, name, quantizer="reference", importance=weight)


@pytest.mark.parametrize("features", RUNNABLE, ids=lambda f: "-".join(sorted(f)))
def test_lookup_of_floats(features: frozenset[str]) -> None:
    values = tuple(float(v) for v in np.random.default_rng(1).standard_normal(16).astype("f4"))

    @intrinsic
    def look_up(typing_context, index):
        def codegen(context, builder, signature, args):
            return simd_shuffle.emit_lookup16_f32(builder, values, args[0], features)

        return f32x16(i32x16), codegen

    @njit
    def kernel(index, out):
        found = look_up(simd.load_i32(simd.address(index)))
        simd.store_f32(simd.address(out), found)

    index = np.random.default_rng(2).permutation(16).astype(np.int32)
    out = np.full(16, np.nan, np.float32)
    kernel(index, out)
    np.testing.assert_array_equal(out, np.array(values, np.float32)[index])


@pytest.mark.parametrize("name", ["nf4", "nf4_b48", "fp4_b256", "nf4_b64_f16"])
def test_names_that_are_none(name: str) -> None:
    assert name not in nk.FORMATS

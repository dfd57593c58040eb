"""Grouped integer formats and e2m1_g16_f32: bytes, weights, products, quantizers."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.e2m1 import E2M1_G16_F32
from nbflow_kernels.formats.grouped import group_format
from nbflow_kernels.quantizers import quantize_calibrated

SHAPES = [
    (4, 128, "f16", True),
    (4, 64, "f16", False),
    (8, 32, "f32", False),
    (3, 16, "f32", True),
    (7, 32, "f16", True),
    (4, 64, "f16", False, True),
]
"""Bits, block size, type of scales, zero points, base."""


def _random(shape: tuple, n_rows: int, n_columns: int):
    """Return a tensor and its weights in float64."""
    bits, size, scale_type, has_zeros = shape[:4]
    rng = np.random.default_rng(bits + size)
    format, n = group_format(*shape), n_rows * n_columns // size
    codes = rng.integers(0, 1 << bits, (n, size)).astype(np.uint8)
    scales = rng.uniform(1e-3, 1e-2, n).astype(np.float32)
    if scale_type == "f16":
        scales = scales.astype(np.float16).astype(np.float32)
    else:  # bfloat16, for which the base is exact
        scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    zeros = rng.integers(0, 1 << bits, n).astype(np.uint8)
    middle = zeros if has_zeros else np.full(n, 1 << bits - 1)
    if format.has_base:  # HQQ's zero points are floats
        middle = rng.uniform(0, 15, n).astype(np.float16).astype(np.float32)
        data = format.blocks(codes, scales, -(scales * middle))
    else:
        data = format.blocks(codes, scales, zeros if has_zeros else None)
    weights = scales.astype(np.float64)[:, None] * (codes - middle.astype(np.float64)[:, None])
    tensor = nk.QuantTensor(format.name, (n_rows, n_columns), data.reshape(n_rows, -1))
    return tensor, weights.reshape(n_rows, n_columns)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_rounded_once(shape):
    tensor, weights = _random(shape, 37, 256)
    wanted = weights.astype(np.float32)
    np.testing.assert_array_equal(nk.dequantize(tensor), wanted)
    blocks = tensor.data.reshape(-1, tensor.format.block_bytes)
    numpy = tensor.format.dequantize_blocks(blocks).reshape(37, 256)
    np.testing.assert_array_equal(numpy, wanted)
    tensor.drop_storage()
    np.testing.assert_array_equal(nk.dequantize(tensor), wanted)
    assert nk.FORMATS[tensor.format.name.upper()] is tensor.format


@pytest.mark.parametrize("shape", [*SHAPES[:2], SHAPES[-1]])
@pytest.mark.parametrize("n", [1, 5])
def test_products(shape, n):
    tensor, weights = _random(shape, 37, 256)
    x = np.random.default_rng(n).standard_normal((n, 256)).astype(np.float32)
    wanted, sizes = x @ weights.T, np.abs(x) @ np.abs(weights.T)
    out = np.full((n, 37), np.nan, np.float32)
    nk.qmatmul(x, tensor, out=out)
    # 256 products and sums in float32; codes and base are added apart, so |w| counts up to 3 times
    assert (np.abs(out - wanted) <= 3 * 260 * 2.0**-24 * sizes).all()
    # bfloat16 rounds both factors, to 2**-9 each
    nk.qmatmul(x, tensor, activations="bf16", out=out)
    largest = np.abs(x) @ np.full(weights.T.shape, np.abs(weights).max())
    assert (np.abs(out - wanted) <= 2.0**-7 * largest).all()
    # int8 rounds x to half a step of its block's largest number / 127
    nk.qmatmul(x, tensor, activations="int8", out=out)
    assert (np.abs(out - wanted) <= np.abs(x).max() / 254 * np.abs(weights).sum(1)).all()


def test_fp4_values():
    rng = np.random.default_rng(1)
    data = np.empty((3, 4, 12), np.uint8)
    scales = rng.uniform(1e-4, 1, (3, 4)).astype(np.float32)
    data[..., :4] = scales[..., None].view(np.uint8)
    codes = rng.integers(0, 256, (3, 4, 8)).astype(np.uint8)
    data[..., 4:] = codes
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    pairs = np.stack([codes & 15, codes >> 4], axis=3).reshape(3, 4, 16)
    tensor = nk.QuantTensor("e2m1_g16_f32", (3, 64), data.reshape(3, -1))
    wanted = (values[pairs] * scales[..., None]).reshape(3, 64)
    np.testing.assert_array_equal(nk.dequantize(tensor), wanted)
    with pytest.raises(UsageError, match="e2m1_g16_f32 is only read from checkpoints"):
        nk.quantize(wanted, E2M1_G16_F32)


@pytest.mark.parametrize(
    "name", ["int4_g128", "uint4_g128", "uint3_g32_f32", "int8_g64", "uint4_g64_base"]
)
def test_quantizers(name):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((9, 200)).astype(np.float32)  # the last block is padded
    x[3] = 0
    x[4, :50] = -1e-6
    plain = nk.quantize(x, name, quantizer="reference")
    format = plain.format
    blocks = plain.data.reshape(-1, format.block_bytes)
    step = np.repeat(format.scales(blocks).reshape(9, -1), format.block_size, axis=1)[:, :200]
    # within the range a code is at most half a step away, and rounding of the zero point and of a
    # float16 scale (2**-11 of up to 255 steps) moves the ends of the range by at most another step
    assert (np.abs(nk.dequantize(plain) - x) <= 1.5 * step + 1e-9).all()
    best = nk.dequantize(nk.quantize(x, name))
    errors = [np.square(v.astype(np.float64) - x).sum() for v in (best, nk.dequantize(plain))]
    assert errors[0] < errors[1]
    weight = np.where(np.arange(200) < 20, 50, 1).astype(np.float32)
    weighted = nk.dequantize(nk.quantize(x, name, importance=weight))
    assert (weight * np.square(weighted - x)).sum() < (weight * np.square(best - x)).sum()
    with pytest.raises(UsageError, match="knows no importance"):
        nk.quantize(x, name, quantizer="reference", importance=weight)


def test_gptq_chooses_codes():
    rng = np.random.default_rng(3)
    w = rng.standard_normal((16, 128)).astype(np.float32)
    a = rng.standard_normal((256, 128)) @ rng.standard_normal((128, 128))
    hessian = (a.T @ a).astype(np.float64)
    found = quantize_calibrated(w, "uint4_g64", "gptq", hessian)
    plain = nk.quantize(w, "uint4_g64")
    off = [nk.dequantize(q).astype(np.float64) - w for q in (found, plain)]
    errors = [np.einsum("ni,ij,nj->", d, hessian, d) for d in off]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize(
    "name", ["int9_g128", "int4_g100", "int4_g128_f16", "uint4", "int4_g64_base"]
)
def test_names_that_are_none(name):
    assert name not in nk.FORMATS
    with pytest.raises(UsageError, match="unknown format"):
        nk.FORMATS[name]

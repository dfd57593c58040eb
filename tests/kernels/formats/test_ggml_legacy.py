"""GGML's legacy formats against the `gguf` package, which is GGML's own Python form of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from nbflow_kernels.formats import FORMATS, QuantTensor, dequantize, dequantize_rows
from nbflow_kernels.quantizers import quantize

NAMES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def published(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name.upper()]


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    normal = rng.normal(0, 1, (40, 128)).astype(np.float32)
    # the extreme weight twice, with both signs: the first one decides
    twice = np.clip(normal, -1, 1)
    # multiples of a quarter: quotients that are exactly halves
    halves = (rng.integers(-508, 509, (40, 128)) / 4).astype(np.float32)
    halves[:, ::32] = 127
    below_half = halves.copy()
    below_half[:, 1::32] = np.nextafter(np.float32(0.5), np.float32(0))
    return {
        "normal": normal * np.float32(0.02),
        "wide": normal,
        "tiny": normal * np.float32(1e-5),
        "below_float16": normal * np.float32(1e-20),
        "beyond_float16": normal * np.float32(1e7),
        "far_from_zero": normal * np.float32(0.001) + 100,
        "positive": np.exp(normal),
        "negative": -np.exp(normal),
        "twice": twice,
        "halves": halves,
        "below_half": below_half,
        "constant": np.full((2, 64), 0.3, np.float32),
        "zeros": np.zeros((2, 64), np.float32),
        "negative_zeros": np.full((2, 64), -0.0, np.float32),
    }


@pytest.mark.parametrize("name", NAMES)
def test_block_has_the_published_size(name):
    size = gguf.GGML_QUANT_SIZES[published(name)]
    assert (FORMATS[name].block_size, FORMATS[name].block_bytes) == size


@pytest.mark.parametrize("name", NAMES)
def test_reference_writes_the_published_bytes(name):
    for what, x in inputs().items():
        with np.errstate(all="ignore"):
            want = gguf.quants.quantize(x, published(name))
        assert np.array_equal(quantize(x, name, quantizer="reference").data, want), what


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_published_ones_bit_for_bit(name):
    format = FORMATS[name]
    data = np.random.default_rng(12).integers(0, 256, (200, 4 * format.block_bytes), np.uint8)
    blocks = data.reshape(-1, format.block_bytes)
    two = 4 if name.endswith("_1") else 2
    blocks[:, 1:two:2] &= 0xBF  # exponents below 16: finite, both signs
    blocks[:3, :two] = 0  # scales 0 and -0
    blocks[3:6, :two] = np.uint8([0, 128] * (two // 2))
    qt = QuantTensor.from_bytes(data.tobytes(), name, (200, 128))
    want = gguf.quants.dequantize(data, published(name)).view(np.uint32)
    assert np.array_equal(dequantize(qt).view(np.uint32), want)
    ids = np.array([199, 0, 7, 7])
    assert np.array_equal(dequantize_rows(qt, ids).view(np.uint32), want[ids])
    assert np.array_equal(format.dequantize_blocks(blocks).view(np.uint32), want.reshape(-1, 32))


@pytest.mark.parametrize("name", NAMES)
def test_search_is_read_by_the_published_decoder_and_loses_less(name):
    x = inputs()["normal"]
    qt = quantize(x, name)
    y = gguf.quants.dequantize(qt.data, published(name))
    assert np.array_equal(y, dequantize(qt))
    plain = dequantize(quantize(x, name, quantizer="reference"))
    best_error, plain_error = (np.square(v.astype(np.float64) - x).sum() for v in (y, plain))
    # squared errors; q8_0 gains least: 0.00506 / 0.00535 of the root, 0.895 squared
    assert best_error < 0.95 * plain_error


@pytest.mark.parametrize("name", ["q4_0", "q5_0"])
def test_search_keeps_the_sign_of_the_scale(name):
    # the extreme weight is in reach of code 0 alone: the other end of the codes is one step short
    for sign in (1, -1):
        x = (sign * np.linspace(-0.5, 1, 64)).astype(np.float32)[None]
        scale = FORMATS[name].base_and_scale(quantize(x, name).data.reshape(2, -1))[1]
        assert np.sign(scale[1]) == -sign
    mirrored = dequantize(quantize(-x, name))
    assert np.array_equal(mirrored, -dequantize(quantize(x, name)))


@pytest.mark.parametrize("name", NAMES)
def test_tiny_weights_are_not_cut_off(name):
    # the largest of 5120 normal numbers is below 5, all scales are below 1e-5: the
    # reference quantizer of other formats writes codes 0; a float16 scale is off by at most 3e-8
    # here, of 1.5e-7 or more
    x = inputs()["tiny"]
    assert np.abs(x).max() < 5e-5
    y = dequantize(quantize(x, name, quantizer="reference"))
    assert np.square(y - x).sum() < 0.1 * np.square(x).sum()
    assert not dequantize(quantize(x, "q8", quantizer="reference")).any()

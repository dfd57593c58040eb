"""The packed layout: weights come out bit by bit as `dequantize` gives them, at the stated cost."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import synthetic_formats
from synthetic_formats import SyntheticFormat

import nbflow_kernels as nk
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, QuantTensor, dequantize, dequantize_rows
from nbflow_kernels.formats.codec_spec import CodecSpec, weights
from nbflow_kernels.formats.decode_cpu import decode_blocks
from nbflow_kernels.formats.layout_cpu import PAIRS, packed_form
from nbflow_kernels.quantized_matmul import cases
from nbflow_kernels.quantizers import quantize

BLOCK_FORMATS = [name for name, f in FORMATS.items() if f.block_size > 1]


@functools.cache
def _decoder(form):
    @jit.kernel
    def kernel(packed, n_blocks, group_bytes, out):
        for group in range(len(out)):
            at = simd.address(packed) + group * group_bytes
            decode_blocks(form, at, n_blocks, simd.address(out[group]))

    return kernel


def decoded(qt: QuantTensor) -> np.ndarray:
    packed = qt.packed()
    out = np.full((packed.n_groups, packed.n_columns, 16), np.nan, np.float32)
    _decoder(packed.form)(packed.data, packed.n_blocks, packed.group_bytes, out)
    return out.transpose(0, 2, 1).reshape(-1, packed.n_columns)[: qt.n_rows, : qt.shape[-1]]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_integers_are_the_weights(name):
    qt = cases.weights(np.random.default_rng(1), 37, 330, name)
    form = FORMATS[name].integer_form
    assert np.array_equal(weights(form, FORMATS[name].integers(qt.data))[:, :330], dequantize(qt))


@pytest.mark.parametrize("name", synthetic_formats.FORMS)
def test_every_integer_form_is_packed_exactly(name):
    format = synthetic_formats.FORMATS[name]
    qt = format.random(np.random.default_rng(2), 21, 600)
    assert np.array_equal(decoded(qt), dequantize(qt))


@pytest.mark.parametrize("name", [*BLOCK_FORMATS, *synthetic_formats.FORMS])
def test_packed_weights_cost_what_they_say(name):
    format = FORMATS.get(name) or synthetic_formats.FORMATS[name]
    packed = QuantTensor(
        format, (16, 256), np.zeros((16, 256 // format.block_size * format.block_bytes), np.uint8)
    ).packed()
    assert packed.nbytes * 8 == packed.bits_per_weight * 16 * 256
    if name in FORMATS:
        # integer scales of 4 to 6 bits are widened to bytes: 2.8 % (q4_k), 3.6 % (q3_k).  Codes
        # that are compressed further in storage (iq) keep their bits, plus at most a float16 per
        # block of 256 and a byte per 16 weights: (16 + 16 * 8) / 256 = 0.5625 bits; nvfp4's float8
        # scale of 16 weights becomes a float16, half a bit per weight
        bits = 3.5 if packed.form.bits == PAIRS else packed.form.bits
        more = 1.0 if packed.form.d_block == 16 else 0.5625
        assert packed.bits_per_weight <= max(1.04 * format.bits_per_weight, bits + more)


def test_a_thousandth_is_divided_exactly():
    form = CodecSpec(32, 32, 4, base="d", d_type="u8")
    format = SyntheticFormat("all_bytes", form)
    blocks = np.zeros((256, 1), format.dtype)
    u = np.arange(256, dtype=np.float32)
    blocks["d"][:, 0], blocks["m"][:, 0] = u / np.float32(1000), u / np.float32(100) - 1
    blocks["codes"] = 1
    qt = QuantTensor(format, (256, 32), blocks.view(np.uint8).reshape(256, -1))
    assert qt.packed().form.d_type == "u8"
    assert np.array_equal(decoded(qt), dequantize(qt))


def test_powers_of_two_down_to_the_smallest():
    format = synthetic_formats.FORMATS["like_mxfp4"]
    d = np.ldexp(np.float32(1), np.arange(-128, 120))  # 128 * d must be finite, see `folds_zero`
    blocks = np.zeros((len(d), 1), format.dtype)
    blocks["d"][:, 0] = d
    blocks["codes"] = np.arange(32) % 16
    qt = QuantTensor(format, (len(d), 32), blocks.view(np.uint8).reshape(len(d), -1))
    assert qt.packed().form.d_type == "e8m0"
    assert np.array_equal(decoded(qt), dequantize(qt))


def test_all_floats_of_seven_bits():
    byte = np.arange(127)
    exponent, mantissa = byte >> 3, (byte & 7) / 8
    number = np.where(exponent, np.ldexp(1 + mantissa, exponent - 7), np.ldexp(mantissa, -6))
    format = synthetic_formats.FORMATS["like_nvfp4"]
    blocks = np.zeros((127, 2), format.dtype)
    blocks["d"] = (number / 2)[:, None]
    blocks["codes"] = np.arange(16)
    qt = QuantTensor(format, (127, 32), blocks.view(np.uint8).reshape(127, -1))
    assert qt.packed().form.d_type == "e4m3"
    assert qt.packed().bits_per_weight == 4.5
    assert np.array_equal(decoded(qt), dequantize(qt))


def test_numbers_that_do_not_fit_get_more_room():
    form = CodecSpec(64, 32, 4, zero=8, scales=True)
    format = SyntheticFormat("roomy", form)
    blocks = np.zeros((3, 2), format.dtype)
    blocks["codes"] = np.arange(64) % 16
    blocks["d"] = 0.1  # no float16
    blocks["scales"] = 200
    qt = QuantTensor(format, (3, 128), blocks.view(np.uint8).reshape(3, -1))
    assert (qt.packed().form.d_type, qt.packed().form.scales) == ("f32", "u8")
    assert np.array_equal(decoded(qt), dequantize(qt))
    blocks["scales"][0, 0, 0] = -1
    with pytest.raises(UsageError, match=r"cannot be packed: integer scales must lie in 0\.\.255"):
        QuantTensor(format, (3, 128), blocks.view(np.uint8).reshape(3, -1)).packed()


def test_infinite_scales_of_a_file_are_packed():
    qt = quantize(np.ones((2, 32), np.float32), "q4_0")
    data = qt.data.copy()
    data[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    packed = QuantTensor("q4_0", (2, 32), data).packed()
    assert packed.form.d_type == "f16"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (CodecSpec(60, 20, 4), "a sub_block of 16 or a multiple of 32"),
        (CodecSpec(32, 32, 5, values=(0,) * 32), "`values` only up to 4 bits"),
        (CodecSpec(32, 32, 9), "code_bits 1..8"),
        (CodecSpec(96, 32, 4, pairs=True), "multiple of 64, got 96"),
        (CodecSpec(32, 32, 4, base="min"), "needs integer scales"),
    ],
)
def test_forms_that_cannot_be_packed_are_refused(form, message):
    with pytest.raises(UsageError, match=message):
        packed_form(form)


def test_kernels_are_cached_by_form_and_not_by_format():
    forms = [packed_form(FORMATS[name].integer_form) for name in ("q8_0", "q8_b32t2")]
    assert forms[0] == forms[1]
    assert _decoder(forms[0]) is _decoder(forms[1])


def test_data_is_aligned_to_a_cache_line():
    qt = quantize(np.ones((20, 64), np.float32), "q4")
    assert qt.packed().data.ctypes.data % 64 == 0


@pytest.mark.parametrize("name", ["q4_0", "q3h"])
def test_weights_come_back_from_the_packed_layout_alone(name):
    x = np.random.default_rng(3).standard_normal((37, 330), dtype=np.float32)
    qt = quantize(x, name, quantizer="reference")
    want = dequantize(qt)
    qt.drop_storage()
    assert not qt.has_storage
    assert np.array_equal(dequantize(qt), want)
    ids = np.array([36, 0, 16, 15, 0], np.int32)
    assert np.array_equal(nk.embedding(ids, qt), want[ids])
    assert dequantize_rows(qt, ids[:0]).shape == (0, 330)

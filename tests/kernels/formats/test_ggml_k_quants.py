"""K-quants: bytes, decoders, quantizers, against GGML's own results."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from golden_weights import bell, importances, inputs

from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.formats import FORMATS, QuantTensor, dequantize, dequantize_rows
from nbflow_kernels.formats.codec_spec import weights
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.quantizers.k_formats import pack_super_blocks
from nbflow_kernels.testing.format_table import relative_rmse

NAMES = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
LEGACY = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "ggml_k" / "published.json").read_text()
)
# bytes of the fields * 8 / weights, as in each format's docstring
BITS = {
    "q2_k": (16 + 64 + 2 + 2) * 8 / 256,
    "q3_k": (32 + 64 + 12 + 2) * 8 / 256,
    "q4_k": (2 + 2 + 12 + 128) * 8 / 256,
    "q5_k": (2 + 2 + 12 + 32 + 128) * 8 / 256,
    "q6_k": (128 + 64 + 16 + 2) * 8 / 256,
}


def published(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name.upper()]


def random_bytes(name: str, rows: int = 40, blocks: int = 3) -> np.ndarray:
    """Return rows of super-blocks with finite d and dmin of both signs, some of them 0 and -0."""
    format = FORMATS[name]
    data = np.random.default_rng(5).integers(0, 256, (rows, blocks * format.block_bytes), np.uint8)
    flat = data.reshape(-1, format.block_bytes)
    at = [format.fields.at(name) for name in ("d", "dmin") if name in format.fields]
    for i, zeros in zip(at, (slice(0, 4), slice(2, 6)), strict=False):
        flat[:, i + 1] &= 0xBF  # exponents below 16: finite, both signs
        flat[zeros, i], flat[zeros, i + 1] = 0, [0, 128] * 2
    return data


# ---- bytes to weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_block_has_the_published_size(name):
    format = FORMATS[name]
    assert (format.block_size, format.block_bytes) == gguf.GGML_QUANT_SIZES[published(name)]
    assert format.bits_per_weight == BITS[name]
    doc = sys.modules[f"nbflow_kernels.formats.ggml.{name}"].__doc__
    assert f"= {format.bits_per_weight:g} bits per weight" in doc


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_published_ones_bit_for_bit(name):
    format, data = FORMATS[name], random_bytes(name)
    want = gguf.quants.dequantize(data, published(name)).view(np.uint32)
    qt = QuantTensor.from_bytes(data.tobytes(), name, (40, 768))
    assert np.array_equal(dequantize(qt).view(np.uint32), want)
    ids = np.array([39, 0, 7, 7])
    assert np.array_equal(dequantize_rows(qt, ids).view(np.uint32), want[ids])
    blocks = data.reshape(-1, format.block_bytes)
    assert np.array_equal(format.dequantize_blocks(blocks).view(np.uint32).reshape(40, -1), want)
    # a row that ends inside of a sub-block
    short = QuantTensor.from_bytes(data.tobytes(), name, (40, 700))
    assert np.array_equal(dequantize(short).view(np.uint32), want[:, :700])


@pytest.mark.parametrize("name", NAMES)
def test_integers_give_the_same_weights_bit_for_bit(name):
    format, data = FORMATS[name], random_bytes(name)
    form, rows = format.integer_form, format.integers(data)
    assert rows.codes.shape == (40, 768)
    assert rows.codes.max() == (1 << form.code_bits) - 1
    assert rows.scales is not None
    assert rows.scales.shape == (40, 768 // form.sub_block)
    assert (rows.mins is None) == (form.base == "none")
    want = gguf.quants.dequantize(data, published(name)).view(np.uint32)
    assert np.array_equal(weights(form, rows).view(np.uint32), want)


@pytest.mark.parametrize("name", NAMES)
def test_encoded_integers_survive_packing(name):
    # every byte matters: the integers of random bytes, packed again, are these bytes
    format, data = FORMATS[name], random_bytes(name, rows=10)
    rows = format.integers(data)
    bits = [
        v.astype(np.float16).view(np.uint16) for v in (rows.d, rows.d if rows.m is None else rows.m)
    ]
    n = 10 * 3
    mins = np.empty((n, 0), np.uint8) if rows.mins is None else rows.mins.reshape(n, -1)
    out = pack_super_blocks(
        format, rows.codes.reshape(n, -1), rows.scales.reshape(n, -1), mins,
        np.stack([v.reshape(-1) for v in bits], axis=1),
    )  # fmt: skip
    assert np.array_equal(out, data.reshape(n, -1))


# ---- plain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES + LEGACY)
@pytest.mark.parametrize("label", ["none", "columns", "weights"])
def test_reference_writes_the_published_bytes(name, label):
    importance = {"none": None, **importances()}[label]
    wrong = []
    for kind, x in inputs().items():
        data = quantize(x, name, quantizer="reference", importance=importance).tobytes()
        if hashlib.sha256(data).hexdigest() != GOLDEN[name]["sha256"][kind][label]:
            wrong.append(kind)
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_reference_of_one_super_block_in_full(name):
    data = quantize(inputs()["normal"][0, :256], name, quantizer="reference").tobytes()
    assert data.hex() == GOLDEN[name]["first_block_of_normal"]


@pytest.mark.parametrize("name", NAMES + LEGACY)
@pytest.mark.parametrize("quantizer", ["reference", "search"])
def test_error_is_within_ggmls_limit(name, quantizer):
    # GGML's own test of its formats (test-quantize-fns): 4096 values of 0.1 + 2 cos(i), and the
    # root of the sum of squared errors, divided by 4096
    x = (0.1 + 2 * np.cos(np.arange(4096))).astype(np.float32)
    error = dequantize(quantize(x, name, quantizer=quantizer)) - x
    limit = {"q2_k": 0.0075, "q3_k": 0.004}.get(name, 0.002)
    assert np.sqrt(np.square(error, dtype=np.float64).sum()) / 4096 < limit


# ---- best ---------------------------------------------------------------------------------------


def super_block_errors(name: str, x: np.ndarray, quantizer: str) -> np.ndarray:
    """Return the squared error of each super-block, inf where the decoder gives no number."""
    with np.errstate(all="ignore"):
        error = np.square(dequantize(quantize(x, name, quantizer=quantizer)).astype(np.float64) - x)
    error = np.where(np.isnan(error), np.inf, error)
    return np.add.reduceat(error, np.arange(0, x.shape[1], 256), axis=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [768, 600])
def test_search_never_loses_more_than_reference_in_any_super_block(name, columns):
    extreme = {
        "beyond_float16": inputs()["normal"] * np.float32(1e7),
        "near_float32_max": np.sign(inputs()["normal"]) * np.float32(3.4e38),
        "smallest": inputs()["normal"] * np.float32(1e-38),
    }
    for kind, whole in {**inputs(), **extreme}.items():
        x = np.ascontiguousarray(whole[:, :columns])
        best, plain = (super_block_errors(name, x, e) for e in ("search", "reference"))
        assert np.isfinite(best).all(), kind
        # the search compares float32 sums: chains of up to 16 squares, then up to 16 sub-blocks, so
        # some 40 roundings of 6e-8 = 2e-6 of the error; its codes are nearest up to the rounding of
        # a quotient of at most 63 steps: 63 * 6e-8 * 2 of a step, 1e-5 of the error
        assert np.all(best <= plain * (1 + 3e-5)), kind


@pytest.mark.parametrize(
    ("name", "plain", "best"),
    [
        ("q2_k", 0.297, 0.259),
        ("q3_k", 0.1508, 0.1435),
        ("q4_k", 0.0714, 0.0697),
        ("q5_k", 0.0361, 0.0344),
        ("q6_k", 0.01771, 0.01637),
    ],
)
def test_search_is_better_by_what_was_measured(name, plain, best):
    # a super-block's error varies by some 10 %, so the root mean square over 384 by 0.3 %: 1 %
    x = np.random.default_rng(0).normal(size=(96, 1024)).astype(np.float32)
    assert relative_rmse(x, name, "reference") == pytest.approx(plain, rel=0.01)
    assert relative_rmse(x, name, "search") == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize(
    ("name", "digest"), [("q4_k", "7c28fe94dcba3203"), ("q6_k", "9339b6eadf48b91b")]
)
def test_search_writes_the_same_bytes_on_every_processor(name, digest):
    # no outside source: recorded on AVX-512, and the same on AVX2 and on AVX without fused
    # multiply-adds; a better search may change it
    data = quantize(inputs()["heavy"], name, importance=importances()["columns"]).tobytes()
    assert hashlib.sha256(data).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", ["q2_k", "q4_k", "q5_k"])
def test_weights_far_above_zero_are_encoded_upside_down(name):
    x = np.abs(bell(9)) * np.float32(0.01) + np.float32(1)
    error = np.abs(dequantize(quantize(x, name)) - x).max()
    # d and dmin are negative.  A step is at most 0.04 / 3, or 0.04 / 15 and finer, and half of
    # one is lost; minima have steps of 1.04 / 15 or 1.04 / 63, of which half is lost too, unless
    # the search finds a scale that makes up for it.  Upright codes would have steps of 1.04 / 3,
    # 1.04 / 15 and 1.04 / 31.
    assert error < {"q2_k": 0.06, "q4_k": 0.012, "q5_k": 0.011}[name]
    assert np.signbit(FORMATS[name].integers(quantize(x, name).data).d).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quantizer", ["search", "reference"])
def test_neighbours_and_threads_do_not_matter(name, quantizer, split_everything):
    x = bell(6, (37, 512))
    weight = np.abs(bell(7, (37, 512)))
    set_num_threads(1)
    one = quantize(x, name, quantizer=quantizer, importance=weight).data
    set_num_threads(2)
    assert np.array_equal(quantize(x, name, quantizer=quantizer, importance=weight).data, one)
    # the last super-block alone
    alone = quantize(x[36, 256:], name, quantizer=quantizer, importance=weight[36, 256:]).data
    assert np.array_equal(alone[0], one[36, FORMATS[name].block_bytes :])


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name):
    qt = quantize(np.zeros((0, 300), np.float32), name)
    assert qt.nbytes == 0
    assert dequantize(qt).shape == (0, 300)


def test_there_is_no_other_k_quant():
    assert [name for name, format in FORMATS.items() if isinstance(format, KQuantFormat)] == NAMES

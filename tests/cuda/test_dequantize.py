"""Weight formats on a device decode to the CPU's bits."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import user_formats

import nbflow_kernels as nk
from nbflow_kernels import cuda
from nbflow_kernels.formats import dequantize_rows
from nbflow_kernels.formats.affine_format import RANGE, AffineFormat
from nbflow_kernels.formats.bit_fields import bit_sources, pack_blocks
from nbflow_kernels.formats.block_bytes import get_f16, put_f16
from nbflow_kernels.formats.block_format import BlockFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.trellis import TrellisFormat
from nbflow_kernels.quantized_matmul.cases import weights as reordered
from nbflow_kernels.quantizers.reference import codebook

pytestmark = pytest.mark.compiler
QUANTIZERS = [n for n, f in nk.FORMATS.items() if not isinstance(f, TrellisFormat)]
# signed, bytes as parameters, pairs, levels in the middle, two planes; the others differ in numbers
EMULATED = ("f16", "bf16", "q8_b32t2", "q4_b16", "q3h_b64t1", "q3_b32t1b", "q6_b64t1")
# GGML's three kinds with one scale, and the two of K-quants: ranges, and codes around zero
EMULATED += ("q4_0", "q5_1", "q8_0", "q4_k", "q6_k")
# scales looked up, digits in base 3, a grid of 8 with importance, splits of two groups
EMULATED += ("nvfp4", "tq1_0", "iq2_xs", "iq1_m")
BLOCKS = [name for name in nk.FORMATS if nk.FORMATS[name].block_size > 1]


def _random(format: Any, n_rows: int, seed: int) -> nk.QuantTensor:
    """A tensor of arbitrary bytes: scales may be infinite or NaN; its last block is cut."""
    columns = format.block_size + 13
    shape = (n_rows, format.row_blocks(columns) * format.block_bytes)
    data = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    return nk.QuantTensor(format, (n_rows, columns), data)


def _bits(array: Any) -> Any:
    host = cuda.to_host(array)
    return np.where(np.isnan(host), 0x7FC00000, host.view(np.int32))


def _check_decoder(format: Any, cupy: Any) -> None:
    qt = _random(format, 3, seed=len(format.name))
    blocks = qt.data.reshape(-1, qt.format.block_bytes)
    with np.errstate(all="ignore"):
        wanted = qt.format.dequantize_blocks(blocks).reshape(3, -1)[:, : qt.shape[1]]
    out = cupy.full(qt.shape, np.nan, np.float32)
    there = qt.to_device(out)
    found = nk.dequantize(there, out)
    assert found is out
    np.testing.assert_array_equal(_bits(found), _bits(wanted))
    rows = nk.embedding(cupy.asarray(np.array([2, -1, 3], np.int32)), there)
    np.testing.assert_array_equal(_bits(rows[0]), _bits(wanted[2]))
    assert np.isnan(cuda.to_host(rows[1:])).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_arbitrary_bytes_decode_to_the_bits_of_the_cpu(name: str, cupy: Any) -> None:
    _check_decoder(nk.FORMATS[name], cupy)


@pytest.mark.parametrize(
    "name", ["int4_g128", "uint3_g32", "uint4_g16_f32", "uint4_g64_base", "e2m1_g16_f32"]
)
def test_formats_of_other_quantizers_checkpoints(name: str, cupy: Any) -> None:
    _check_decoder(nk.FORMATS[name], cupy)


def test_planes_of_a_part_of_the_codes(cupy: Any) -> None:
    """Threads then decode 4 codes instead of 8."""
    planes = (Plane(2, 4, count=4), Plane(4, 4, first=4))
    fields = FieldTable(32, (float16("scale", 0), Field("code", 32, planes)))
    _check_decoder(AffineFormat("parts_b32", fields, RANGE, divisor=15, zero=8), cupy)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_arbitrary_bytes_decode_to_the_bits_of_the_cpu_on_a_device(name: str) -> None:
    _check_decoder(nk.FORMATS[name], importlib.import_module("cupy"))


@pytest.fixture
def weights() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((4, 70)).astype(np.float32)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8", "q4_k"])
def test_float16_is_the_rounded_float32(name: str, weights: np.ndarray, cupy: Any) -> None:
    weights[0, :3] = [1e-7, 3e-8, -6.1e-5]  # float16 has few digits there, or none
    qt = nk.quantize(weights, name)
    out = cupy.empty(qt.shape, np.float16)
    nk.dequantize(qt.to_device(out), out)
    np.testing.assert_array_equal(out.get(), nk.dequantize(qt).astype(np.float16))


def test_rows_outliers_and_indices_that_are_no_rows(weights: np.ndarray, cupy: Any) -> None:
    qt = nk.quantize(weights, "q4_0", outliers=0.04)
    assert qt.outliers is not None
    ids = cupy.asarray(np.array([2, 0, -1, 2, 4], np.int32))
    there = qt.to_device(ids)
    rows = np.array([2, 0, 2])
    found = nk.embedding(ids, there, scale=2.5).get()
    np.testing.assert_array_equal(
        found[[0, 1, 3]], nk.embedding(rows.astype(np.int32), qt, scale=2.5)
    )
    assert np.isnan(found[[2, 4]]).all()
    found = dequantize_rows(there, ids).get()
    np.testing.assert_array_equal(found[[0, 1, 3]], dequantize_rows(qt, rows))
    np.testing.assert_array_equal(nk.dequantize(there).get(), nk.dequantize(qt))


@pytest.mark.parametrize(("dropped", "scaled"), [(False, False), (True, False), (True, True)])
def test_columns_in_another_order(dropped: bool, scaled: bool, cupy: Any) -> None:
    rng = np.random.default_rng(0)
    qt = reordered(rng, 21, 203, "uint4_g32", reordered=True, scaled=scaled)
    wanted, there = nk.dequantize(qt), qt.to_device(cupy.zeros(1))
    if dropped:
        there.drop_storage()
    else:
        np.testing.assert_array_equal(there.to_host().column_order, qt.column_order)
    np.testing.assert_array_equal(nk.dequantize(there).get(), wanted)
    half = nk.dequantize(there, cupy.empty(qt.shape, np.float16)).get()
    np.testing.assert_array_equal(half, wanted.astype(np.float16))
    rows = nk.embedding(cupy.asarray(np.array([20, 21], np.int32)), there, scale=2.0).get()
    np.testing.assert_array_equal(rows[0], 2 * wanted[20])
    assert np.isnan(rows[1]).all()


@pytest.fixture(params=[user_formats.Base3, user_formats.NoForm])
def user_format(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield nk.register_format(request.param)
    nk.unregister_format(request.param.name)


def test_a_users_format_decodes_too(user_format: Any, weights: np.ndarray, cupy: Any) -> None:
    qt = nk.quantize(weights, user_format.name)
    there = qt.to_device(cupy.zeros(1))
    np.testing.assert_array_equal(nk.dequantize(there).get(), nk.dequantize(qt))
    ids = cupy.asarray(np.array([3, 7], np.int32))
    rows = nk.embedding(ids, there).get()
    np.testing.assert_array_equal(rows[0], nk.dequantize(qt)[3])
    assert np.isnan(rows[1]).all()


def test_tensors_travel(weights: np.ndarray, cupy: Any) -> None:
    qt = nk.quantize(weights, "q8", outliers=0.04)
    there = qt.to_device(cupy.zeros(1))
    assert there.on_device
    back = there.to_host()
    np.testing.assert_array_equal(back.data, qt.data)
    np.testing.assert_array_equal(back.outliers.values, qt.outliers.values)
    assert "on a CUDA device" in repr(there)
    two = nk.QuantTensor.concatenate([there.rows(0, 1), there.rows(2, 4)])
    np.testing.assert_array_equal(two.to_host().data, qt.data[[0, 2, 3]])
    with pytest.raises(nk.UsageError, match="take to_host"):
        there.packed()
    with pytest.raises(nk.UsageError, match="lies in host memory"):
        nk.dequantize(qt, cupy.empty(qt.shape, np.float32))


@pytest.mark.parametrize("name", EMULATED)
def test_reference_quantizers_write_the_bytes_of_the_cpu(name: str, cupy: Any) -> None:
    _check_quantizer(name, cupy)


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZERS)
def test_reference_quantizers_write_the_bytes_of_the_cpu_on_a_device(name: str) -> None:
    _check_quantizer(name, importlib.import_module("cupy"))


def _check_quantizer(name: str, cupy: Any) -> None:
    n_columns = 150 if nk.FORMATS[name].block_size < 256 else 300
    x = 0.3 * np.random.default_rng(6).standard_normal((3, n_columns), dtype=np.float32)
    x[0, 3], x[1, :64], x[2, :32] = -0.0, 0.0, 1e-7  # a scale of zero, and one that counts as zero
    found = nk.quantize(cupy.asarray(x), name, quantizer="reference")
    np.testing.assert_array_equal(
        found.data.get(), nk.quantize(x, name, quantizer="reference").data
    )


@pytest.mark.parametrize("name", [n for n in BLOCKS if isinstance(nk.FORMATS[n], BlockFormat)])
def test_bits_of_blocks_come_from_the_numbers(name: str) -> None:
    """Kernels and the NumPy packing function make the same bits."""
    fields = nk.FORMATS[name].fields  # type: ignore[attr-defined]
    rng = np.random.default_rng(8)
    parts = {f.name: rng.integers(0, 1 << f.bits, (1, f.n)) for f in fields.fields}
    numbers = np.concatenate([part[0] for part in parts.values()])
    sources = bit_sources(fields)
    bits = (numbers[sources >> 4] >> (sources & 15) & 1).astype(np.uint8)
    made = np.packbits(bits, bitorder="little")
    np.testing.assert_array_equal(made, pack_blocks(fields, parts)[0])
    assert len(made) == nk.FORMATS[name].block_bytes


@pytest.mark.parametrize("name", ["e8m0", "e4m3"])
def test_thresholds_lead_to_the_bytes_of_scales(name: str) -> None:
    """Also next to powers of two, where the logarithm that is published rounds up to them."""
    published = getattr(codebook, name)
    bounds = codebook.thresholds(published)
    around = (np.arange(1, 255)[:, None] << 23) + np.arange(-40, 41)
    bits = np.concatenate([
        around.ravel(), np.random.default_rng(9).integers(0, 0x7F800000, 100_000), [0, 1, 2, 3],
    ])  # fmt: skip
    largest = bits.astype(np.int32).view(np.float32)
    wanted = published(np.stack([largest, np.zeros_like(largest)], axis=1))
    np.testing.assert_array_equal(np.searchsorted(bounds, bits, side="right") - 1, wanted)


def test_what_has_no_quantizer_there_says_so(
    user_format: Any, weights: np.ndarray, cupy: Any
) -> None:
    x = cupy.asarray(weights)
    with pytest.raises(
        nk.UsageError, match=r"no quantizer 'search' .*; it has quantizer='reference'"
    ):
        nk.quantize(x, "q4")
    for quantizer in ("reference", "search"):
        with pytest.raises(nk.UsageError, match="q2t_b256 has no quantizer on a CUDA device"):
            nk.quantize(x, "q2t", quantizer=quantizer)
    with pytest.raises(nk.UsageError, match="importance and outliers"):
        nk.quantize(x, "q4", quantizer="reference", outliers=0.01)
    with pytest.raises(nk.UsageError, match="quantize_block does not compile for CUDA"):
        nk.quantize(x, user_format.name)  # it takes the mean or the least of an array


class Halves:
    """A format whose quantizer is plain loops."""

    name = "halves_b4"
    block_size = 4
    block_bytes = 8

    @staticmethod
    def quantize_block(x, out):  # type: ignore[no-untyped-def]
        for i in range(4):
            put_f16(out, 2 * i, x[i] / np.float32(3))

    @staticmethod
    def dequantize_block(block, out):  # type: ignore[no-untyped-def]
        for i in range(4):
            out[i] = get_f16(block, 2 * i) * np.float32(3)


def test_a_users_quantizer_of_plain_loops_runs_there(weights: np.ndarray, cupy: Any) -> None:
    nk.register_format(Halves)
    try:
        found = nk.quantize(cupy.asarray(weights), "halves_b4")
        np.testing.assert_array_equal(found.data.get(), nk.quantize(weights, "halves_b4").data)
    finally:
        nk.unregister_format("halves_b4")

"""Formats: names, bytes, decoders, errors a user can cause."""

from __future__ import annotations

import copy
import pickle
import re
import sys

import numpy as np
import pytest
from numba import njit

from nbflow_kernels.cpu import simd
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, QuantTensor, dequantize, dequantize_rows
from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.formats.bit_fields import (
    byte_rows,
    pack_field,
    reciprocal,
    unpack_field,
)
from nbflow_kernels.formats.block_format import FieldFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.iq_grids import GridFormat
from nbflow_kernels.formats.unpack_rows import unpack_rows, unpacking
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.testing.format_table import table

BLOCK_FORMATS = [name for name, f in FORMATS.items() if isinstance(f, AffineFormat)]
FLOAT_FORMATS = ["f32", "f16", "bf16"]

# The published quantizer's bytes for the first block of v[i] = (((37 i) mod 64) - 20) / 32.
GOLDEN = {
    "q8_b32t1": "00b9e81f009628be51e7790ca235ca5df38618ae41d769ff9224ba4de375089e31c659ef",
    "q8_b32t2": "6b21c532e250006d1ece3beb59097626d744f461127f2fe04dfd6a1bcb38e8560673",
    "q6_b64t1": "00b91128881d728bdd6287dc21b7d82176c82d7640ea843ed7710ba640ea933dd7620ca65ff9932d"
    "c8621cb55ff9842ec8711bb5",
    "q5_b64t1": "00b9332c2ab55aa9d44aa5562065ba1e63b80d4398ec4196eb3176ca2f74c91e54a90d52a7fc4287"
    "db3085da",
    "q5_b32t1": "112c00b92ab55aa980a2d5f72a4c7f91c4e6193b6e80b3d5",
    "q5h_b64t1": "00b9ba29c7e3381e34499ee3344992e3d961fb43c862ca40d962b7840c51fa7342f631a5ec970b"
    "42fd31b93175ec90db",
    "q4_b64t1": "00b9803080a2d417395b7da1c4e6284a6c90b3d517396c8ea2c406285b7d91b3e5284a6c",
    "q4_b32t1a": "00b9333090b2e5173a5c8ea1d4f6295b7d90c3e5",
    "q4_b32t1b": "82b8e02f90b2e5073a5c8fa1d4f6294b7e90c3e5",
    "q4_b16": "257d90c3e5183a6d8fb2",
    "q3h_b64t1": "00b94d32c7f3381e200d9d90354842e7f2564ce12b81206ad0c46ec409ae0258",
    "q3_b32t1a": "00b980342ab55aa9503ae453fa940ee5",
    "q3_b32t1b": "04b8e0332ab55aa9503ea543fa940fe9",
    "q2_b32t1a": "00b94039881d668bdd6287d9",
    "q2_b32t1b": "10b6e037881d728bdd6287dc",
    "q8_0": "6b21c532e250006d1ece3beb59097626d744f461127f2fe04dfd6a1bcb38e8560673",
    "q5_1": "112c00b92ab55aa980a2d5f72a4c7f91c4e6193b6e80b3d5",
    "q5_0": "60ad9542a114174ae406a0426c0639d3759f315bf517",
    "q4_1": "333000b940d962fb952eb751da730c953ec851ea",
    "q4_0": "60b19c257a0358a1368b1469b24791368b14",
}
GOLDEN_INPUT = (((37 * np.arange(64)) % 64 - 20) / 32).astype(np.float32)

# (parameters + planes) bytes * 8 / weights, as in each format's docstring
BITS = {
    "q8_b32t1": (2 + 2 + 32) * 8 / 32,
    "q8_b32t2": (2 + 32) * 8 / 32,
    "q6_b64t1": (2 + 2 + 16 + 32) * 8 / 64,
    "q5_b64t1": (2 + 2 + 8 + 32) * 8 / 64,
    "q5_b32t1": (2 + 2 + 4 + 16) * 8 / 32,
    "q5h_b64t1": (2 + 2 + 4 + 8 + 16 + 16) * 8 / 64,
    "q4_b64t1": (2 + 2 + 32) * 8 / 64,
    "q4_b32t1a": (2 + 2 + 16) * 8 / 32,
    "q4_b32t1b": (2 + 2 + 16) * 8 / 32,
    "q4_b16": (1 + 1 + 8) * 8 / 16,
    "q3h_b64t1": (2 + 2 + 4 + 8 + 16) * 8 / 64,
    "q3_b32t1a": (2 + 2 + 4 + 8) * 8 / 32,
    "q3_b32t1b": (2 + 2 + 4 + 8) * 8 / 32,
    "q2_b32t1a": (2 + 2 + 8) * 8 / 32,
    "q2_b32t1b": (2 + 2 + 8) * 8 / 32,
    "q8_0": (2 + 32) * 8 / 32,
    "q5_1": (2 + 2 + 4 + 16) * 8 / 32,
    "q5_0": (2 + 4 + 16) * 8 / 32,
    "q4_1": (2 + 2 + 16) * 8 / 32,
    "q4_0": (2 + 16) * 8 / 32,
}


def weights(*shape: int, sigma: float = 0.02) -> np.ndarray:
    return np.random.default_rng(7).normal(0, sigma, shape).astype(np.float32)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_reference_quantizer_writes_the_published_bytes(name):
    x = GOLDEN_INPUT[: FORMATS[name].block_size]
    assert quantize(x, name, quantizer="reference").tobytes().hex() == GOLDEN[name]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_cost_is_the_sum_of_the_fields(name):
    format = FORMATS[name]
    assert format.bits_per_weight == BITS[name] == 8 * format.block_bytes / format.block_size
    qt = quantize(weights(3, format.block_size * 2), name, quantizer="reference")
    assert qt.nbytes == 3 * 2 * format.block_bytes
    assert f"= {format.bits_per_weight:g} bits per" in _docstring(format).replace("\n", " ")


def _docstring(format):
    modules = [m for n, m in sys.modules.items() if n.startswith("nbflow_kernels.formats.")]
    cost = f"= {format.bits_per_weight:g} bits per"
    docs = [m.__doc__ for m in modules if f"``{format.name}``" in (m.__doc__ or "")]
    return next(doc for doc in docs if cost in doc.replace("\n", " "))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_byte_table_covers_the_block(name):
    """Hand-written tables, of formats on grids and `tq1_0`, agree with the generated ones."""
    table, doc = FORMATS[name].fields, _docstring(FORMATS[name])
    rows = byte_rows(table)
    ends = [at + n_bytes for at, n_bytes, _ in rows]
    assert [at for at, _, _ in rows] == [0, *ends[:-1]]
    assert ends[-1] == table.block_bytes
    if isinstance(FORMATS[name], GridFormat):
        for at, n_bytes, _ in rows:
            assert re.search(rf"^{at} +{n_bytes} ", doc, re.M), (at, n_bytes)


@pytest.mark.parametrize(
    "planes", [(Plane(2, 4), Plane(2, 4)), (Plane(2, 4, count=16),), (Plane(3, 4),)]
)
def test_a_table_with_overlaps_or_gaps_is_refused(planes):
    with pytest.raises(UsageError, match="cover each of its bits once"):
        FieldTable(32, (float16("scale", 0), Field("code", 32, planes)))


def test_fields_of_a_part_of_the_numbers():
    """The six bits of K-quants' scales lie apart for the first and the last numbers."""
    low = Plane(4, 4, first=4, per_group=1)
    field = Field("scale", 8, (Plane(0, 6, count=4), low, Plane(0, 2, 4, bit=6, first=4)))
    numbers = np.random.default_rng(0).integers(0, 64, (9, 8)).astype(np.uint8)
    blocks = np.zeros((9, 8), np.uint8)
    pack_field(field, numbers, blocks)
    assert np.array_equal(blocks[:, 0], numbers[:, 0] | (numbers[:, 4] >> 4 << 6))
    assert np.array_equal(blocks[:, 4], numbers[:, 4] & 15)
    assert np.array_equal(unpack_field(field, blocks), numbers)
    assert np.array_equal(_unpacked(field, blocks, 1), numbers)


def _unpacked(field: Field, blocks, size: int):
    """Unpack blocks, three to a row, to numbers of `size` bytes."""
    rows = blocks.reshape(-1, 3 * blocks.shape[1])
    out = np.full((len(rows), 3 * field.n), 0xA5A5 if size == 2 else 0xA5, f"u{size}")
    rest = np.empty((len(rows), 0), np.uint8)
    constants = unpacking(blocks.shape[1], (field, size))
    unpack_rows(rows, blocks.shape[1], constants, (out, rest, rest), 1.0)
    return out.reshape(len(blocks), -1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "planes",
    [
        *((Plane(0, bits),) for bits in (1, 2, 4, 8)),
        (Plane(0, 4), Plane(16, 1, shift=4), Plane(20, 2, shift=5), Plane(28, 1, shift=7)),
        (Plane(0, 4, stride=16), Plane(16, 2, shift=4, stride=8), Plane(24, 2, 6, stride=4)),
        (Plane(0, 2, bit=6), Plane(0, 3, shift=2, bit=3), Plane(0, 3, shift=5)),
        (Plane(0, 3, per_group=4, pitch=4), Plane(0, 1, shift=3, bit=3, pitch=4)),
        (Plane(0, 7, per_group=4, step=4), Plane(3, 1, 7, bit=4, step=4)),
    ],
)
def test_planes_of_any_kind_are_unpacked(planes, size):
    field = Field("code", 32, planes, factor=2, offset=-3)
    n_bytes = max(plane.at + plane.n_bytes(32) for plane in planes)
    blocks = np.random.default_rng(0).integers(0, 256, (6, n_bytes), np.uint8)
    wanted = 2 * unpack_field(field, blocks) - 3
    assert np.array_equal(_unpacked(field, blocks, size), wanted.astype(f"u{size}"))


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if isinstance(f, FieldFormat)])
def test_integers_of_all_formats_are_those_of_numpy(name):
    format = FORMATS[name]
    blocks = np.random.default_rng(1).integers(0, 256, (15, format.block_bytes), np.uint8)
    if format.fields["code"].radix if "code" in format.fields else 0:
        codes = np.random.default_rng(2).integers(0, format.n_codes, (15, format.block_size))
        blocks = format.blocks(codes.astype(np.uint8), np.zeros((15, 2), np.uint16))
    with np.errstate(all="ignore"):
        found = format.integers(blocks.reshape(3, -1))
    assert np.array_equal(found.codes, format.unpack_codes(blocks).reshape(3, -1))
    for have, name in ((found.scales, "scale"), (found.mins, "min")):
        if have is not None:
            wanted = format._unpack_integers(name, blocks).reshape(3, -1)
            assert np.array_equal(have, wanted)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_numpy_and_kernel_decode_alike_bit_for_bit(name):
    format = FORMATS[name]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (300, format.block_bytes)).astype(np.uint8)
    code = format.fields["code"]
    if code.radix:  # 7 bits hold 121 pair codes: no quantizer writes the other 7
        codes = rng.integers(0, code.radix, (300, format.block_size))
        blocks = format.blocks(codes, format.stored_parameters(blocks))
    with np.errstate(all="ignore"):
        base, scale = format.base_and_scale(blocks)
    blocks = blocks[np.isfinite(base) & np.isfinite(scale)]
    assert len(blocks) > 200
    out = np.full((len(blocks), format.block_size), np.nan, np.float32)
    format.dequantize_rows(blocks, out)
    want = format.dequantize_blocks(blocks)
    assert np.array_equal(out.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_codes_survive_packing(name):
    format = FORMATS[name]
    codes = np.random.default_rng(2).integers(0, format.n_codes, (50, format.block_size))
    codes = codes.astype(np.uint8)
    blocks = format.blocks(codes, np.zeros((50, 2), np.uint16))
    assert np.array_equal(format.unpack_codes(blocks), codes)
    assert np.array_equal(format.integers(blocks).codes, codes)


@pytest.mark.parametrize("radix", [11, 45])
def test_pair_codes_are_split_without_a_division(radix):
    codes = np.arange(radix * radix)
    assert np.array_equal(codes * reciprocal(radix) >> 16, codes // radix)


@pytest.mark.parametrize("name", BLOCK_FORMATS + FLOAT_FORMATS)
@pytest.mark.parametrize("columns", [1, 15, 64, 130])
def test_bytes_make_the_round_trip_and_tails_are_right(name, columns):
    x = weights(2, 3, columns)
    qt = quantize(x, name)
    again = QuantTensor.from_bytes(qt.tobytes(), name, qt.shape)
    assert again.tobytes() == qt.tobytes()
    assert (
        again.nbytes
        == len(qt.tobytes())
        == 6 * qt.format.row_blocks(columns) * (qt.format.block_bytes)
    )
    y = dequantize(qt)
    assert y.shape == x.shape
    assert np.array_equal(dequantize(again), y)
    # a row's bytes do not depend on the other rows
    assert np.array_equal(quantize(x[1, 2], name).data[0], qt.data[5])


def test_float_formats_are_the_float_types():
    x = np.concatenate([weights(400), np.float32([0, -0.0, 1, 65504, 1e-7])]).astype(np.float32)
    assert np.array_equal(dequantize(quantize(x, "f32")), x)
    assert np.array_equal(dequantize(quantize(x, "f16")), x.astype(np.float16).astype(np.float32))
    bf16 = dequantize(quantize(x, "bf16"))
    # a significand of 8 bits: half a unit in the last place is at most 2**-8 of the value
    assert np.all(np.abs(bf16 - x) <= np.abs(x) * 2.0**-8)
    assert np.all(bf16.view(np.uint32) & 0xFFFF == 0)
    tie = np.uint32([0x3F808000, 0x3F818000]).view(np.float32)  # halves go to the even neighbour
    assert quantize(tie, "bf16").array.tolist() == [0x3F80, 0x3F82]
    assert quantize(weights(3, 4), "f16").array.dtype == np.float16


def test_names():
    assert FORMATS["Q3H"] is FORMATS["q3h_b64t1"]
    short = {"q8": "q8_b32t2", "q6": "q6_b64t1", "q5": "q5_b64t1", "q4": "q4_b32t1a"}
    short |= {"q3h": "q3h_b64t1", "q3": "q3_b32t1b", "q2": "q2_b32t1b", "fp16": "f16"}
    assert {name: FORMATS[name].name for name in short} == short
    assert set(FORMATS) >= set(GOLDEN) | set(FLOAT_FORMATS)
    assert "q4" in FORMATS
    assert "q99" not in FORMATS
    assert FORMATS.get("q99") is None
    with pytest.raises(UsageError, match=r"unknown format 'q4_b32'; did you mean 'q4_b32t1"):
        FORMATS["q4_b32"]


def test_rows_by_id():
    qt = quantize(weights(9, 70), "q5")
    ids = np.array([8, 0, 0, 3], np.int32)
    assert np.array_equal(dequantize_rows(qt, ids), dequantize(qt)[ids])
    out = np.full((4, 70), np.nan, np.float32)
    assert dequantize_rows(qt, ids, out) is out
    assert dequantize_rows(qt, ids[:0]).shape == (0, 70)
    with pytest.raises(UsageError, match=r"ids must lie in 0\.\.8, got -1\.\.9"):
        dequantize_rows(qt, np.array([-1, 9]))
    with pytest.raises(TypeError, match="ids must be a one-dimensional"):
        dequantize_rows(qt, np.zeros(3))


def test_zero_rows():
    qt = quantize(np.zeros((0, 40), np.float32), "q4")
    assert dequantize(qt).shape == (0, 40)
    assert qt.nbytes == 0
    assert qt.packed().nbytes == 0


def test_copies_share_the_format_and_not_the_packed_layout():
    qt = quantize(weights(20, 64), "q4")
    qt.packed()
    assert qt.packed_nbytes == 32 * 2 * 20  # 20 rows are padded to 32
    for other in (pickle.loads(pickle.dumps(qt)), copy.deepcopy(qt)):
        assert other.format is qt.format
        assert other.packed_nbytes == 0
        assert other.tobytes() == qt.tobytes()
    assert np.array_equal(dequantize(qt.rows(3, 5)), dequantize(qt)[3:5])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: quantize(np.array([1, 2]), "q4"),
            TypeError,
            "float32, float16 or float64, got int64",
        ),
        (lambda: quantize(np.float32(3), "q4"), UsageError, r"last axis .* got shape \(\)"),
        (lambda: quantize(np.zeros((2, 0), np.float32), "q4"), UsageError, r"shape \(2, 0\)"),
        (lambda: quantize(np.float32([[1], [np.nan]]), "q4"), UsageError, r"nan at \[1, 0\]"),
        (lambda: quantize(np.array([0, 1e39]), "q4"), UsageError, r"1e\+39 at \[1\] \(1 such"),
        (
            lambda: quantize(np.float32([0, 7e4]), "f16"),
            UsageError,
            "largest value is 65520; found",
        ),
        (
            lambda: quantize(np.zeros(4), "q4", quantizer="serach"),
            UsageError,
            "did you mean 'search'",
        ),
        (lambda: dequantize(np.zeros(4)), TypeError, "qt must be a QuantTensor, got ndarray"),
        (lambda: dequantize(quantize(np.zeros(4), "q4"), np.zeros(4)), TypeError, "out must have"),
        (
            lambda: QuantTensor.from_bytes(b"abc", "q4", (32,)),
            UsageError,
            "hold 20 bytes .*, got 3",
        ),
        (lambda: QuantTensor.from_bytes(b"", "q4", (4, 0)), UsageError, "last one >= 1"),
        (
            lambda: QuantTensor("q4", (32,), np.zeros((2, 20), np.uint8)),
            UsageError,
            r"\(1, 20\), got",
        ),
        (lambda: QuantTensor("q4", (32,), b"x"), TypeError, "uint8, got bytes"),
        (lambda: quantize(np.zeros(4), "q4").array, UsageError, "no array of floats"),
        (lambda: FORMATS["f16"].integer_form, UsageError, "f16 stores no integers"),
        (lambda: FORMATS["f32"].integers(np.zeros((1, 4), np.uint8)), UsageError, "no integers"),
        (lambda: quantize(np.zeros(4), "q4").rows(0, 2), UsageError, r"0\.\.1, got 0\.\.2"),
    ],
)
def test_errors_name_what_was_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_table_lists_every_format():
    lines = table(
        {"q3h_b64t1": {"error_search": 0.119, "gemv_f32_share_of_read": 0.5}}
    ).splitlines()
    assert len(lines) == 2 + len(FORMATS)
    assert {line.count("|") for line in lines} == {16}
    start = "| `q3h_b64t1` | `q3h` | 64 | 32 | 4 | - | - | 0.119 | 0.93 | - | - | - | - (50 %) |"
    assert any(line.startswith(start) for line in lines)


def test_half_conversion_agrees_with_numpy():
    # the quantizer rounds its parameters with LLVM, storage is read with NumPy
    values = np.random.default_rng(0).normal(0, 1, 500).astype(np.float32)
    values = np.concatenate([values, values * np.float32(1e-6), np.float32([65504, 6e-8, 0])])
    bits = np.array([_half(v) for v in values], np.uint16)
    assert np.array_equal(bits, values.astype(np.float16).view(np.uint16))


@njit
def _half(x):
    return simd.float_to_half(x)

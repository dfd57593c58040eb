"""Codec of cache rows: layouts against the formats, quantizer bit for bit, decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.formats.float8 import FLOAT8, encode_float8, float8_values
from nbflow_kernels.kv_cache import cpu_codec
from nbflow_kernels.kv_cache.codebooks import CODEBOOKS, decode_codebook, encode_codebook
from nbflow_kernels.kv_cache.cpu_codec import (
    FIRST_BLOCK_KIND,
    FIRST_CODEBOOK_KIND,
    KINDS,
    LAYOUTS,
    decode_row,
    encode_row,
)

BLOCK_FORMATS = list(KINDS)[FIRST_BLOCK_KIND:FIRST_CODEBOOK_KIND]
GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = (1, 15, 16, 20, 31, 33, 64, 80, 100, 128)


def written(x: np.ndarray, name: str) -> np.ndarray:
    """Return the rows of x encoded by `encode_row`, each followed by a guard byte."""
    n_rows, n = x.shape
    x = np.ascontiguousarray(x, np.float32)
    data = np.full((n_rows, nk.kv_format(name).row_bytes(n) + 1), 0xA5, np.uint8)
    for r in range(n_rows):
        encode_row(KINDS[name], address_of(x[r]), n, address_of(data[r]))
    assert (data[:, -1] == 0xA5).all()
    return data[:, :-1]


def decoded(data: np.ndarray, name: str, n: int, padded: int = 0) -> np.ndarray:
    """Return `decode_row` of every row, each followed by a guard float."""
    padded = padded or n
    out = np.full((len(data), padded + 1), 7, np.float32)
    data = np.ascontiguousarray(data)
    for r in range(len(data)):
        decode_row(KINDS[name], address_of(data[r]), n, address_of(out[r]), padded)
    assert (out[:, -1] == 7).all()
    return out[:, :-1]


def numbers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return rows of many magnitudes, without -0 (the sign of a zero base is unspecified)."""
    x = rng.standard_normal((30, n)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-9, 5, (30, 1)).astype(np.float32)
    x[0], x[1], x[2] = 0, 1.5, -3
    x[3] = np.round(4 * x[3] / np.abs(x[3]).max())  # ties and equal extremes
    x[4] = np.abs(x[4])
    x[5] *= np.float32(1e-38) / np.abs(x[5]).max()  # subnormal scales
    return np.asarray(x + np.float32(0))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_layout_is_that_of_the_weight_format(name: str) -> None:
    layout, format = LAYOUTS[KINDS[name]], FORMATS[name]
    assert isinstance(format, AffineFormat)
    assert layout[cpu_codec.BLOCK] == format.block_size
    assert layout[cpu_codec.BLOCK_BYTES] == format.block_bytes
    assert layout[cpu_codec.DIVISOR] == format.divisor
    assert layout[cpu_codec.SCALE_AT] == format.fields.at("scale")
    if layout[cpu_codec.MODE] != cpu_codec.SIGNED:
        assert layout[cpu_codec.N_CODES] == format.n_codes
        assert layout[cpu_codec.ZERO] == format.zero


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_written_bytes_are_the_reference_quantizers(name: str, rng: np.random.Generator) -> None:
    for n in SIZES:
        x = numbers(rng, n)
        want = nk.quantize(x, name, quantizer="reference")
        np.testing.assert_array_equal(written(x, name), want.data, err_msg=f"n = {n}")


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_any_bytes_decode_as_dequantize_does(name: str, rng: np.random.Generator) -> None:
    for n in SIZES:
        data = rng.integers(0, 256, (20, nk.kv_format(name).row_bytes(n)), np.uint8)
        qt = nk.QuantTensor(name, (20, n), data)
        np.testing.assert_array_equal(decoded(data, name, n), nk.dequantize(qt))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebook_rows_are_those_of_numpy(name: str, rng: np.random.Generator) -> None:
    for n in SIZES:
        x = numbers(rng, n)
        x[6, n // 2] = np.nan
        x[7, 0] = np.inf
        x[8, -1] = 1e20  # its square is infinite
        want = encode_codebook(x, name)
        np.testing.assert_array_equal(written(x, name), want, err_msg=f"n = {n}")
        # the sign of a NaN scale of random bytes may differ, its values are NaN
        data = rng.integers(0, 256, want.shape, np.uint8)
        for rows in (want, data):
            values = decode_codebook(rows, name)[:, :n].astype(np.float32)
            np.testing.assert_array_equal(decoded(rows, name, n), values)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebooks_have_least_squared_error_for_normal_numbers(
    name: str, rng: np.random.Generator
) -> None:
    book = CODEBOOKS[name]
    x = rng.standard_normal((4000, 32)).astype(np.float32)
    found = decode_codebook(encode_codebook(x, name), name)
    error = np.square(found - x).mean()
    published = {4: 0.009497, 3: 0.03454, 2: 0.1175}[book.bits]  # Max 1960, table I
    # numbers divided by the root mean square of their own 32 have shorter tails than normal ones,
    # and the fitted scale has no error along them: about 1 - 3 / 32
    assert 0.87 * published < error < 0.96 * published
    # levels are means of the numbers between their borders (Lloyd's condition)
    steps = book.unit * rng.standard_normal(1_000_000)
    codes = np.searchsorted(book.borders, steps)
    means = [steps[codes == code].mean() for code in range(1 << book.bits)]
    # half a unit of rounding of the level and as much of each border, and three standard errors
    np.testing.assert_allclose(book.levels, means, rtol=0, atol=1.2)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q6", "q3h", "lm3"])
def test_padding(name: str, rng: np.random.Generator) -> None:
    explicit = nk.kv_format(name).name
    for n in (20, 64, 100):
        data = written(numbers(rng, n), explicit)
        plain = decoded(data, explicit, n)
        for padded in (n, -(-n // 16) * 16, n + 37):
            got = decoded(data, explicit, n, padded)
            np.testing.assert_array_equal(got[:, :n], plain)
            assert not got[:, n:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(
    name: str, bad: float, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((1, 128)).astype(np.float32)
    x[0, 70] = bad
    got = decoded(written(x, name), name, 128)
    size = FORMATS[name].block_size
    first = 70 // size * size
    inside = np.zeros(128, bool)
    inside[first : first + size] = True
    np.testing.assert_array_equal(np.isnan(got[0]), inside)


def _bf16(x: np.ndarray) -> np.ndarray:
    return (nk.quantize(x, "bf16").array.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("name", "rounded"),
    [("f32", lambda x: x), ("f16", lambda x: x.astype(np.float16)), ("bf16", _bf16)],
)
def test_floats_round_to_nearest_and_keep_nan_and_infinity(
    name: str, rounded: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator
) -> None:
    x = rng.standard_normal((50, 35)).astype(np.float32)
    # halves between two bfloat16 or float16 neighbours
    x[0] = 1 + np.arange(35, dtype=np.float32) / 256
    x[1] = 1 + np.arange(35, dtype=np.float32) / 2048
    np.testing.assert_array_equal(decoded(written(x, name), name, 35), rounded(x))
    odd = np.tile(np.float32([np.nan, np.inf, -np.inf, -0.0, 0.0]), 7)[None]
    odd.view(np.uint32)[0, 5] = 0x7FFFFFFF  # a NaN whose payload must not carry into the exponent
    np.testing.assert_array_equal(decoded(written(odd, name), name, 35), odd)


def test_sizes_of_a_format() -> None:
    for name in KINDS:
        format = nk.kv_format(name)
        assert format.name == name
        assert format.row_bytes(128) * 8 / 128 == format.bits_per_value(128)
        assert format.row_length(128) * format.dtype.itemsize == format.row_bytes(128)
        if name in CODEBOOKS:
            bits = CODEBOOKS[name].bits + 0.5
        else:
            bits = 8 if name in FLOAT8 else FORMATS[name].bits_per_weight
        assert format.bits_per_value(128) == bits
    assert nk.kv_format("Q8").name == "q8_b32t2"
    assert nk.kv_format("fp16").dtype == np.float16
    assert nk.kv_format("q3h").row_bytes(80) == 64  # two blocks of 64
    assert not nk.kv_format("q2").is_float
    assert [f.name for f in nk.kv_formats("Q8 / f16")] == ["q8_b32t2", "f16"]
    assert nk.kv_formats("q4_0") == (nk.kv_format("q4_0"),) * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("q8_1", r"unknown kv_format 'q8_1'; did you mean 'q8_0'"),
        ("q4_b16", r"q4_b16 cannot hold a key/value cache.* take one of f32, f16, bf16, "),
        (None, "unknown kv_format None"),
    ],
)
def test_unknown_formats_are_refused_with_the_known_ones(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        nk.kv_format(name)


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_codes_decode_to_their_values(name: str) -> None:
    want = np.load(GOLDEN / "float8.npz")[name]  # torch's
    np.testing.assert_array_equal(float8_values(name).astype(np.float32), want)
    codes = np.arange(256, dtype=np.uint8)[None]
    np.testing.assert_array_equal(decoded(codes, name, 256)[0], want)
    np.testing.assert_array_equal(decoded(codes[:, 3:], name, 253, padded=270)[0, :253], want[3:])
    tail = decoded(codes[:, :21], name, 21, 40)[0]  # 16 at once, then one by one
    np.testing.assert_array_equal(tail, [*want[:21], *[0] * 19])


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_rounds_to_nearest_even_and_saturates(name: str, rng: np.random.Generator) -> None:
    finite = float8_values(name)[: FLOAT8[name].largest_code + 1].astype(np.float32)
    ties = (finite[1:] + finite[:-1]) / 2  # exact in float32
    around = np.concatenate(
        [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, finite[1:])]
    )
    special = np.array([np.nan, np.inf, 1e38, 460, 6e4, 1e-45, 2e-10, 0], np.float32)
    x = np.concatenate([finite, around, special, rng.standard_normal(999).astype(np.float32)])
    x = np.concatenate([x, -x])
    want = encode_float8(x, name)
    for n in (len(x), 3):  # vectors, and the numbers one by one
        rows = x[: len(x) // n * n].reshape(-1, n)
        np.testing.assert_array_equal(written(rows, name).ravel(), want[: rows.size])
    back = decoded(want[None], name, len(x))[0]
    assert (np.isnan(back) == np.isnan(x)).all()
    assert np.nanmax(np.abs(back)) == finite[-1]

"""Element types of weight files: sizes, and conversion to NumPy arrays."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError

_MAX_ELEMENTS = 1 << 48  # also bounds the other dimensions of an empty tensor
_WIDTHS = (8, 16, 32, 64)
_FLOAT8_TYPES = ("f8_e4m3", "f8_e5m2", "f8_e8m0", "f8_e4m3fnuz", "f8_e5m2fnuz")

ITEM_BITS: dict[str, int] = {
    "bool": 8,
    **{f"{kind}{bits}": bits for bits in _WIDTHS for kind in "ui"},
    **{"f4": 4, "f6_e2m3": 6, "f6_e3m2": 6},
    **dict.fromkeys(_FLOAT8_TYPES, 8),
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c32": 32, "c64": 64, "c128": 128},
}
"""Bits per element of every plain type; other names are block formats."""

ITEM_BYTES: dict[str, int] = {name: -(-bits // 8) for name, bits in ITEM_BITS.items()}
"""Bytes per element, rounded up."""

NUMPY: dict[str, str] = {
    "bool": "b1",
    **{f"{kind}{bits}": f"{kind}{bits // 8}" for bits in _WIDTHS for kind in "ui"},
    **dict.fromkeys(_FLOAT8_TYPES, "u1"),
    **{"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8"},
}
"""Readable types -> NumPy type of their bits, without byte order."""

WIDENED = frozenset({"bf16", *_FLOAT8_TYPES})
"""Types without a NumPy equivalent, read as float32, which is exact."""

# kind: exponent bits, mantissa bits, bias; OCP 8-bit Floating Point Specification 1.0, section 5,
# and for "fnuz" (no infinity, one NaN at -0) arXiv:2206.02915, section 2.
_FLOAT8 = {
    "f8_e4m3": (4, 3, 7),
    "f8_e5m2": (5, 2, 15),
    "f8_e4m3fnuz": (4, 3, 8),
    "f8_e5m2fnuz": (5, 2, 16),
}
_CHUNK = 1 << 16


def widen(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return elements of a type of `WIDENED`, given as unsigned integers, as float32.

    Examples
    --------
    >>> import numpy as np
    >>> widen(np.array([0x38, 0xC0, 0x7E], np.uint8), "f8_e4m3")
    array([  1.,  -2., 448.], dtype=float32)
    """
    floats = np.empty(bits.shape, np.float32)
    if dtype != "bf16":
        codes, values, table = bits.reshape(-1), floats.reshape(-1), _float8_values(dtype)
        for start in range(0, codes.size, _CHUNK):  # np.take allocates 8-byte indices
            chunk = slice(start, start + _CHUNK)
            np.take(table, codes[chunk], out=values[chunk], mode="clip")
        return floats
    pattern = floats.view(np.uint32)
    pattern[...] = bits
    pattern <<= 16
    return floats


@cache
def _float8_values(dtype: str) -> NDArray[np.float32]:
    """Return the values (256,) of an 8-bit float."""
    codes = np.arange(256)
    if dtype == "f8_e8m0":  # a power of two: OCP Microscaling Formats 1.0, section 5.4.1
        values = np.ldexp(np.float64(1), codes - 127)
        values[255] = np.nan
        return np.asarray(values, np.float32)
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float64)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias - mantissa_bits)
    if dtype == "f8_e4m3":
        values[codes & 127 == 127] = np.nan
    if dtype == "f8_e5m2":
        values[exponent == 31] = np.where(mantissa[exponent == 31], np.nan, np.inf)
    values = np.where(codes & 128, -values, values)
    if dtype.endswith("fnuz"):
        values[128] = np.nan
    return np.asarray(values, np.float32)


def tensor_bytes(dtype: str, shape: tuple[int, ...], where: str) -> int:
    """Return the bytes of a tensor of plain elements or of blocks (`nbflow_kernels.FORMATS`).

    Raises `UsageError`, which begins with `where`, if the type is unknown, the rows are not whole
    blocks, or the shape is too large.
    """
    if math.prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise UsageError(f"{where}: shape {shape} is too large for any tensor")
    if dtype in ITEM_BITS:
        n_bits = math.prod(shape) * ITEM_BITS[dtype]
        if n_bits % 8:
            raise UsageError(
                f"{where}: shape {shape} of {dtype} does not fill a whole number of bytes"
            )
        return n_bits // 8
    from nbflow_kernels.formats import FORMATS

    known = FORMATS.get(dtype)
    if known is None:
        raise UsageError(f"{where}: type {dtype} cannot be read")
    if not shape or shape[-1] % known.block_size:
        raise UsageError(
            f"{where}: rows of {dtype} must be multiples of {known.block_size}, got shape {shape}"
        )
    return int(math.prod(shape) // known.block_size * known.block_bytes)

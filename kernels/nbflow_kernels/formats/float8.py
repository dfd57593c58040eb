"""Float8 (OCP 8-bit floating point) of caches and results, in NumPy.

=========  ====  =================================================================================
`f8_e4m3`  1 B   4 exponent and 3 mantissa bits, up to 448; no infinity, NaN is 0x7f (`e4m3fn`)
`f8_e5m2`  1 B   5 exponent and 2 mantissa bits, up to 57344; the upper byte of a float16
=========  ====  =================================================================================

Numbers are rounded to nearest, ties to even.  Numbers beyond the largest one, infinity included,
become the largest one (CUDA's ``satfinite``); NaN stays NaN.  A row has no scale: `k_scale` and
`v_scale` of `run` are the factors of a whole cache, `scale` of `rmsnorm_quant` that of a result.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, on_host
from nbflow_kernels.errors import UsageError, unknown_name


class Float8(NamedTuple):
    """Fields of a float8 type."""

    mantissa: int
    """Mantissa bits."""
    bias: int
    """Exponent bias."""
    largest_code: int
    """Code of the largest finite number."""


FLOAT8 = {"f8_e4m3": Float8(3, 7, 0x7E), "f8_e5m2": Float8(2, 15, 0x7B)}
"""Name of a format to its type."""
FLOAT8_NAMES = {"float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2"}
"""Name of a dtype of other libraries to that of the format."""
NAN_CODE = 0x7F


@functools.cache
def float8_values(name: str) -> NDArray[np.float64]:
    """Return the value of each of the 256 codes."""
    type = FLOAT8[name]
    codes = np.arange(128)
    exponent, mantissa = codes >> type.mantissa, codes & ((1 << type.mantissa) - 1)
    fraction = mantissa / (1 << type.mantissa)
    values = np.where(
        exponent > 0,
        np.ldexp(1.0 + fraction, exponent - type.bias),
        np.ldexp(fraction, 1 - type.bias),
    )
    values[type.largest_code + 1 :] = np.nan
    if name == "f8_e5m2":
        values[type.largest_code + 1] = np.inf
    return np.concatenate([values, -values])


def encode_float8(x: NDArray[np.floating], name: str) -> NDArray[np.uint8]:
    """Return the codes of numbers."""
    finite = float8_values(name)[: FLOAT8[name].largest_code + 1]
    borders = (finite[1:] + finite[:-1]) / 2
    magnitude = np.abs(np.asarray(x, np.float64))
    below = np.searchsorted(borders, magnitude, side="left")
    tie = np.searchsorted(borders, magnitude, side="right") != below
    codes = np.where(tie, below + (below & 1), below)
    codes = np.where(np.isnan(magnitude), NAN_CODE, codes)
    coded: NDArray[np.uint8] = (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
    return coded


def decode_float8(codes: NDArray[np.uint8], name: str) -> NDArray[np.float64]:
    """Return the numbers of codes."""
    return float8_values(name)[np.asarray(codes).view(np.uint8)]


class Float8Codec(NamedTuple):
    """Float8 type of a result, and the factor of its numbers."""

    type: Float8
    factor: float


def float8_format(name: str | None, out: Any = None, default: str = "") -> str:
    """Return the format of a float8 result: the one named, that of `out`, or `default`."""
    found = FLOAT8_NAMES.get(out.dtype.name) if hasattr(out, "dtype") else None
    chosen = FLOAT8_NAMES.get(name, name) if name else found or default
    if chosen not in FLOAT8:
        raise unknown_name("float8 format", chosen or str(name), FLOAT8)
    if name and found and found != chosen:
        raise UsageError(f"out_format must be that of out, {found}, got {name}")
    return chosen


def float8_codes(name: str, out: Any, shape: tuple[int | None, ...], **options: Any) -> Any:
    """Return the codes of a float8 array as uint8, checked as `check_array` does."""
    if getattr(getattr(out, "dtype", None), "name", "") in FLOAT8_NAMES:
        out = out.view(np.uint8)
    check_array(name, out, shape, np.uint8, **options)
    return out


def number_of(name: str, value: Any, wanted: str = "positive and finite") -> float:
    """Return a positive finite number, which may be an array of one element."""
    found = np.asarray(on_host(value), np.float64)
    if found.size != 1:
        raise UsageError(
            f"{name} must be a scalar tensor or a number, got an array of shape {found.shape}"
        )
    number = float(found.reshape(-1)[0])
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{name} must be {wanted}, got {number}")
    return number

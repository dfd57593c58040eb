"""Float8 formats of the KV cache (OCP 8-bit floating point), in NumPy.

=========  ====  =================================================================================
`f8_e4m3`  1 B   4 exponent and 3 mantissa bits, up to 448; no infinity, NaN is 0x7f (`e4m3fn`)
`f8_e5m2`  1 B   5 exponent and 2 mantissa bits, up to 57344; the upper byte of a float16
=========  ====  =================================================================================

Numbers are rounded to nearest, ties to even.  Numbers beyond the largest one, infinity included,
become the largest one (CUDA's ``satfinite``); NaN stays NaN.  A row has no scale: `k_scale` and
`v_scale` of `run` are the factors of a whole cache, as FlashInfer has them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Float8(NamedTuple):
    """Fields of a float8 type."""

    mantissa: int
    """Mantissa bits."""
    bias: int
    """Exponent bias."""
    largest_code: int
    """Code of the largest finite number."""


FLOAT8 = {"f8_e4m3": Float8(3, 7, 0x7E), "f8_e5m2": Float8(2, 15, 0x7B)}
"""Name of a cache format to its type."""
FLOAT8_NAMES = {"float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2"}
"""Name of a dtype of other libraries to that of the cache format."""
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

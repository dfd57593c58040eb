"""A block format as integers: what every format tells the kernels about its weights.

All block formats decode to one formula,

    weight = d * factor * scale * value(code) + base,

with an integer `code` per weight, an integer `scale` per sub-block, and floats `d` (and what `base`
is made of) per block.  The compute layouts are made from this form, so a new format needs no
kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CodecSpec:
    """The part of the formula that is the same for all blocks of a format."""

    block: int
    """Weights that share `d`."""
    sub_block: int
    """Weights that share `scale` (and `min`); `block` where there is only one scale."""
    code_bits: int
    """Bits of a code, 1 to 8; codes are 0 .. 2**code_bits - 1 (or fewer)."""
    zero: int = 0
    """Without `values`: value(code) = code - zero."""
    values: tuple[int, ...] | None = None
    """With it: value(code) = values[code], each -128..127, 2**code_bits of them."""
    factor: float = 1.0
    """A power of two; ``d * factor * scale`` is exact in float32."""
    scales: bool = False
    """Whether there are integer scales (else 1), -128..255."""
    base: str = "none"
    """"none": base = 0; "d": base = `m` itself; "min": base = -m * min, with an integer min 0..255
    per sub-block."""
    pairs: bool = False
    """Whether codes are 0..10 and stored as c = x + 11 * y, so that two take 7 bits."""
    scale_bits: int = 8
    """4, if scales and mins are 0..15 and stored in a byte together; else 8."""
    d_type: str = "f16"
    """How `d` and `m` are stored: "f16"; "f32"; "e8m0": a power of two, 2**-128 to 2**127; "e4m3":
    half of an unsigned float of 4 bits of exponent (bias 7) and 3 of mantissa; "u8": d = u / 1000
    and m = v / 100 - 1 in float32."""


@dataclass(frozen=True)
class DecodedBlocks:
    """Rows of weights in that form; K is the padded number of columns."""

    codes: NDArray[np.uint8]
    """(rows, K)."""
    d: NDArray[np.float32]
    """(rows, K / block)."""
    m: NDArray[np.float32] | None = None
    """(rows, K / block); see `CodecSpec.base`."""
    scales: NDArray[np.int16] | None = None
    """(rows, K / sub_block)."""
    mins: NDArray[np.uint8] | None = None
    """(rows, K / sub_block)."""


def weights(form: CodecSpec, rows: DecodedBlocks) -> NDArray[np.float32]:
    """Return the weights (rows, K), rounded once to float32: the formula, as it stands above."""
    if form.values is None:
        value: Any = rows.codes.astype(np.float64) - form.zero
    else:
        value = np.array(form.values, np.float64)[rows.codes]
    step = np.repeat(rows.d.astype(np.float64), form.block // form.sub_block, axis=1) * form.factor
    if rows.scales is not None:
        step = step * rows.scales
    result = np.repeat(step, form.sub_block, axis=1) * value
    if rows.m is not None:
        base = np.repeat(rows.m.astype(np.float64), form.block // form.sub_block, axis=1)
        if rows.mins is not None:
            base = -base * rows.mins
        result = result + np.repeat(base, form.sub_block, axis=1)
    rounded: NDArray[np.float32] = result.astype(np.float32)
    return rounded

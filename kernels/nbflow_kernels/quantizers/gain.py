"""Gain correction: a least-squares quantizer shrinks weights, and this scales them back.

The projection of a weight block w onto what a format can express, v, has a gain
<v, w> / <w, w> below 1 (0.80 for ``iq1_s``, 0.89 for ``iq2_xxs`` with Gaussian weights), so all
outputs of the matrix shrink.  Multiplying the block's float scale by <w, w> / <v, w> gives a gain
of 1: the "unbiased scale" of EDEN (Vargaftik et al. 2022, arXiv:2108.08842, section 3).
Its squared error is larger; the divergence of a model is smaller at 3 bits and below.
"""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from nbflow_kernels.formats.bit_fields import pack_field, unpack_field
from nbflow_kernels.formats.block_format import FieldFormat
from nbflow_kernels.formats.codec_spec import Field
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat

LARGEST_HALF = 65504.0


def takes_gain(format: QuantFormat) -> TypeGuard[FieldFormat]:
    """Return True if the scales of a format are float16 numbers, which a gain can multiply."""
    return isinstance(format, FieldFormat) and format.stored_d_type == "f16"


def unit_gain(format: FieldFormat, x: Floats, data: Bytes, importance: Floats) -> Bytes:
    """Return blocks whose scales are multiplied by <x, x> / <v, x>.

    Parameters
    ----------
    format : FieldFormat
        A format with float16 scales.
    x : array of float32, shape (rows, columns)
        The weights, in whole blocks.
    data : array of uint8, shape (rows, row bytes)
        The quantized weights v.
    importance : array of float32, shape (1 or rows, columns)
        Weights of the two sums, e.g. mean squares of the inputs; 0 for padding.

    Notes
    -----
    A block keeps its scales if <v, x> <= 0, if no weight counts, or if a scale would not fit
    float16.
    """
    values = np.empty_like(x)
    format.dequantize_rows(data, values)
    blocks = (len(x), -1, format.block_size)
    weighted = (x * importance).reshape(blocks)
    have = np.einsum("rbk,rbk->rb", weighted, values.reshape(blocks), dtype=np.float64)
    want = np.einsum("rbk,rbk->rb", weighted, x.reshape(blocks), dtype=np.float64)
    factors = np.divide(want, have, out=np.ones_like(have), where=(have > 0) & (want > 0))
    result = data.reshape(-1, format.block_bytes).copy()
    fields = [format.fields[n] for n in format.float_fields if n in format.fields]
    _multiply(fields, factors.reshape(-1), result)
    return result.reshape(data.shape)


def _multiply(fields: list[Field], factors: Floats, blocks: Bytes) -> None:
    """Multiply the float16 numbers of fields of blocks (n, block_bytes) by factors (n,)."""
    numbers = [unpack_field(f, blocks).view(np.float16).astype(np.float64) for f in fields]
    scaled = [n * factors[:, None] for n in numbers]
    fits = np.all([np.abs(s).max(axis=1) <= LARGEST_HALF for s in scaled], axis=0)
    for field, old, new in zip(fields, numbers, scaled, strict=True):
        stored = np.where(fits[:, None], new, old).astype(np.float16).view(np.uint16)
        _clear(field, blocks)
        pack_field(field, stored, blocks)


def _clear(field: Field, blocks: Bytes) -> None:
    """Set the bits of a field to zero."""
    mask = np.zeros((1, blocks.shape[1]), np.uint8)
    ones = np.full((1, field.n), 2**field.bits - 1 ^ field.flip, np.uint16)
    pack_field(field, ones, mask)
    blocks &= ~mask

"""Encoding of a block in a codebook format on the CPU; `codebooks.py` defines the bytes."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_compare import where_ge
from nbflow_kernels.cpu.simd_memory import load_first
from nbflow_kernels.cpu.simd_shuffle import lookup
from nbflow_kernels.kv_cache.codebooks import CODEBOOKS, LEAST_ENERGY

MAX_BITS = 4
LEVELS = np.zeros((MAX_BITS + 1, 16), np.int32)
"""Levels by the bits of a codebook."""
for _book in CODEBOOKS.values():
    LEVELS[_book.bits, : 1 << _book.bits] = _book.levels


@jit.device_function(strict=True)
def levels_of(bits, codes):
    """Return the levels of 16 codes of the codebook of `bits` bits."""
    return lookup(simd.load_i32(simd.address(LEVELS) + 64 * bits), codes)


@jit.device_function(strict=True)
def codebook_codes(bits, unit, x, count, last):
    """Return scale, whether it is finite, and two vectors of codes of a block of `count` numbers.

    The scale is 0 for a block of zeros.
    """
    v, w = load_first(x, count, last), load_first(x + 64, count - 16, last)
    energy = simd.sum(simd.add(simd.mul(v, v), simd.mul(w, w)))
    finite, inverse = energy - energy == np.float32(0), np.float32(0)
    zero = energy < LEAST_ENERGY
    if not finite:
        v, w = simd.splat(0.0), simd.splat(0.0)
    elif not zero:
        inverse = np.float32(unit) / np.sqrt(energy / np.float32(32))
    a, b = _nearest(bits, v, inverse), _nearest(bits, w, inverse)
    p, q = simd.to_f32(levels_of(bits, a)), simd.to_f32(levels_of(bits, b))
    size = simd.sum(simd.add(simd.mul(p, p), simd.mul(q, q)))
    scale = np.float32(0)
    if not zero:
        scale = simd.sum(simd.add(simd.mul(v, p), simd.mul(w, q))) / size
    return scale, finite, a, b


@jit.device_function(strict=True)
def _nearest(bits, v, inverse):
    """Return the codes of the levels nearest to 16 numbers times `inverse`."""
    steps, codes = simd.mul(v, simd.splat(inverse)), simd.splat(0.0)
    one, zero = simd.splat(1.0), simd.splat(0.0)
    for j in range((1 << bits) - 1):
        border = np.float32(LEVELS[bits, j] + LEVELS[bits, j + 1]) * np.float32(0.5)
        codes = simd.add(codes, where_ge(steps, simd.splat(border), one, zero))
    return simd.to_i32(codes)

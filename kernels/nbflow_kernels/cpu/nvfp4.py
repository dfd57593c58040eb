"""NVFP4 rows on the CPU: E2M1 codes and an E4M3 scale for 16 of them, in two arrays."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.float8 import float8_code, float8_value
from nbflow_kernels.cpu.simd_compare import where_ge
from nbflow_kernels.cpu.simd_memory import read_u8
from nbflow_kernels.cpu.simd_narrow import load_fields4, store_fields4, write_u8
from nbflow_kernels.cpu.simd_shuffle import lookup

LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)
"""Twice the values of the codes."""
_ABOVE = np.nextafter(np.array([1.25, 2.5, 5.0, 0.25], np.float32), np.float32(9))
BORDERS = np.array([_ABOVE[3], 0.75, _ABOVE[0], 1.75, _ABOVE[1], 3.5, _ABOVE[2]], np.float32)
"""Least magnitudes that round to codes 1, 2, ...; a middle of two values to the even code."""
_MANTISSA, _BIAS, _LARGEST = 3, 7, 0x7E
NAN_SCALE = 0x7F


@jit.device_function(strict=True)
def decode_nvfp4_row(codes, scales, n, target):
    """Decode n numbers, a multiple of 16, to float32; exact."""
    levels = simd.load_i32(simd.address(LEVELS))
    for b in range(n // 16):
        scale = float8_value(_MANTISSA, _BIAS, read_u8(scales + b)) * np.float32(0.5)
        x = simd.to_f32(lookup(levels, load_fields4(codes + 8 * b)))
        simd.store_f32(target + 64 * b, simd.mul(x, simd.splat(scale)))


@jit.device_function(strict=True)
def encode_nvfp4_row(source, n, global_scale, codes, scales):
    """Encode n float32, a multiple of 16: the largest of 16 is 6 times their scale."""
    per_six = np.float32(1.0) / (np.float32(6.0) * global_scale)
    for b in range(n // 16):
        x = simd.load_f32(source + 64 * b)
        size = simd.as_f32(simd.and_(simd.as_i32(x), simd.splat_i32(0x7FFFFFFF)))
        code = float8_code(_MANTISSA, _BIAS, _LARGEST, simd.max(size) * per_six)
        if simd.sum(simd.mul(size, simd.splat(0.0))) != 0.0:  # NaN, or infinity times 0
            code = np.int64(NAN_SCALE)
        scale = float8_value(_MANTISSA, _BIAS, code) * global_scale
        inverse = np.float32(0.0)
        if scale > np.float32(0.0):
            inverse = np.float32(1.0) / scale
        steps, count = simd.mul(size, simd.splat(inverse)), simd.splat(0.0)
        for i in range(7):
            border = simd.splat(BORDERS[i])
            count = simd.add(count, where_ge(steps, border, simd.splat(1.0), simd.splat(0.0)))
        sign = simd.and_(simd.shr(simd.as_i32(x), simd.splat_i32(28)), simd.splat_i32(8))
        store_fields4(codes + 8 * b, simd.or_(simd.to_i32(count), sign))
        write_u8(scales + b, code)

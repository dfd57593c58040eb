"""Int8 quantization of 32 numbers, of activations and of queries; see `quantized_matmul`."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_int8

TINY = np.float32(2.0**-100)


@jit.device_function
def quantize_block(at, to):
    """Write the int8 codes of 32 float32; return their scale and the sums of either 16 codes."""
    magnitude = simd.splat_i32(0x7FFFFFFF)
    least, most = simd.splat(-127.0), simd.splat(127.0)
    low, high = simd.load_f32(at), simd.load_f32(at + 64)
    sizes = simd.maximum(
        simd.as_f32(simd.and_(simd.as_i32(low), magnitude)),
        simd.as_f32(simd.and_(simd.as_i32(high), magnitude)),
    )
    largest = simd.max(sizes)
    # 0, or NaN if a column is NaN or infinite
    broken = simd.sum(simd.add(simd.sub(low, low), simd.sub(high, high)))
    inverse = np.float32(0)
    scale = broken
    if largest >= TINY and broken == 0:
        inverse = np.float32(127) / largest
        scale = largest / np.float32(127)
    factor = simd.splat(inverse)
    low = simd.rint(simd.mul(low, factor))
    high = simd.rint(simd.mul(high, factor))
    low = simd.minimum(simd.maximum(low, least), most)  # a NaN too becomes an int
    high = simd.minimum(simd.maximum(high, least), most)
    simd_int8.store_narrow(to, simd.to_i32(low))
    simd_int8.store_narrow(to + 16, simd.to_i32(high))
    return scale, np.int32(simd.sum(low)), np.int32(simd.sum(high))

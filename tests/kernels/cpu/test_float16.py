"""float16 conversions, by the processor and from the bits."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from nbflow_kernels.cpu import float16, simd


@pytest.fixture(params=["processor", "bits"])
def kernels(request, monkeypatch):
    if request.param == "bits":
        monkeypatch.setattr(float16, "_converts", lambda: False)

    @njit
    def widen(bits, out):
        for i in range(0, len(bits), 16):
            v = simd.load_f16(simd.address(bits) + 2 * i)
            simd.store_f32(simd.address(out) + 4 * i, v)

    @njit
    def narrow(values, out):
        for i in range(len(values)):
            out[i] = simd.float_to_half(values[i])

    return widen, narrow


def test_all_float16_widen_exactly(kernels):
    bits = np.arange(65536, dtype=np.uint16)
    out = np.zeros(65536, np.float32)
    kernels[0](bits, out)
    want = bits.view(np.float16).astype(np.float32)
    same = out.view(np.uint32) == want.view(np.uint32)
    assert (same | (np.isnan(out) & np.isnan(want))).all()


def test_float32_narrow_to_the_nearest(kernels):
    half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    half = half[np.isfinite(half)]
    with np.errstate(over="ignore"):
        middle = (half + np.nextafter(half.astype(np.float16), np.float16(np.inf))) / 2
        near = [np.nextafter(middle.astype(np.float32), np.float32(s)) for s in (-9e9, 9e9)]
        rest = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65519, 65520, 1e-40, 3e38])
        values = np.concatenate([half, middle.astype(np.float32), *near, rest])
        want = values.astype(np.float16)
    out = np.zeros(len(values), np.uint16)
    kernels[1](values, out)
    assert ((out == want.view(np.uint16)) | (np.isnan(out.view(np.float16)) & np.isnan(want))).all()

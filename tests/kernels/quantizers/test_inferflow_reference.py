"""Inferflow's quantizer: the kernel against a NumPy reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.affine_format import ABSMAX, F16_SCALE, MIDRISE, U8_PAIR, AffineFormat
from nbflow_kernels.quantizers import quantize

NAMES = [n for n, f in FORMATS.items() if isinstance(f, AffineFormat) and f.rule <= ABSMAX]


def numpy_plain(format, x):
    """Return the bytes of blocks (n, block size)."""
    cutoff = np.float32(1e-5)
    with np.errstate(all="ignore"):
        if format.parameters == F16_SCALE:
            scale = np.abs(x).max(axis=1) / np.float32(format.divisor)
            inverse = np.where(scale < cutoff, np.float32(0), 1 / scale)
            steps = x * inverse[:, None]
            steps = np.copysign(np.floor(np.abs(steps) + np.float32(0.5)), steps) + format.zero
            base = np.zeros_like(scale)
        else:
            low = x.min(axis=1)
            if format.parameters == U8_PAIR:
                low = np.trunc(np.float32(100) * low + np.float32(100.01)) / np.float32(100) - 1
            scale = (x.max(axis=1) - low) / np.float32(format.divisor)
            inverse = np.where(scale < cutoff, np.float32(0), 1 / scale)
            steps = (x - low[:, None]) * inverse[:, None]
            steps = np.floor(steps + np.float32(1e-4 if format.rule == MIDRISE else 0.5))
            base = low + scale / 2 if format.rule == MIDRISE else low
        codes = np.clip(np.nan_to_num(steps), 0, format.n_codes - 1).astype(np.uint8)
        if format.parameters == U8_PAIR:
            stored = [np.float32(100) * base + np.float32(100.5), 1000 * scale + np.float32(0.5)]
            stored = [np.clip(np.trunc(v), 0, 255).astype(np.uint16) for v in stored]
        else:
            stored = [v.astype(np.float16).view(np.uint16) for v in (base, scale)]
    return format.blocks(codes, np.stack(stored, axis=1))


@pytest.mark.parametrize("name", NAMES)
def test_kernel_writes_the_bytes_of_the_numpy_form(name):
    format = FORMATS[name]
    rng = np.random.default_rng(9)
    x = rng.standard_normal((500, 2 * format.block_size), dtype=np.float32)
    scales = np.float32(10) ** rng.integers(-8, 5, (500, 1)).astype(np.float32)
    x = (x * scales + rng.integers(-1, 2, (500, 1)) * scales).astype(np.float32)
    x[0] = 0
    x[1] = 0.37
    x[2, 0] = 3e38  # the range overflows
    x[2, 1] = -3e38
    x[3] = np.round(x[3] * 16 / scales[3]) / 16  # ties
    want = numpy_plain(format, x.reshape(-1, format.block_size)).reshape(len(x), -1)
    assert np.array_equal(quantize(x, name, quantizer="reference").data, want)


def test_bytes_do_not_depend_on_threads():
    x = np.random.default_rng(10).standard_normal((1000, 1024), dtype=np.float32)
    before = get_num_threads()
    try:
        results = []
        for n in (1, 2):
            set_num_threads(n)
            results.append(quantize(x, "q4", quantizer="reference").data)
    finally:
        set_num_threads(before)
    assert np.array_equal(*results)


def test_every_format_of_inferflow_is_here():
    assert len(NAMES) == 15  # and q5h, which takes its rule
    assert "q5h_b64t1" in NAMES

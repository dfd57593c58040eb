"""Trellis-coded formats: the code, its decoders, and paths of least error."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import trellis_code as code
from nbflow_kernels.formats.trellis import TrellisFormat
from nbflow_kernels.quantizers import quantize_calibrated
from nbflow_kernels.quantizers.search import trellis as search
from nbflow_kernels.quantizers.trellis_reference import best_path

NAMES = ("q2t_b256", "q3t_b256", "q4t_b256")


def trellis_format(name: str) -> TrellisFormat:
    found = nk.FORMATS[name]
    assert isinstance(found, TrellisFormat)
    return found


def any_blocks(name: str, n_rows: int, n_blocks: int) -> nk.QuantTensor:
    """Return a tensor of random streams with random scales."""
    format, rng = trellis_format(name), np.random.default_rng(0)
    data = rng.integers(0, 256, (n_rows, n_blocks, format.block_bytes)).astype(np.uint8)
    d = rng.uniform(0.5, 2, (n_rows, n_blocks, 1)).astype(np.float16)
    data[:, :, :2] = d.view(np.uint8)
    return nk.QuantTensor(format, (n_rows, 256 * n_blocks), data.reshape(n_rows, -1))


def decoded_by_hand(block: np.ndarray, bits: int) -> list[float]:
    """Decode a block bit by bit, as the docstring of `trellis_code` says."""
    stream = [int(block[2 + i // 8]) >> i % 8 & 1 for i in range(256 * bits)]
    stream = [0] * 12 + stream
    weights = []
    for t in range(256):
        state = stream[bits * (t + 1) : bits * (t + 1) + 12]
        index = sum(bit << i for i, bit in enumerate(state[5:]))
        for i, mask in enumerate(code.MIXING):
            index ^= sum(bit for j, bit in enumerate(state[:4]) if mask >> j & 1) % 2 << i
        weights.append(int(code.levels(bits)[index]) - 128)
    d = float(block[:2].view(np.float16)[0])
    return [d * value for value in weights]


@pytest.mark.parametrize("name", NAMES)
def test_all_decoders_agree_with_the_definition(name):
    w = any_blocks(name, 19, 3)
    format = trellis_format(name)
    blocks = w.data.reshape(-1, format.block_bytes)
    whole = nk.dequantize(w)
    want = [decoded_by_hand(block, format.stream_bits) for block in blocks[:4]]
    assert np.array_equal(whole.reshape(-1, 256)[:4], np.float32(want))
    assert np.array_equal(format.dequantize_blocks(blocks).reshape(whole.shape), whole)
    w.drop_storage()  # only the CPU layout is left
    assert np.array_equal(nk.dequantize(w), whole)


def test_levels_are_antisymmetric_and_fit_a_byte():
    for bits in (2, 3, 4):
        values = code.levels(bits).astype(int) - 128
        assert np.array_equal(values, -values[::-1])
        assert values.max() == 127  # the scale is as fine as it can be
    assert len(set(code.flips().tolist())) == 16  # each choice of the oldest bits is another subset


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_state_holds_the_last_12_bits_of_the_stream(bits):
    stream = np.random.default_rng(1).integers(0, 256, (3, 32 * bits)).astype(np.uint8)
    states = code.states_of_stream(stream, bits)
    newest = states[:, :, None] >> np.arange(12 - bits, 12) & 1
    ones = newest.reshape(len(states), -1).astype(np.uint8)
    assert np.array_equal(np.packbits(ones, axis=1, bitorder="little"), stream)
    shared = (1 << 12 - bits) - 1
    assert np.array_equal(states[:, 1:] & shared, states[:, :-1] >> bits)
    assert not (states[:, 0] & shared).any()


@pytest.mark.parametrize("name", NAMES)
def test_search_finds_the_path_of_least_error(name):
    format, rng = trellis_format(name), np.random.default_rng(2)
    bits = format.stream_bits
    x = rng.standard_normal((2, 256)).astype(np.float32)
    weight = rng.uniform(0.1, 2, (2, 256)).astype(np.float32)
    step = np.float32(1 / 42)
    streams, _ = search.search(x, weight, bits, np.array([step]))
    values = code.codes_of_states(bits).astype(np.float64) - 128
    for row in range(2):
        w = weight[row].astype(np.float64) / weight[row].mean()
        scale = float(np.sqrt((w * x[row].astype(np.float64) ** 2).mean()) * step)
        found = code.states_of_stream(streams[row : row + 1], bits)[0]
        best = best_path(x[row], w, scale, bits)
        errors = [(w * (scale * values[path] - x[row]) ** 2).sum() for path in (found, best)]
        # the kernel adds errors in float32: 256 roundings of 2**-24 of sums of about 1e6, in units
        # of which the error of a block is at least 1e3
        assert errors[1] * (1 - 1e-9) <= errors[0] <= errors[1] * (1 + 256 * 2**-24 * 1e3)


@pytest.mark.parametrize(
    ("name", "most"), [("q2t_b256", 0.165), ("q3t_b256", 0.18), ("q4t_b256", 0.23)]
)
def test_bits_wasted_on_normal_weights(name, most):
    x = np.random.default_rng(3).standard_normal((16, 2048)).astype(np.float32)
    waste = {}
    for quantizer in ("reference", "search"):
        w = nk.quantize(x, name, quantizer=quantizer)
        error = np.sqrt(np.square(nk.dequantize(w) - x).mean() / np.square(x).mean())
        waste[quantizer] = w.format.bits_per_weight + np.log2(error)
    # 0.155, 0.168 and 0.213 on 2**20 weights; 2**15 scatter by 0.004
    assert waste["search"] < most
    assert waste["search"] < waste["reference"] < waste["search"] + 0.06


def test_importance_moves_the_error():
    x = np.random.default_rng(4).standard_normal((4, 512)).astype(np.float32)
    importance = np.where(np.arange(512) % 4 == 0, 1, 0.01).astype(np.float32)
    squares = [
        (np.square(nk.dequantize(nk.quantize(x, "q2t", importance=given)) - x) * importance).sum()
        for given in (None, importance)
    ]
    assert squares[1] < 0.3 * squares[0]


@pytest.mark.parametrize("name", NAMES)
def test_awkward_blocks(name):
    rng = np.random.default_rng(5)
    normal = rng.standard_normal(300).astype(np.float32)
    x = np.stack([0 * normal, 0 * normal + 3, 1e-5 * normal, 1e-12 * normal, 1e6 * normal])
    got = nk.dequantize(nk.quantize(x, name))
    assert np.isfinite(got).all()
    assert not got[0].any()
    assert not got[3].any()  # float16 has no such scale
    error = np.sqrt(np.square(got - x).mean(axis=1) / np.square(x).mean(axis=1).clip(1e-30))
    assert error[1] < 0.3  # constants are as hard as any weights
    # the scale of 1e-5 is a float16 of 2 to 3 bits
    assert error[2] < 0.5
    assert error[4] < 0.3
    huge = nk.dequantize(nk.quantize(1e30 * normal[None], name))
    assert np.abs(huge).max() == 65504 * 127  # the largest scale


def test_bytes_do_not_depend_on_threads_or_other_rows():
    x = np.random.default_rng(6).standard_normal((24, 256)).astype(np.float32)
    alone = np.concatenate([nk.quantize(row[None], "q3t").data for row in x])
    for threads in (1, 2):
        set_num_threads(threads)
        assert np.array_equal(nk.quantize(x, "q3t").data, alone)


def test_blocks_are_decoded_without_their_neighbours():
    w = any_blocks("q2t", 5, 4)
    whole = nk.dequantize(w)
    assert np.array_equal(nk.dequantize(w.columns(256, 768)), whole[:, 256:768])
    assert np.array_equal(nk.dequantize(w.rows(1, 4)), whole[1:4])
    with pytest.raises(UsageError, match="between blocks of 256"):
        w.columns(128, 512)


def test_what_takes_no_trellis_says_so():
    x = np.ones((2, 256), np.float32)
    with pytest.raises(UsageError, match="q2t"):
        nk.kv_format("q2t")
    with pytest.raises(UsageError, match="q2t_b256"):
        quantize_calibrated(x, "q2t", "gptq", np.eye(256))
    with pytest.raises(UsageError, match="q2t_b256"):
        quantize_calibrated(x, "q2t", "hqq")

"""Quantized GEMV and GEMM on CUDA devices: formats, batch invariance, the MMA layout."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
import nbflow_ptx
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats import layout_mma as units
from nbflow_kernels.formats.layout_mma import unit_form
from nbflow_kernels.moe import cuda as experts
from nbflow_kernels.quantized_matmul import cuda as products
from nbflow_kernels.quantized_matmul import cuda_dequant_gemm, reference

pytestmark = pytest.mark.compiler
BLOCK_FORMATS = [name for name, f in FORMATS.items() if f.block_bytes / f.block_size < 2]
# a format for each kind of codes and scales, hence for each kernel
KINDS = ("q4_0", "q2_k", "q3h", "q5h", "iq2_s", "q4_b16")


def make(format: str, T: int, N: int, K: int) -> tuple[np.ndarray, nk.QuantTensor]:
    rng = np.random.default_rng([T, N, K])
    w = rng.standard_normal((N, K), dtype=np.float32) / np.float32(K**0.5)
    return rng.standard_normal((T, K), dtype=np.float32), nk.quantize(
        w, format, quantizer="reference"
    )


def allowed(K: int) -> float:
    """Return the tolerance of a sum (`quantized_matmul.cases`)."""
    return 3 * (K + 8) ** 0.5 * 1.4e-7


@pytest.mark.parametrize("format", [*BLOCK_FORMATS, "uint4_g64", "uint4_g64_base", "nf4_b64"])
def test_units_hold_the_weights_of_every_format(format: str, cupy: Any) -> None:
    # one unit and a part, a row tile and a part; columns that end within a block
    w = make(format, 1, 21, 300)[1]
    there = w.to_device(cupy.zeros(1))
    there.drop_storage()
    wanted = nk.dequantize(w)
    found = nk.dequantize(there, cupy.full(w.shape, np.nan, np.float32)).get()
    assert np.array_equal(found.view(np.int32), wanted.view(np.int32))
    ids = cupy.asarray(np.array([20, -1, 9, 21], np.int32))
    rows = nk.embedding(ids, there, scale=2.0).get()
    assert np.array_equal(rows[::2], 2 * wanted[[20, 9]])
    assert np.isnan(rows[1::2]).all()


def test_bytes_are_divided_by_two_instructions_as_a_division_rounds() -> None:
    """Check the constants that `scale_of` passes to `divided`."""
    source = (Path(units.__file__).parent / "decode_mma.cuh").read_text()
    found = re.findall(r"divided\(byte_at\(.*\), (\S+)f, (\S+)f\)", source)
    u = np.arange(256, dtype=np.float32)
    for (inverse, rest), n in zip(found, (1000, 100), strict=True):
        # an fma: a product of 32 bits, and a summand 24 bits below
        whole = u.astype(np.float64) * np.float32(inverse) + u * np.float32(rest)
        assert (whole.astype(np.float32) == u / np.float32(n)).all()


@pytest.mark.parametrize("format", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(format: str, cupy: Any) -> None:
    x, w = make(format, 17, 37, 1100)  # 9 chunks: one or two in each of 8 splits
    there, x_there = w.to_device(cupy.zeros(1)), cupy.asarray(x)
    many = nk.qmatmul(x_there, there).get()
    assert np.abs(many - reference.qmatmul(x, w)).max() <= allowed(1100)
    for n in (1, 8, 12):  # 12: small tiles; `cases.py` has other numbers of rows
        few = nk.qmatmul(x_there[3 : 3 + n], there).get()
        assert few.tobytes() == many[3 : 3 + n].tobytes()


@pytest.mark.parametrize("format", ["q4_0", "q5_0", "q2_k", "q3h", "iq4_xs", "mxfp4"])
def test_rows_in_bfloat16_have_the_bits_of_panels(format: str, cupy: Any) -> None:
    # 300 columns: 5 steps for 8 splits, which end within units; a format per decoder
    x, w = make(format, 12, 21, 300)
    there, x_there = w.to_device(cupy.zeros(1)), cupy.asarray(x)
    panels = cupy.empty((12, 21), np.float32)
    cuda_dequant_gemm.qmatmul(x_there, there, None, False, panels)
    for n in (12, 3):
        few = nk.qmatmul(x_there[:n], there, activations="bf16").get()
        assert few.tobytes() == panels[:n].get().tobytes()


@pytest.mark.parametrize(("n_tokens", "n_sms"), [(33, 4), (9, 100)])
def test_thread_blocks_in_bfloat16_share_splits(
    n_tokens: int, n_sms: int, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(cupy.ndarray.__kernel_device__), "n_sms", n_sms)
    x, w = make("q4_0", n_tokens, 40, 1100)  # 18 steps: splits of 2 and 3
    there, x_there, bias = w.to_device(cupy.zeros(1)), cupy.asarray(x), cupy.asarray(x[0, :40])
    panels, old = cupy.empty((n_tokens, 40), np.float32), cupy.asarray(x[:, :40].copy())
    panels[...] = old
    cuda_dequant_gemm.qmatmul(x_there, there, bias, True, panels)
    options = {"activations": "bf16", "bias": bias, "accumulate": True, "out": old}
    assert nk.qmatmul(x_there, there, **options).get().tobytes() == panels.get().tobytes()


@pytest.mark.parametrize("format", ["q4_0", "q2_k", "q4_b16"])
def test_int8_activations_have_the_same_bits_in_any_batch(format: str, cupy: Any) -> None:
    x, w = make(format, 12, 37, 600)
    there, x_there = w.to_device(cupy.zeros(1)), cupy.asarray(x)
    many = nk.qmatmul(x_there, there, activations="int8").get()
    wanted = reference.qmatmul(x, w, activations="int8")
    assert np.abs(many - wanted).max() <= allowed(600)
    few = nk.qmatmul(x_there[5:6], there, activations="int8").get()
    assert few.tobytes() == many[5:6].tobytes()


def test_sums_of_int8_activations_are_exact(cupy: Any) -> None:
    # integer weights and activations with scales of 1: a sum is at most 600 * 127 * 128 < 2**24
    rng = np.random.default_rng(8)
    dense, x = (rng.integers(-127, 128, (n, 600)).astype(np.float32) for n in (21, 3))
    dense[:, ::32] = x[:, ::32] = 127
    w = nk.quantize(dense, "q8_0", quantizer="reference")
    got = nk.qmatmul(cupy.asarray(x), w.to_device(cupy.zeros(1)), activations="int8").get()
    assert np.array_equal(got, x.astype(np.int64) @ dense.astype(np.int64).T)


@pytest.mark.parametrize(
    ("n_tiles", "tokens", "grid"),
    [
        (1792, 16, (128, 1, 1, 14)),  # 28672 rows: a thread block for each of 128 processors
        (896, 32, (64, 2, 1, 14)),
        (256, 16, (16, 8, 1, 16)),
        (1792, 40, (128, 1, 2, 14)),
    ],
)
def test_thread_blocks_have_equal_shares(n_tiles: int, tokens: int, grid: tuple[int, ...]) -> None:
    form = unit_form(FORMATS["q4_0"].integer_form)
    shape = products.GemmShape.of(form, -(-tokens // 8))
    assert shape.grid(132, n_tiles, -(-tokens // 8)) == grid
    assert grid[0] * grid[3] >= n_tiles


def test_splits_per_thread_block_do_not_change_a_bit(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = make("q4_0", 4, 40, 4200)
    there, x_there = w.to_device(cupy.zeros(1)), cupy.asarray(x)
    whole = nk.qmatmul(x_there, there).get()
    device = type(cupy.ndarray.__kernel_device__)
    for n_bytes in (48 << 10, 24 << 10, 24 << 10):  # again: arrival counters are reset
        monkeypatch.setattr(device, "max_shared_bytes", n_bytes)
        assert nk.qmatmul(x_there, there).get().tobytes() == whole.tobytes()


def test_many_thread_blocks_do_not_change_a_bit(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = make("q4_0", 33, 40, 2100)
    there, x_there = w.to_device(cupy.zeros(1)), cupy.asarray(x)
    some = nk.qmatmul(x_there, there).get()
    monkeypatch.setattr(type(cupy.ndarray.__kernel_device__), "n_sms", 100)
    for _ in range(2):
        assert nk.qmatmul(x_there, there).get().tobytes() == some.tobytes()
    one = nk.qmatmul(x_there[:1], there).get()
    assert one.tobytes() == some[:1].tobytes()


@pytest.mark.parametrize(
    ("min_rows", "activations"), [(16, "f32"), (0, "f32"), (16, "bf16"), (16, "int8"), (0, "bf16")]
)
def test_grouped_gemm_has_the_bits_of_single_products(
    min_rows: int, activations: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "MIN_ROWS_TO_SYNC", min_rows)  # 0: one after the other
    x, w = make("q4_0", 9, 3 * 21, 300)
    stack = nk.QuantTensor("q4_0", (3, 21, 300), w.data).to_device(cupy.zeros(1))
    indptr = np.array([0, 4, 4, 9], np.int32)
    x_there = cupy.asarray(x)
    arithmetic = {"activations": activations}
    got = nk.grouped_matmul(x_there, stack, cupy.asarray(indptr), **arithmetic).get()
    for e, (start, stop) in enumerate(pairwise(indptr)):
        if start < stop:
            part = x_there[int(start) : int(stop)]
            alone = nk.qmatmul(part, stack.matrices()[e], **arithmetic).get()
            assert got[start:stop].tobytes() == alone.tobytes()


def test_large_and_small_activations_keep_22_bits(cupy: Any) -> None:
    x, w = make("q4_0", 4, 21, 300)
    x *= np.float32([[1e-30], [1e30], [1], [0]])
    x[2, 5] = 1e4  # its neighbours have errors of 2**-30 of it
    got = nk.qmatmul(cupy.asarray(x), w.to_device(cupy.zeros(1))).get()
    wanted = reference.qmatmul(x, w)
    scale = np.abs(x).max(axis=1, keepdims=True)
    assert (np.abs(got - wanted) <= allowed(300) * scale).all()
    assert (got[3] == 0).all()


def test_nan_and_infinity_stay_in_their_row(cupy: Any) -> None:
    x, w = make("q3h", 3, 21, 300)
    x[0, 7], x[2, 9] = np.nan, np.inf
    got = nk.qmatmul(cupy.asarray(x), w.to_device(cupy.zeros(1))).get()
    assert not np.isfinite(got[[0, 2]]).any()
    assert np.isfinite(got[1]).all()


def test_outliers_are_added(cupy: Any) -> None:
    rng = np.random.default_rng(5)
    dense = rng.standard_normal((21, 300)).astype(np.float32)
    w = nk.quantize(dense, "q3", quantizer="reference", outliers=0.01)
    x = rng.standard_normal((3, 300)).astype(np.float32)
    got = nk.qmatmul(cupy.asarray(x), w.to_device(cupy.zeros(1))).get()
    assert np.abs(got - reference.qmatmul(x, w)).max() <= 20 * allowed(300)  # weights times 17


def test_units_take_the_bits_of_the_storage_layout() -> None:
    # a 6-bit scale is a byte here: 2 * 2 bits for 32 weights; 3-bit scales of q3_k 2 bits for 16;
    # pairs of 11 bits (q5h) are two codes of 6 bits; trellises store a state for 256 weights
    wider = {"q4_k": 0.125, "q5_k": 0.125, "q3_k": 0.125, "iq4_xs": 0.0625, "q5h_b64t1": 0.5}
    wider |= dict.fromkeys(("q2t_b256", "q3t_b256", "q4t_b256"), 0.0625)
    for name in (*BLOCK_FORMATS, "nf4_b64", "fp4_b32"):
        if not name.startswith(("iq1", "iq2", "iq3", "tq1")):
            got = unit_form(FORMATS[name].integer_form).bits_per_weight
            assert got == FORMATS[name].bits_per_weight + wider.get(name, 0), name
    assert unit_form(FORMATS["iq2_xxs"].integer_form).bits_per_weight == 3.3125
    assert unit_form(FORMATS["tq1_0"].integer_form).bits_per_weight == 2.0625


def test_the_layout_pads_rows_to_16_and_columns_to_128() -> None:
    w = make("q4_0", 1, 17, 416)[1]
    made = units.pack(w.format, w.data, 416)
    assert made.nbytes == 2 * 16 * 4 * 128 * 4.5 / 8


def test_a_users_format_without_integer_form(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_dequant_gemm, "MAX_GRID_ROWS", 2)  # more rows than a grid has

    @nk.register_format
    class Halves:
        name = "halves_b4"
        block_size, block_bytes = 4, 4

        @staticmethod
        def quantize_block(x: Any, out: Any) -> None:
            for i in range(4):
                out[i] = np.uint8(min(max(x[i] * 16 + 128, 0), 255))

        @staticmethod
        def dequantize_block(block: Any, out: Any) -> None:
            for i in range(4):
                out[i] = (np.float32(block[i]) - np.float32(128)) / np.float32(16)

    try:
        x, w = make("halves_b4", 3, 21, 40)
        for activations in ("f32", "int8", "bf16"):
            got = nk.qmatmul(
                cupy.asarray(x), w.to_device(cupy.zeros(1)), activations=activations
            ).get()
            wanted = reference.qmatmul(x, w, activations=activations)
            assert np.abs(got - wanted).max() <= allowed(40)
    finally:
        nk.unregister_format("halves_b4")


def test_storage_can_be_dropped_on_a_device(cupy: Any) -> None:
    x, w = make("q4_0", 2, 21, 300)
    there = w.to_device(cupy.zeros(1))
    there.drop_storage()
    assert there.on_device
    assert there.units_nbytes > 0
    assert np.isfinite(nk.qmatmul(cupy.asarray(x), there).get()).all()
    half = nk.dequantize(there, cupy.full(w.shape, np.nan, np.float16)).get()
    np.testing.assert_array_equal(half, nk.dequantize(w).astype(np.float16))
    stack = nk.QuantTensor("q4_0", (3, 7, 300), w.data).to_device(cupy.zeros(1))  # 3 row tiles
    stack.drop_storage()
    np.testing.assert_array_equal(nk.dequantize(stack).get().reshape(21, 300), nk.dequantize(w))
    with pytest.raises(UsageError, match="storage bytes of this tensor were dropped"):
        there.to_host()


def test_host_and_device_arrays_are_not_mixed(cupy: Any) -> None:
    x, w = make("q4_0", 2, 21, 300)
    with pytest.raises(UsageError, match="x is on a CUDA device and w in host memory"):
        nk.qmatmul(cupy.asarray(x), w)
    with pytest.raises(UsageError, match="w is on a CUDA device and x in host memory"):
        nk.qmatmul(x, w.to_device(cupy.zeros(1)))
    with pytest.raises(UsageError, match="bias in host memory"):
        nk.matmul(cupy.asarray(x), cupy.asarray(x), bias=np.zeros(2, np.float32))


def _facts(kernel: Any, arch: str) -> nbflow_ptx.KernelFacts:
    code, entry = kernel.compile(arch, "ptx")
    facts = nbflow_ptx.lint(code.decode(), arch)[entry]
    assert facts.registers is not None, facts.registers_from
    return facts


@pytest.mark.parametrize(
    ("format", "arch", "n_mma"),
    [
        # MMAs of a unit: 16 steps x high and low, and 2 chunks x high and low for the sums
        ("q4_0", "sm_80", 36),
        ("q4_0", "sm_90", 36),
        ("q3h", "sm_90", 36),
        ("q4_k", "sm_90", 36),
        ("q2t", "sm_90", 32),  # no sums
        ("nf4_b64", "sm_90", 48),  # and the second number of a weight
    ],
)
def test_hot_kernels_stay_in_registers(format: str, arch: str, n_mma: int) -> None:
    form = unit_form(FORMATS[format].integer_form)
    gemv = _facts(products.gemv_kernel(form, 1, True), arch)
    gemm = _facts(products.gemm_kernel(form, products.GemmShape.of(form, 4), True), arch)
    # two thread blocks of `gemv` per SM leave 128 registers: up to 8 values that change once a row
    # tile may spill, with `gemm` 12 of a unit's 4000 instructions
    assert max(gemv.spill_stores or 0, gemv.spill_loads or 0) <= 32
    assert max(gemm.spill_stores or 0, gemm.spill_loads or 0) <= 48
    assert gemv.tensor_core == n_mma
    for facts in (gemv, gemm):
        assert (facts.fp64, facts.local_accesses) == (0, 0)
        assert facts.wide_loads > 0
    assert gemm.async_copies


@pytest.mark.parametrize(
    "arithmetic", [products.ActivationPrecision.INT8_SUMS, products.ActivationPrecision.BF16]
)
def test_int8_and_bfloat16_take_one_mma_per_step(
    arithmetic: products.ActivationPrecision,
) -> None:
    form = unit_form(FORMATS["q4_k"].integer_form)
    gemv = _facts(products.gemv_kernel(form, 8, True, arithmetic), "sm_90")
    shape = products.GemmShape.of(form, 4, arithmetic)
    gemm = _facts(products.gemm_kernel(form, shape, True, arithmetic), "sm_90")
    sums = 2 * 2 if arithmetic == products.ActivationPrecision.INT8_SUMS else 0
    assert gemv.tensor_core == 16 + sums
    assert gemm.tensor_core == 2 * 4 * (16 + sums)  # row tiles, groups of tokens
    for facts in (gemv, gemm):
        assert (facts.spill_stores, facts.spill_loads) == (0, 0)
        assert facts.wide_loads > 0


@pytest.mark.parametrize("format", ["nf4_b128", "q3t"])
def test_codebooks_across_lanes_have_the_same_bits_in_any_batch(format: str, cupy: Any) -> None:
    # 5 chunks: the last unit has one, and a trellis goes on from chunk to chunk
    x, w = make(format, 9, 21, 600)
    there, x_there = w.to_device(cupy.zeros(1)), cupy.asarray(x)
    there.drop_storage()
    assert not there.has_storage  # products read the stored bits
    many = nk.qmatmul(x_there, there, out=cupy.full((9, 21), np.nan, np.float32)).get()
    assert np.abs(many - reference.qmatmul(x, w)).max() <= allowed(600)
    few = nk.qmatmul(x_there[8:], there, out=cupy.full((1, 21), np.nan, np.float32)).get()
    assert few.tobytes() == many[8:].tobytes()
    rounded = nk.qmatmul(x_there, there, activations="bf16").get()
    assert np.abs(rounded - reference.qmatmul(x, w, activations="bf16")).max() <= allowed(600)
    panels = cupy.full((9, 21), np.nan, np.float32)
    cuda_dequant_gemm.qmatmul(x_there, there, None, False, panels)
    assert rounded.tobytes() == panels.get().tobytes()


def test_codebooks_of_floats_are_multiplied_as_floats(cupy: Any) -> None:
    x, w = make("nf4_b64", 2, 37, 300)
    with pytest.raises(UsageError, match="block format of integers"):
        nk.qmatmul(cupy.asarray(x), w.to_device(cupy.zeros(1)), activations="int8")
    form = unit_form(w.format.integer_form)
    kinds = products.ActivationPrecision
    assert kinds.of(form, "int8") == kinds.F32_SUMS
    assert not products._rounds_first(form, "int8")
    stack = nk.QuantTensor("nf4_b64", (1, 37, 300), w.data).to_device(cupy.zeros(1))
    indptr = cupy.asarray(np.array([0, 2], np.int32))
    got = nk.grouped_matmul(cupy.asarray(x), stack, indptr).get()
    assert np.abs(got - reference.qmatmul(x, w)).max() <= allowed(300)

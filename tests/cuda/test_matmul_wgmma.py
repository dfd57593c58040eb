"""GEMM by `wgmma`: the bits of `mma.sync`, choice of the instruction, clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

import nbflow_kernels as nk
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.cuda import device_of
from nbflow_kernels.errors import UsageError
from nbflow_kernels.matmul import cuda as float_cuda
from nbflow_kernels.matmul import cuda_wgmma
from nbflow_kernels.quantized_matmul import cuda as products
from nbflow_kernels.quantized_matmul import cuda_dequant_gemm, cuda_gemm_wgmma, reference

pytestmark = pytest.mark.compiler
TOKENS, ROWS = 50, 75
"""Less than a tile; rows that end within a warp."""


@pytest.fixture
def hopper(cupy: Any) -> Any:
    """Emulated CuPy on a device of compute capability 9.0."""
    cupy.reset(arch="sm_90")
    return cupy


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply `TOKENS` tokens as a prompt."""
    monkeypatch.setattr(float_cuda, "MIN_WGMMA_TOKENS", TOKENS)
    monkeypatch.setattr(products, "BF16_MAX_ROWS", TOKENS - 1)


def make(format: str, K: int) -> tuple[np.ndarray, nk.QuantTensor]:
    rng = np.random.default_rng(K)
    w = rng.standard_normal((ROWS, K), dtype=np.float32) / np.float32(K**0.5)
    quantizer = "reference" if format.startswith("q") else "search"
    x = rng.standard_normal((TOKENS, K), dtype=np.float32)
    return x, nk.quantize(w, format, quantizer=quantizer)


# columns: 9 steps and a part; fewer steps than splits; half a unit at the end, splits that start
# in the middle of a chunk
@pytest.mark.parametrize(
    ("format", "activations", "K"),
    [
        ("f16", "f32", 584),  # two parts
        ("bf16", "f32", 136),  # three
        ("q4_k", "bf16", 704),
        ("q3h_b64t1", "bf16", 192),
    ],
)
@pytest.mark.usefixtures("few_are_many")
def test_wgmma_has_the_bits_of_mma(
    format: str, activations: str, K: int, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = make(format, K)
    there, x_there = w.to_device(hopper.zeros(1)), hopper.asarray(x)
    bias = np.linspace(-1, 1, ROWS, dtype=np.float32)
    results = []
    for chosen in (("0", ""), ("1", "0"), ("1", "1")):  # last: a thread block without rows
        for name, value in zip(("NBFLOW_WGMMA", "NBFLOW_CLUSTERS"), chosen, strict=True):
            monkeypatch.setenv(name, value)
        out = hopper.asarray(np.ones((TOKENS, ROWS), np.float32))
        nk.qmatmul(
            x_there, there, bias=hopper.asarray(bias), activations=activations, accumulate=True,
            out=out,
        )  # fmt: skip
        results.append(out.get())
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    wanted = reference.qmatmul(x, w, bias=bias, activations=activations) + 1
    # float32 sums of K terms (`quantized_matmul.cases`), and one more of numbers up to 8: 2**-21
    assert np.abs(results[1] - wanted).max() <= 3 * (K + 8) ** 0.5 * 1.4e-7 + 2.0**-21


@pytest.mark.usefixtures("few_are_many")
def test_a_trellis_has_the_bits_of_panels(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = make("q2t", 448)
    there, x_there = w.to_device(hopper.zeros(1)), hopper.asarray(x)
    results = []
    # panels by mma; decoded in registers; panels by wgmma
    for switch, most_tokens in (("0", TOKENS), ("1", TOKENS), ("1", TOKENS - 1)):
        monkeypatch.setenv("NBFLOW_WGMMA", switch)
        monkeypatch.setattr(cuda_dequant_gemm, "MAX_TRELLIS_TOKENS", most_tokens)
        out = hopper.full((TOKENS, ROWS), np.nan, np.float32)
        in_registers = cuda_dequant_gemm.decodes_tiles(device_of(out), there, TOKENS)
        assert in_registers == (len(results) == 1)
        results.append(nk.qmatmul(x_there, there, activations="bf16", out=out).get())
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    wanted = reference.qmatmul(x, w, activations="bf16")
    assert np.abs(results[1] - wanted).max() <= 3 * (448 + 8) ** 0.5 * 1.4e-7


def test_tiles_of_any_size_have_the_same_bits(hopper: Any) -> None:
    x, w = make("f16", 264)
    tokens, weights = hopper.asarray(np.tile(x, (2, 1))), w.to_device(hopper.zeros(1)).array
    results = []
    # two tiles; a tile larger than the tokens; both with a cluster, one thread block without rows,
    # the second with fewer stages (3) than steps
    for tile, cluster in ((64, 1), (192, 1), (64, 2), (192, 2)):
        out = hopper.empty((2 * TOKENS, ROWS), np.float32)
        staged = cuda_wgmma.stage(tokens, "float16", 2, tile, row_major=True)
        cuda_wgmma.multiply_staged(staged, weights, None, False, out, cluster)
        results.append(out.get())
    assert len({r.tobytes() for r in results}) == 1
    assert results[0][:TOKENS].tobytes() == results[0][TOKENS:].tobytes()


def test_both_instructions_add_alike(xp: Any) -> None:
    """Results are independent of the batch on a device that does; else a log line says so."""
    if hasattr(xp, "reset"):
        xp.reset(arch="sm_90")
    device = device_of(xp.zeros(1))
    if device.arch != "sm_90":
        pytest.skip(f"{device.arch} has no wgmma")
    assert all(float_cuda.same_bits(device, dtype) for dtype in ("float16", "uint16"))
    assert float_cuda.use_wgmma(device, 65)
    assert not float_cuda.use_wgmma(device, 64)


def test_a_difference_is_logged_once_and_the_environment_decides(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = device_of(hopper.zeros(1))
    monkeypatch.setattr(float_cuda, "same_bits", lambda *_: False)
    for switch, used in (("0", False), ("1", True)):
        monkeypatch.setenv("NBFLOW_WGMMA", switch)
        assert float_cuda.use_wgmma(device, 512) == used
    assert not caplog.records
    monkeypatch.delenv("NBFLOW_WGMMA")
    for _ in range(2):
        assert float_cuda.use_wgmma(device, 512)
    (record,) = caplog.records
    assert "NBFLOW_WGMMA=0 makes all products use mma.sync" in record.getMessage()
    monkeypatch.setenv("NBFLOW_WGMMA", "yes")
    with pytest.raises(UsageError, match="NBFLOW_WGMMA must be 0, 1 or empty, got 'yes'"):
        float_cuda.use_wgmma(device, 512)
    monkeypatch.delenv("NBFLOW_WGMMA")
    hopper.reset(arch="sm_80")
    assert not float_cuda.use_wgmma(device_of(hopper.zeros(1)), 512)


SPLIT = {"fixed_split_size": 4}  # pages: of 64 keys
MANY: dict[str, tuple[Any, ...]] = {  # format, columns, queries, rows, options
    "two parts": ("f16", (64, 64), np.float32, 22, SPLIT),
    "chunks that one warpgroup sees": ("f16", (128, 64), np.float16, 22, {"window_left": 9}),
    "one warpgroup, queries in lines": ("bf16", (128, 64), np.float32, 7, {}),
    "sums in memory": ("f16", (64, 256), np.float16, 22, SPLIT),
    "sums in memory, a cap": ("f16", (64, 192), np.float32, 7, {"logits_soft_cap": 5.0}),
    "blocks": ("f16/q8_0", (64, 64), np.float16, 7, {}),
}


@pytest.mark.parametrize("name", MANY)
def test_attention_prefill_has_the_bits_of_decode(
    name: str, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one and two warpgroups, with and without split KV."""
    format, (D_qk, D_vo), dtype, n, options = MANY[name]
    rng = np.random.default_rng(len(name))
    rows = ints(0, n, n + 6)  # of three query vectors each
    paged = Paged(rng, [110, 9], (3, 1, D_qk), 16, "HND", dim_vo=D_vo, format=format)
    cache = tuple(hopper.asarray(pages) for pages in paged.cache)
    q = hopper.asarray(normal(rng, n + 6, 3, D_qk).astype(dtype))
    wrapper = nk.BatchPrefillWithPagedKVCacheWrapper(kv_layout="HND")
    paged.plan(wrapper, rows, **options)
    assert wrapper.current is not None
    found = []
    for chosen, may_split in (("0", 1), ("1", 1), ("1", 0))[: 3 if options is SPLIT else 2]:
        monkeypatch.setenv("NBFLOW_WGMMA", chosen)
        wrapper.current.header[at.MAY_SPLIT] = may_split
        wrapper.current.on_devices.clear()
        out, lse = wrapper.run(q, cache, return_lse=True)
        assert np.isfinite(out.get()).all()
        found.append(out.get().tobytes() + lse.get().tobytes())
    assert len(set(found)) == 1


def test_tiles_fill_the_processors() -> None:
    def chosen(*args: Any) -> tuple[int, int]:
        tiling = cuda_wgmma.tiling(*args)
        return tiling.tokens, tiling.cluster

    # 4096 rows are 32 row tiles, for 132 processors
    assert chosen(512, 4096, 132) == (128, 2)  # one wave
    assert chosen(128, 4096, 132) == (64, 1)  # 64 thread blocks instead of 32
    assert chosen(1536, 28672, 132) == (192, 2)  # 14 waves, fewest bytes
    assert chosen(1536, 28672, 132, 128, cuda_gemm_wgmma.WEIGHT_COST) == (128, 2)
    assert chosen(1536, 28672, 132, 192, 128, (1,)) == (192, 1)
    assert chosen(1536, 28672, 131) == (192, 2)  # the last SM cannot be part of a cluster
    assert chosen(4096, 128, 22) == (192, 1)  # one row tile
    assert chosen(65, 75, 4, 192, 128, (2,)) == (64, 2)  # only clusters
    assert chosen(384, 4100, 132) == (128, 2)  # 33 row tiles, one thread block without rows


def test_clusters_have_the_bits_of_single_thread_blocks(
    xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd number of row tiles: the last thread block has no rows but copies its tokens."""
    n_tokens, n_rows, n_columns = 1500, 4200, 4096
    if hasattr(xp, "reset"):
        xp.reset(arch="sm_90")
        n_tokens, n_rows, n_columns = 70, 260, 448  # 7 steps: more than stages
    if device_of(xp.zeros(1)).arch != "sm_90":
        pytest.skip("clusters are of compute capability 9.0")
    monkeypatch.setenv("NBFLOW_WGMMA", "1")
    rng = np.random.default_rng(0)
    w = rng.standard_normal((n_rows, n_columns), dtype=np.float32)
    there = nk.quantize(w, "q8_0", quantizer="reference").to_device(xp.zeros(1))
    tokens = xp.asarray(rng.standard_normal((n_tokens, n_columns), dtype=np.float32))
    results = []
    for value in ("0", "1"):
        monkeypatch.setenv("NBFLOW_CLUSTERS", value)
        results.append(nk.qmatmul(tokens, there, activations="bf16").get())
    assert results[0].tobytes() == results[1].tobytes()


def test_environment_restricts_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, sizes in (("0", (1,)), ("1", (2,)), ("", (1, 2))):
        monkeypatch.setenv("NBFLOW_CLUSTERS", value)
        assert cuda_wgmma.cluster_sizes() == sizes
    monkeypatch.setenv("NBFLOW_CLUSTERS", "2")
    with pytest.raises(UsageError, match="NBFLOW_CLUSTERS must be 0, 1 or empty, got '2'"):
        cuda_wgmma.cluster_sizes()

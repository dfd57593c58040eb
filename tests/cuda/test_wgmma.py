"""Products of many tokens by `wgmma`: the bits of `mma.sync`, and who takes which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged import Paged, ints, normal

import nbflow_kernels as nk
from nbflow_kernels.attention import layout as at
from nbflow_kernels.cuda import device_of
from nbflow_kernels.errors import UsageError
from nbflow_kernels.matmul import wgmma
from nbflow_kernels.qmatmul import reference

pytestmark = pytest.mark.compiler
TOKENS, ROWS = 50, 75
"""Less than a tile; rows that end within a warp's."""


@pytest.fixture
def hopper(cupy: Any) -> Any:
    """Emulated CuPy on a device of compute capability 9.0."""
    cupy.reset(arch="sm_90")
    return cupy


def make(format: str, K: int) -> tuple[np.ndarray, nk.QuantTensor]:
    rng = np.random.default_rng(K)
    w = rng.standard_normal((ROWS, K), dtype=np.float32) / np.float32(K**0.5)
    encoder = "plain" if format.startswith("q") else "best"
    x = rng.standard_normal((TOKENS, K), dtype=np.float32)
    return x, nk.quantize(w, format, encoder=encoder)


# columns: a piece of a step behind 8 steps and one; fewer steps than slots; half a unit at the end,
# and slots that begin in the middle of a chunk
@pytest.mark.parametrize(
    ("format", "activations", "K"),
    [
        ("f16", "f32", 584),  # two parts
        ("bf16", "f32", 136),  # three
        ("q4_k", "bf16", 704),
        ("q3h_b64t1", "bf16", 192),
    ],
)
def test_many_tokens_have_the_bits_of_few(
    format: str, activations: str, K: int, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = make(format, K)
    there, x_there = w.to_device(hopper.zeros(1)), hopper.asarray(x)
    bias = np.linspace(-1, 1, ROWS, dtype=np.float32)
    monkeypatch.setattr(wgmma, "MORE_THAN", TOKENS - 1)
    results = []
    for chosen in ("0", "1"):
        monkeypatch.setenv("NBFLOW_WGMMA", chosen)
        out = hopper.asarray(np.ones((TOKENS, ROWS), np.float32))
        nk.qmatmul(
            x_there, there, bias=hopper.asarray(bias), activations=activations, accumulate=True,
            out=out,
        )  # fmt: skip
        results.append(out.get())
    assert results[0].tobytes() == results[1].tobytes()
    wanted = reference.qmatmul(x, w, bias=bias, activations=activations) + 1
    # float32 sums of K terms (`qmatmul.cases`), and one more of numbers up to 8: 2**-21
    assert np.abs(results[1] - wanted).max() <= 3 * (K + 8) ** 0.5 * 1.4e-7 + 2.0**-21


def test_tiles_of_any_size_have_the_same_bits(hopper: Any) -> None:
    x, w = make("bf16", 72)
    tokens, weights = hopper.asarray(np.tile(x, (2, 1))), w.to_device(hopper.zeros(1)).array
    results = []
    for tile in (64, 192):  # two tiles, and more than the tokens
        out = hopper.empty((2 * TOKENS, ROWS), np.float32)
        lines = wgmma.stage(tokens, "uint16", 1, tile, in_pieces=True)
        wgmma.multiply_lines(lines, weights, None, False, out)
        results.append(out.get())
    assert results[0].tobytes() == results[1].tobytes()
    assert results[0][:TOKENS].tobytes() == results[0][TOKENS:].tobytes()


def test_both_instructions_add_alike(xp: Any) -> None:
    """On a device: what invariance rests on there, or it stays with `mma.sync`."""
    if hasattr(xp, "reset"):
        xp.reset(arch="sm_90")
    device = device_of(xp.zeros(1))
    if device.arch != "sm_90":
        pytest.skip(f"{device.arch} has no wgmma")
    assert wgmma.agrees(device)
    assert wgmma.takes(device, 65)
    assert not wgmma.takes(device, 64)


def test_the_environment_and_the_devices_bits_decide(
    hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = device_of(hopper.zeros(1))
    device.constants["matmul", "wgmma agrees"] = False  # as if it had been found
    assert not wgmma.takes(device, 512)
    monkeypatch.setenv("NBFLOW_WGMMA", "1")
    assert wgmma.takes(device, 512)
    device.constants["matmul", "wgmma agrees"] = True
    monkeypatch.setenv("NBFLOW_WGMMA", "0")
    assert not wgmma.takes(device, 512)
    monkeypatch.setenv("NBFLOW_WGMMA", "yes")
    with pytest.raises(UsageError, match="NBFLOW_WGMMA must be 0, 1 or empty, got 'yes'"):
        wgmma.takes(device, 512)
    monkeypatch.delenv("NBFLOW_WGMMA")
    hopper.reset(arch="sm_80")
    assert not wgmma.takes(device_of(hopper.zeros(1)), 512)


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
def test_attention_has_the_bits_of_few_vectors(
    name: str, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one warpgroup and of two, split along their keys and not."""
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
    # 4096 rows are 32 row tiles, for 132 processors
    assert wgmma.tile_tokens(512, 4096, 132) == 128  # one wave
    assert wgmma.tile_tokens(128, 4096, 132) == 64  # 64 thread blocks instead of 32
    assert wgmma.tile_tokens(1536, 28672, 132) == 192  # 14 waves, fewest bytes
    assert wgmma.tile_tokens(1536, 28672, 132, 128) == 128

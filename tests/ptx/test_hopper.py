"""Kernels with mbarriers, bulk copies and ``wgmma``: every check finds the bug planted for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nbflow_ptx import NO_CHECKS, Checks, Emulator, KernelFault, nvrtc

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(
        not nvrtc.available(), reason="needs numba-cuda: pip install -e '.[cuda-test]'"
    ),
]
SOURCE = (Path(__file__).parent / "kernels" / "hopper.cu").read_text()
#: kernel: a part of what the check says
CASES = {
    "wgmma_accumulator": "is an accumulator of a wgmma that was not waited for",
    "wgmma_unfenced": "no wgmma.fence before",
    "wgmma_late": "was written after the latest wgmma.fence",
    "wgmma_fragment": "is part of A of a wgmma that was not waited for",
    "wgmma_end": "ends with a wgmma it never waits for",
    "wgmma_descriptor": "more than one descriptor of B",
    "proxy_store": "A of bytes stored without a fence.proxy.async since: byte 0 of",
    "proxy_unpublished": "an mbarrier initialised without a fence",
    "proxy_overwritten": "cp.async.bulk of bytes stored without",
    "race_order": "races with another thread",
    "race_tile": "of bytes a wgmma not waited for reads",
    "race_unwaited": "of bytes an asynchronous copy not waited for writes",
    "race_once": "of bytes an asynchronous copy not waited for writes",
    "race_phase": "of bytes an asynchronous copy not waited for writes",
    "race_early": "mbarrier.arrive in shared memory races",
    "race_handed": "load in shared memory races",
    "race_copies": "of bytes an asynchronous copy not waited for writes",
    "race_released": "asynchronous copy",
    "uninitialised_unwritten": "byte 1600 of shared array 's'",
    "bounds_outside": "B of 16 bytes out of bounds",
    "aligned_pattern": "in row 1 of a pattern of 1024 bytes",
    "masks_part": "not all 128 threads of the warpgroup",
    "barrier_bytes": "deadlock",
    "barrier_count": "1 arrivals at an mbarrier of which phase 0 waits for 0 of 1 arrivals",
}


@pytest.fixture(scope="module")
def hopper() -> Emulator:
    text = nvrtc.compile_source(SOURCE, "sm_90a", file_name="hopper.cu").text
    return Emulator(text, exact_mma=True)  # to compare with NumPy


def launch(emulator: Emulator, name: str, checks: Checks | None = None) -> np.ndarray:
    x = np.random.default_rng(0).integers(-9, 10, (4 * 144, 8)).astype(np.float16)
    y = np.zeros(512, np.float32)
    emulator.checks = checks or Checks(budget=50_000)
    emulator.launch(name, 2, 160 if "released" in name else 128, x, y)
    return y


@pytest.mark.parametrize("name", list(CASES))
def test_finds_the_bug(hopper: Emulator, name: str) -> None:
    launch(hopper, f"{name}_ok")
    with pytest.raises(KernelFault) as e:
        launch(hopper, name)
    finding = e.value.finding
    assert finding.check == name.split("_")[0]
    assert CASES[name] in finding.message
    assert "hopper.cu:" in finding.where
    assert finding.thread is not None


@pytest.mark.parametrize(
    "name",
    [n for n in CASES if n.startswith(("wgmma", "proxy", "race", "aligned", "uninit", "bounds"))],
)
def test_each_check_can_be_switched_off(hopper: Emulator, name: str) -> None:
    field = {"race": "races"}.get(name.split("_")[0], name.split("_")[0])
    checks = replace(Checks(budget=50_000), **{field: False})
    if field == "races":  # without a wait, the bytes have not arrived when they are read
        checks = replace(checks, uninitialised=False)
    launch(hopper, name, checks)


def test_a_phase_that_never_ends_is_described(hopper: Emulator) -> None:
    with pytest.raises(KernelFault) as e:
        launch(hopper, "barrier_bytes")
    waiting, what = e.value.finding.notes
    assert waiting.startswith("128 threads (the first: (0, 0, 0)) wait at")
    assert what == (
        "the mbarrier at byte 0 of shared array 'bar' of 8 bytes: "
        "phase 0 waits for 0 of 1 arrivals and 16 bytes"
    )


def tiles(x: np.ndarray) -> np.ndarray:
    """Return tiles (.., lines, 16) as columns of 16 bytes, each of all lines."""
    *rest, lines, _ = x.shape
    return np.ascontiguousarray(np.moveaxis(x.reshape(*rest, lines, 2, 8), -2, -3))


def test_repaired_kernels_compute(hopper: Emulator) -> None:
    """Four tiles through one buffer, filled again when the products of it are done."""
    x = np.random.default_rng(0).integers(-9, 10, (4, 144, 8)).astype(np.float16)
    y = launch(hopper, "race_released_ok").reshape(128, 4)
    a = np.moveaxis(x[:, :128].reshape(4, 2, 64, 8), 1, 2).reshape(4, 64, 16)
    b = np.moveaxis(x[:, 128:].reshape(4, 2, 8, 8), 1, 2).reshape(4, 8, 16)
    want = np.einsum("rik,rjk->ij", a.astype(np.float64), b.astype(np.float64))
    for t in range(128):
        row, col = 16 * (t // 32) + t % 32 // 4, 2 * (t % 4)
        assert y[t].tolist() == [*want[row, col : col + 2], *want[row + 8, col : col + 2]]


@pytest.mark.parametrize("checks", [Checks(), NO_CHECKS], ids=["checks", "no checks"])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_warpgroups_with_roles(hopper: Emulator, n: int, checks: Checks) -> None:
    """Copies, two warpgroups and three stages; exact sums are rounded once at each step."""
    rng = np.random.default_rng(n)
    a = rng.standard_normal((2, n, 128, 16)).astype(np.float16)
    b = rng.standard_normal((n, 8, 16)).astype(np.float16)
    y = np.zeros((2, 128, 8), np.float32)
    hopper.checks = checks
    parts = tiles(a.reshape(2, n, 2, 64, 16))  # one tile per warpgroup
    hopper.launch("pipeline", 2, 384, parts, tiles(b), y, n, shared_bytes=3 * (4096 + 256))
    want = np.zeros((2, 128, 8), np.float32)
    for k in range(n):
        step = a[:, k].astype(np.float64) @ b[k].astype(np.float64).T
        want = (step + want).astype(np.float32)
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    ("old", "new", "check", "why"),
    [
        ("if (k && threadIdx.x % 128 == 0) arrive(empty + (k - 1) % STAGES);",
         "if (threadIdx.x % 128 == 0) arrive(empty + k % STAGES);",
         "race", "of bytes a wgmma not waited for reads"),
        ("init(empty + s, 2)", "init(empty + s, 1)", "barrier", "arrivals"),
        ("k / STAGES & 1 ^ 1", "k / STAGES & 1", "barrier", "deadlock"),
        ("wait(full + k % STAGES, k / STAGES & 1);", "", "race", "asynchronous copy"),
        ("publish();", "", "proxy", "mbarrier"),
        ("  finish<0>();\n", "", "wgmma", "accumulator"),
        ("meet<256>(1);\n  float", "float", "race", "store in shared memory"),
        ("expect(bar, sizeof(Stage));", "expect(bar, 4096);", "race", "asynchronous copy"),
    ],
)  # fmt: skip
def test_mistakes_in_the_pipeline_are_found(old: str, new: str, check: str, why: str) -> None:
    """Typical mistakes in such a kernel, one at a time."""
    head, *parts = SOURCE.split("// ---- ")
    assert parts[-1].count(old) == 1
    source = head + "//" + parts[-1].replace(old, new)
    emulator = Emulator(nvrtc.compile_source(source, "sm_90a").text, checks=Checks(budget=50_000))
    a, b = np.zeros((8, 4096), np.uint8), np.zeros((8, 256), np.uint8)
    rng = np.random.default_rng(0)
    a[...], b[...] = rng.integers(0, 60, a.shape), rng.integers(0, 60, b.shape)
    y = np.zeros((128, 8), np.float32)
    with pytest.raises(KernelFault, match=why) as e:
        emulator.launch("pipeline", 1, 384, a, b, y, 8, shared_bytes=3 * (4096 + 256))
    assert e.value.finding.check == check

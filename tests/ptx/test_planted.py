"""Every check finds the bug planted for it, and nothing in the repaired kernel.

The kernels are in kernels/planted.cu; kernels/planted.ptx is what NVRTC 12.9 makes of it for
sm_80, with line information (`test_compiled.py` recompiles it where NVRTC is installed).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbflow_ptx import NO_CHECKS, Checks, Device, Emulator, KernelFault, out

KERNELS = Path(__file__).parent / "kernels"
SOURCE = (KERNELS / "planted.cu").read_text().splitlines()


def f(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def z(n: int) -> np.ndarray:
    return np.zeros(n, np.int32)


#: kernel: grid, block, arguments, dynamic shared bytes
CASES: dict[str, tuple[Any, ...]] = {
    "bounds": (5, 32, (f(128), f(128), 128), 0),
    "bounds_shared": (2, 32, (f(32),), 128),
    "aligned": (1, 8, (f(40), f(8)), 0),
    "uninitialised_shared": (1, 64, (f(64), f(64)), 0),
    "uninitialised_local": (1, 8, (np.arange(8, dtype=np.int32), f(8)), 0),
    "race_raw": (2, 64, (f(64), f(64)), 0),
    "race_war": (2, 64, (f(128), f(64)), 0),
    "race_waw": (1, 64, (z(64),), 0),
    "race_warp": (1, 32, (z(32),), 0),
    "race_blocks": (4, 32, (f(1),), 0),
    "race_last_block": (4, 32, (f(4), np.zeros(1, np.uint32), f(1)), 0),
    "race_named": (1, 128, (f(64), f(64)), 0),
    "race_async": (1, 32, (f(128), f(128)), 0),
    "barrier_left": (2, 64, (f(64), 60), 0),
    "barrier_split": (1, 64, (z(64),), 0),
    "barrier_crossed": (1, 64, (z(64),), 0),
    "masks_divergent": (1, 64, (z(64),), 0),
    "masks_own": (1, 32, (z(32),), 0),
    "masks_source": (1, 32, (z(32),), 0),
    "masks_gone": (1, 32, (z(32),), 0),
    "budget": (1, 1, (z(1), 0), 0),
}
#: a part of the source line each report must point at
LINES = {
    "bounds": "y[i] = x[i]",
    "bounds_shared": "s[threadIdx.x + 1]",
    "aligned": "float4 v",
    "uninitialised_shared": "y[t] = s[t]",
    "uninitialised_local": "y[threadIdx.x] = a[",
    "race_raw": "y[t] = s[63 - t]",
    "race_war": "s[t] = x[64 * r + t]",
    "race_waw": "s[threadIdx.x >> 1] = threadIdx.x",
    "race_warp": "y[t] = s[t ^ 1]",
    "race_blocks": "total[0] + 1.0f",
    "race_last_block": "s += part[b]",
    "race_named": "y[t - 64] = s[127 - t]",
    "race_async": "y[threadIdx.x] = s[threadIdx.x]",
    "barrier_left": "__syncthreads()",
    "barrier_split": "__syncthreads()",
    "barrier_crossed": "bar.sync 1, 64",
    "masks_divergent": "__shfl_xor_sync",
    "masks_own": "__ballot_sync",
    "masks_source": "__shfl_sync",
    "masks_gone": "__reduce_add_sync",
    "budget": "while",
}


@pytest.fixture(scope="module")
def planted() -> Emulator:
    return Emulator((KERNELS / "planted.ptx").read_text())


def launch(emulator: Emulator, name: str, checks: Checks | None = None) -> list[Any]:
    grid, block, args, shared = CASES[name.removesuffix("_ok")]
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    emulator.checks = checks or Checks(budget=5000)
    emulator.launch(name, grid, block, *args, shared_bytes=shared)
    return args


@pytest.mark.parametrize("name", list(CASES))
def test_finds_the_bug(planted: Emulator, name: str) -> None:
    with pytest.raises(KernelFault) as e:
        launch(planted, name)
    finding = e.value.finding
    assert finding.check == name.split("_")[0]
    assert finding.kernel == name
    assert finding.where.startswith("planted.cu:")
    line = int(finding.where.split(":")[1].split()[0])
    assert LINES[name] in SOURCE[line - 1]
    assert finding.block is not None
    assert finding.thread is not None


@pytest.mark.parametrize("name", list(CASES))
def test_passes_the_repaired_kernel(planted: Emulator, name: str) -> None:
    launch(planted, f"{name}_ok")


@pytest.mark.parametrize(
    "name", [n for n in CASES if not n.startswith(("barrier_crossed", "budget", "race_async"))]
)
def test_each_check_can_be_switched_off(planted: Emulator, name: str) -> None:
    field = {"race": "races"}.get(name.split("_")[0], name.split("_")[0])
    launch(planted, name, replace(Checks(budget=5000), **{field: False}))


def test_all_checks_off(planted: Emulator) -> None:
    """Out-of-bounds loads give zero, stores are dropped."""
    args = launch(planted, "bounds", NO_CHECKS)
    np.testing.assert_array_equal(args[1], f(128))


def test_repaired_kernels_compute(planted: Emulator) -> None:
    assert launch(planted, "race_raw_ok")[1].tolist() == f(64)[::-1].tolist()
    assert launch(planted, "race_war_ok")[1].tolist() == (f(64)[::-1] * 2 + 64).tolist()
    assert launch(planted, "race_last_block_ok")[2][0] == 6
    assert launch(planted, "race_named_ok")[1].tolist() == f(64)[::-1].tolist()
    assert launch(planted, "race_async_ok")[1].tolist() == f(128).tolist()
    assert launch(planted, "masks_gone_ok")[0].tolist() == [31] * 31 + [0]


def test_the_other_access_of_a_race_is_named(planted: Emulator) -> None:
    with pytest.raises(KernelFault) as e:
        launch(planted, "race_raw")
    assert e.value.finding.array == "s"
    (other,) = e.value.finding.notes
    assert "thread (63, 0, 0)" in other
    assert "s[t] = x[t]" in SOURCE[int(other.split("planted.cu:")[1].split()[0]) - 1]


def test_waiting_threads_are_listed(planted: Emulator) -> None:
    with pytest.raises(KernelFault) as e:
        launch(planted, "barrier_left")
    waiting, gone = e.value.finding.notes
    assert waiting.startswith("60 threads (the first: (0, 0, 0)) wait at planted.cu:")
    assert gone == "4 threads (the first: (60, 0, 0)) have left the kernel"


def test_bounds_name_the_argument(planted: Emulator) -> None:
    planted.checks = Checks()
    with pytest.raises(KernelFault, match="0 bytes behind the end of array 'x' of 512 bytes") as e:
        planted.launch("bounds", 5, 32, f(128), f(128), 128, names=["x", "y", "n"])
    assert e.value.finding.block == (4, 0, 0)
    assert e.value.finding.thread == (0, 0, 0)


def test_arrays_are_left_alone_after_a_fault(planted: Emulator) -> None:
    y = f(128)
    planted.checks = Checks()
    with pytest.raises(KernelFault):
        planted.launch("bounds", 5, 32, f(128) + 1, y, 128)
    np.testing.assert_array_equal(y, f(128))


def test_freed_memory(planted: Emulator) -> None:
    device = Device(1 << 20)
    x, y = device.copy_in(f(128), "x"), device.copy_in(f(128), "y")
    planted.checks = Checks()
    planted.launch("bounds_ok", 4, 32, x, y, 128, device=device)
    device.free(x)
    with pytest.raises(KernelFault, match="freed array 'x'") as e:
        planted.launch("bounds_ok", 4, 32, x, y, 128, device=device)
    assert e.value.finding.check == "freed"


def test_uninitialised_output(planted: Emulator) -> None:
    """An array marked as output must not be read before it is written."""
    planted.checks = Checks()
    y = np.zeros(128, np.float32)
    planted.launch("bounds_ok", 4, 32, f(128), out(y), 128)
    np.testing.assert_array_equal(y, f(128))
    with pytest.raises(KernelFault) as e:
        planted.launch("bounds_ok", 4, 32, out(y), f(128), 128)
    assert e.value.finding.check == "uninitialised"


def test_trap_names_the_thread(planted: Emulator) -> None:
    with pytest.raises(KernelFault) as e:
        planted.launch("trap", 1, 32, z(32), 5)
    assert (e.value.finding.check, e.value.finding.thread) == ("trap", (5, 0, 0))


def test_locks_make_progress(planted: Emulator) -> None:
    """Threads of one warp, of several warps and of several blocks take a lock in turn."""
    count = z(1)
    planted.checks = Checks()
    planted.launch("lock", 3, 40, z(1), count)
    assert count[0] == 120


def test_printf_and_assert() -> None:
    say = Emulator((KERNELS / "say.ptx").read_text())
    result = say.launch("say", 1, 3, f(3) + 1, 3)
    assert (
        result.printed == "thread 0 of two: 1.000     7|ff|z%\nthread 1 of two: 2.000     7|ff|z%\n"
    )
    with pytest.raises(
        KernelFault, match=r"assertion failed: x\[threadIdx.x\] > 0.0f \(say.cu:\d+\)"
    ) as e:
        say.launch("say", 1, 3, f(3), 3)
    assert e.value.finding.thread == (0, 0, 0)


def test_profile_counts_conflicts_and_sectors(planted: Emulator) -> None:
    """A column of a 32 x 32 tile takes 32 passes per warp, a padded one 1."""
    passes = {}
    for name in ("banks", "banks_ok"):
        profile = planted.launch(name, 1, (32, 32), f(1024), f(1024), profile=True).profile
        assert profile is not None
        (load,) = [s for s in profile.sites.values() if s.instruction.startswith("ld.shared")]
        passes[name] = (load.requests, load.passes, load.passes_needed)
        assert all(
            s.sectors == s.sectors_needed == 128
            for s in profile.sites.values()
            if s.space == "global"
        )
    assert passes == {"banks": (32, 1024, 32), "banks_ok": (32, 32, 32)}
    profile = planted.launch("strided", 1, 32, f(256), f(32), profile=True).profile
    assert profile is not None
    assert sorted((s.sectors, s.sectors_needed) for s in profile.sites.values()) == [
        (4, 4),
        (32, 4),
    ]
    assert "planted.cu" in str(profile)

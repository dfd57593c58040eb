"""Thread block clusters: what they compute, and a check for every mistake planted in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nbflow_ptx import NO_CHECKS, Checks, Emulator, KernelFault, nvrtc
from nbflow_ptx.errors import LaunchError

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(
        not nvrtc.available(), reason="needs numba-cuda: pip install -e '.[cuda-test]'"
    ),
]
SOURCE = (Path(__file__).parent / "kernels" / "cluster.cu").read_text()
N = 5


@pytest.fixture(scope="module")
def clusters() -> Emulator:
    return Emulator(nvrtc.compile_source(SOURCE, "sm_90a", file_name="cluster.cu").text)


def swap(emulator: Emulator, bug: int, checks: Checks) -> np.ndarray:
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    emulator.checks = checks
    emulator.launch("swap", 4, 64, x, y, bug)
    return y.reshape(2, 2, 64)


def share(emulator: Emulator, bug: int, checks: Checks) -> np.ndarray:
    rng = np.random.default_rng(bug)
    x, y = rng.integers(-9, 10, (N, 64)).astype(np.float32), np.zeros((4, 64), np.float32)
    emulator.checks = checks
    emulator.launch("share", 4, 64, x, y, N, bug)
    return y - x.sum(axis=0)


@pytest.mark.parametrize("checks", [Checks(), NO_CHECKS], ids=["checks", "no checks"])
def test_blocks_share_memory_copies_and_barriers(clusters: Emulator, checks: Checks) -> None:
    want = np.arange(256, dtype=np.float32).reshape(2, 2, 64)[:, ::-1, ::-1]
    assert (swap(clusters, 0, checks) == want).all()
    assert not share(clusters, 0, checks).any()
    assert not share(clusters, 4, checks).any()  # a full barrier does as well
    y = np.zeros(64, np.float32)
    clusters.launch("alone", 1, 64, y)
    assert (y == np.arange(64)[::-1]).all()


def test_ranks_and_numbers_of_blocks(clusters: Emulator) -> None:
    y = np.zeros((2, 4, 3, 12), np.uint32)  # z, y, x
    clusters.checks = Checks()
    clusters.launch("sum", (3, 4, 2), 64, y)
    for z, row, x in np.ndindex(2, 4, 3):
        rank, found = row % 2 + 2 * z, y[z, row, x].tolist()
        assert found[:7] == [row // 2, 2, z, 2, 4, 1, rank]
        if rank == 0:
            assert found[7] == 4 * 64 * 65 // 2
            assert found[8:] == [x << 8 | (row + r % 2) << 4 | (z + r // 2) for r in range(4)]


@pytest.mark.parametrize(
    ("bug", "check", "why"),
    [
        (1, "uninitialised", "of shared array 's' of 256 bytes of block (1, 0, 0)"),
        (2, "barrier", "block (1, 0, 0), which may not have begun: no barrier.cluster before"),
        (3, "race", "load in shared memory races with another thread"),
        (4, "barrier", "a second barrier.cluster.arrive, with no wait for the first"),
        (5, "barrier", "block (1, 0, 0), which has ended"),
        (6, "bounds", "mapa to block 2 of a cluster of 2"),
        (7, "bounds", "behind the end of shared array 's' of 256 bytes"),
        (8, "barrier", "barrier.cluster.wait without an arrival before"),
        (9, "race", "store in shared memory races with another thread"),
        (10, "barrier", "ends while another one of its cluster may reach into its shared memory"),
    ],
)
def test_mistakes_with_shared_memory_are_found(
    bug: int, check: str, why: str, clusters: Emulator
) -> None:
    with pytest.raises(KernelFault) as e:
        swap(clusters, bug, Checks(budget=50_000))
    assert (e.value.finding.check, "cluster.cu:" in e.value.finding.where) == (check, True)
    assert why in e.value.finding.message


def test_barriers_of_the_cluster_order_memory_everywhere(clusters: Emulator) -> None:
    """Stores before and behind a barrier; global memory that another block wrote before it."""
    y = swap(clusters, 11, Checks())
    assert (y == 1).all()


def test_barriers_of_a_part_of_a_block_are_its_own(clusters: Emulator) -> None:
    y = np.zeros((4, 128), np.float32)
    clusters.checks = Checks()
    clusters.launch("halves", 4, 128, y, 0)
    assert (y == np.arange(128) ^ 63).all()
    with pytest.raises(KernelFault, match="load in shared memory races"):
        clusters.launch("halves", 4, 128, y, 1)


@pytest.mark.parametrize(
    ("bug", "check", "why"),
    [
        (1, "race", "cp.async.bulk"),  # a stage counts as free when its own block has released it
        (2, "proxy", "an mbarrier initialised without a fence"),
        (3, "barrier", "which may not have begun"),
        (5, "race", "of bytes an asynchronous copy not waited for writes"),
        (6, "barrier", "deadlock"),
        (7, "bounds", "a copy to the blocks 0x7 of a cluster of 2"),
        (8, "barrier", "deadlock"),  # the other block never hears that a stage is free
        (9, "race", "cp.async.bulk"),
        (10, "barrier", "ends while another one of its cluster may reach into its shared memory"),
    ],
)
def test_mistakes_with_multicast_copies_are_found(
    bug: int, check: str, why: str, clusters: Emulator
) -> None:
    with pytest.raises(KernelFault, match=r"cluster\.cu:") as e:
        share(clusters, bug, Checks(budget=50_000))
    assert e.value.finding.check == check
    assert why in e.value.finding.message


def test_what_the_driver_refuses(clusters: Emulator) -> None:
    x = np.zeros(256, np.float32)
    with pytest.raises(LaunchError, match=r"grid\.x = 3 is not a multiple of the 2 thread blocks"):
        clusters.launch("swap", 3, 64, x, x.copy(), 0)
    with pytest.raises(LaunchError, match="clusters of up to 64 warps"):
        clusters.launch("sum", (1, 2, 2), 544, x)
    many = SOURCE.replace("__cluster_dims__(1, 2, 2)", "__cluster_dims__(1, 4, 4)")
    with pytest.raises(LaunchError, match="a cluster of 16 thread blocks"):
        Emulator(nvrtc.compile_source(many, "sm_90a").text).launch("sum", (1, 4, 4), 64, x)

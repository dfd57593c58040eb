"""Devices of ranks: by host and name, each resolved by its own rank."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

import nbflow_kernels.cuda
from nbflow.distributed import device
from nbflow.distributed.comm import Comm
from nbflow.distributed.device import RankDevice, choose_ordinal, find_device, name_devices
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow_kernels.errors import MissingExtraError, UsageError

N_DEVICES = 2


def ordinals(names: tuple[str, ...], hosts: tuple[str, ...]) -> list[int | None]:
    """Return the CUDA device of each rank on hosts of `N_DEVICES`; None on the CPU."""
    found: list[int | None] = []
    for rank in name_devices(",".join(names), hosts):
        if not rank.name.startswith("cuda"):
            found.append(None)
        elif rank.name == "cuda":
            found.append(choose_ordinal(rank.turn, rank.taken, N_DEVICES))
        else:
            found.append(int(rank.name[5:]))
    return found


def test_ranks_of_a_host_take_its_devices_in_turn() -> None:
    """Every order of four ranks on two hosts, by host, round-robin, or mixed, and every name."""
    kinds = "cpu", "cuda", "cuda:0", "cuda:1"
    for hosts in itertools.product("ab", repeat=4):
        for names in itertools.product(kinds, repeat=4):
            found = ordinals(names, hosts)
            for host in set(hosts):
                here = [r for r in range(4) if hosts[r] == host]
                by_turn = [found[r] for r in here if names[r] == "cuda"]
                named = {found[r] for r in here if names[r] in ("cuda:0", "cuda:1")}
                free = [n for n in range(N_DEVICES) if n not in named] or list(range(N_DEVICES))
                counts = Counter(by_turn)
                assert set(counts) <= set(free)
                # each device gets as many ranks as another, or one more if it comes first
                assert by_turn == [free[i % len(free)] for i in range(len(by_turn))]
            for name, ordinal in zip(names, found, strict=True):
                assert (ordinal is None) == (name == "cpu")
                assert ":" not in name or ordinal == int(name[5:])


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [0, 1, 0, 1]),
        ("abab", [0, 0, 1, 1]),
        ("abba", [0, 0, 1, 1]),
        ("aaaa", [0, 1, 0, 1]),
    ],
)
def test_one_name_for_all_ranks_counts_those_of_a_host(hosts: str, expected: list[int]) -> None:
    found = name_devices("cuda", hosts)
    assert [choose_ordinal(rank.turn, rank.taken, N_DEVICES) for rank in found] == expected
    # with one visible device per rank, as under Slurm, every rank has the first
    assert {choose_ordinal(rank.turn, rank.taken, 1) for rank in found} == {0}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("cpu,cuda,cpu", "names 3 devices for 2 ranks"),
        ("cpu,cudda", "did you mean 'cuda'"),
        ("cuda:x,cpu", "unknown device 'cuda:x'"),
        ("cuda:,cpu", "unknown device 'cuda:'"),
        ("emulator:1,cpu", "unknown device 'emulator:1'"),
    ],
)
def test_wrong_names_are_refused_without_looking_for_devices(names: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        name_devices(names, "aa")


def test_a_rank_looks_for_its_own_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts without a driver, or with fewer devices than another, stop only their own ranks."""

    def absent() -> Any:
        raise AssertionError("looked for CUDA on a host that needs none")

    monkeypatch.setattr(nbflow_kernels.cuda, "detect", absent)
    on_cpu, on_cuda = name_devices("cpu,cuda:7", "ab")
    assert on_cpu.find() is device.HOST
    assert (on_cuda.name, on_cuda.turn) == ("cuda:7", 0)  # kept, for the other host
    seen = nbflow_kernels.cuda.Detected(12040, 2, True, True, True, "")
    monkeypatch.setattr(nbflow_kernels.cuda, "detect", lambda: seen)
    with pytest.raises(UsageError, match="device 'cuda:7': this machine has 2 CUDA devices"):
        on_cuda.find()
    none = nbflow_kernels.cuda.Detected(None, 0, True, True, True, "no CUDA driver")
    monkeypatch.setattr(nbflow_kernels.cuda, "detect", lambda: none)
    with pytest.raises(MissingExtraError, match="device 'cuda': no CUDA driver"):
        find_device("cuda")


def test_ranks_of_one_process_are_on_one_host() -> None:
    team = ThreadRanks(3)
    try:
        assert team.run(lambda comm: comm.hosts()) == [[0, 0, 0]] * 3
        parts = team.run(lambda comm: comm.split([2, 0]))
    finally:
        team.close()
    assert isinstance(parts[0], Comm)
    assert name_devices("cuda", parts[0].hosts())[1] == RankDevice("cuda", 1)

"""Thread ranks: collectives, byte counts, and failures."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nbflow.distributed.comm import Comm, SelfComm
from nbflow.distributed.thread_ranks import RankFailure, ThreadRanks
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.parallel_for import run_graph, set_num_threads
from nbflow_kernels.errors import UsageError


@jit.kernel
def _copy(source, target, start, stop):
    """Copy numbers [start, stop)."""
    for i in range(start, stop):
        target[i] = source[i]


@pytest.fixture
def team():
    made = ThreadRanks(3)
    yield made
    made.close()


def test_all_reduce_sums_in_rank_order_and_counts_bytes(team):
    rng = np.random.default_rng(1)
    parts = rng.standard_normal((3, 5, 7)).astype(np.float32)

    def run(comm: Comm):
        mine = parts[comm.rank].copy()
        comm.Allreduce(mine)
        return mine, comm.sent["all_reduce"]

    expected = (parts[0] + parts[1]) + parts[2]
    for result, sent in team.run(run):
        np.testing.assert_array_equal(result, expected)
        assert sent == 2 * 5 * 7 * 4


def test_captured_all_reduces_have_the_same_bits(team):
    """Repeated without Python in between, with memory that grows, and a tail of 3 numbers."""
    rng = np.random.default_rng(2)
    parts = rng.standard_normal((3, 35), dtype=np.float32)

    def run(comm: Comm):
        mine = np.zeros((5, 7), np.float32)
        small = parts[comm.rank, :19].copy()
        calls = [comm.captured_all_reduce(array) for array in (small, mine)]
        calls.insert(0, GraphNode(_copy, (parts[comm.rank], mine.reshape(-1)), 35, 1.0))
        set_num_threads(1)
        graph = CpuGraph(calls, 1)
        run_graph(graph, repeat=50)
        sent = comm.bytes_sent()["all_reduce"]
        small[:] = parts[comm.rank, :19]
        run_graph(graph)
        return small, mine.reshape(-1), sent

    expected = (parts[0] + parts[1]) + parts[2]
    for small, mine, sent in team.run(run):
        np.testing.assert_array_equal(small, expected[:19])
        np.testing.assert_array_equal(mine, expected)
        assert sent == 50 * 2 * 4 * (19 + 35)


def test_captured_all_gathers_have_the_columns_of_all_ranks(team):
    """Uneven widths, with and without a tail; rows of `whole` lie apart."""
    widths = [19, 0, 32]
    parts = [
        np.random.default_rng(r).standard_normal((3, n), np.float32) for r, n in enumerate(widths)
    ]

    def run(comm: Comm):
        wide = np.full((3, 60), np.nan, np.float32)
        call = comm.captured_all_gather(parts[comm.rank], wide[:, :51], widths)
        set_num_threads(1)
        run_graph(CpuGraph([call], 1), repeat=3)
        return wide, comm.bytes_sent()["all_gather"]

    for rank, (wide, sent) in enumerate(team.run(run)):
        np.testing.assert_array_equal(wide[:, :51], np.hstack(parts))
        assert np.isnan(wide[:, 51:]).all()
        assert sent == 3 * 2 * 4 * 3 * widths[rank]


@pytest.mark.parametrize("error", [ValueError, UsageError])
def test_a_failing_rank_ends_captured_all_reduces(team, error):
    """The others go on with their own numbers until the next exchange in Python raises."""

    def run(comm: Comm):
        if comm.rank == 1:
            raise error("no")
        set_num_threads(1)
        mine = np.full(20, comm.rank, np.float32)
        run_graph(CpuGraph([comm.captured_all_reduce(mine)], 1))
        assert (mine == comm.rank).all()
        comm.barrier()

    with pytest.raises(error, match="no"):
        team.run(run)


def test_a_rank_that_does_not_arrive_fails_the_call(monkeypatch):
    """A graph cannot raise: the call must not return numbers that were never summed."""
    monkeypatch.setenv("NBFLOW_HANG_S", "0.05")
    team = ThreadRanks(2)

    def run(comm: Comm):
        set_num_threads(1)
        if comm.rank == 0:
            run_graph(CpuGraph([comm.captured_all_reduce(np.ones(20, np.float32))], 1))

    with pytest.raises(RankFailure, match="result of an exchange"):
        team.run(run)
    team.close()


def test_all_gather_puts_uneven_columns_side_by_side(team):
    widths = [3, 1, 2]
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    edges = np.cumsum([0, *widths])

    def run(comm: Comm):
        out = np.full_like(whole, np.nan)
        part = whole[:, edges[comm.rank] : edges[comm.rank + 1]].copy()
        comm.Allgather_columns(part, out, widths)
        return out

    for result in team.run(run):
        np.testing.assert_array_equal(result, whole)


def test_split_numbers_ranks_in_the_given_order(team):
    def run(comm: Comm):
        part = comm.split([2, 0])
        if part is None:
            return None
        array = np.array([comm.rank], np.int32)
        part.Bcast(array, 0)
        return part.rank, int(array[0])

    assert team.run(run) == [(1, 2), None, (0, 2)]


def test_send_and_receive(team):
    def run(comm: Comm):
        array = np.full(4, comm.rank, np.float32)
        if comm.rank == 0:
            comm.Send(array, 2)
            array[:] = -1  # the message is a copy
        elif comm.rank == 2:
            comm.Recv(array, 0)
        return array[0]

    assert team.run(run) == [-1, 1, 0]


@pytest.mark.parametrize("where", ["collective", "receive"])
def test_a_failing_rank_stops_the_others(team, where):
    def run(comm: Comm):
        if comm.rank == 1:
            raise KeyError("planted")
        if where == "collective":
            comm.barrier()
        else:
            comm.Recv(np.empty(1, np.float32), 1)

    with pytest.raises(KeyError, match="planted"):
        team.run(run)
    with pytest.raises(RankFailure, match="load the model again"):
        team.run(lambda comm: None)


def test_an_error_that_all_ranks_raise_alike_leaves_them_alive(team):
    """Messages in flight survive a rejected call, on all ranks and on a group."""

    def begin(comm: Comm):
        part = comm.split([0, 1])
        if comm.rank == 0:
            comm.Send(np.array([7.0]), 2)
            part.Send(np.array([8.0]), 1)
        return part

    parts = team.run(begin)

    def refuse(comm: Comm):
        raise UsageError("planted for all")

    for _ in range(2):
        with pytest.raises(UsageError, match="planted for all"):
            team.run(refuse)

    def receive(comm: Comm):
        found = np.zeros(1)
        if comm.rank == 2:
            comm.Recv(found, 0)
        elif comm.rank == 1:
            parts[1].Recv(found, 0)
        return found[0]

    assert team.run(receive) == [0, 8, 7]


@pytest.mark.parametrize("others", ["receive", "collective", "part", "return", "differ"])
def test_a_refusal_of_one_rank_ends_the_team_with_its_words(team, others):
    """The others neither wait for the failed rank nor continue without it."""
    parts = team.run(lambda comm: comm.split([1, 2]))

    def run(comm: Comm):
        if comm.rank == 1:
            raise UsageError("planted on rank 1")
        if others == "receive":
            comm.Recv(np.empty(1), 1)
        elif others == "collective":
            comm.barrier()
        elif others == "part" and comm.rank == 2:
            parts[2].Recv(np.empty(1), 0)
        elif others == "differ":
            raise UsageError(f"planted on rank {comm.rank}")

    with pytest.raises(
        UsageError, match="planted on rank [012]" if others == "differ" else "rank 1"
    ):
        team.run(run)
    with pytest.raises(RankFailure, match="load the model again"):
        team.run(lambda comm: None)


def test_alone_does_nothing_and_keeps_values():
    comm = SelfComm()
    array = np.ones((2, 2), np.float32)
    comm.Allreduce(array)
    comm.Bcast(array, 0)
    assert (array == 1).all()
    assert comm.bcast_object("a") == "a"
    assert comm.gather_object("a") == ["a"]
    assert not comm.sent


def test_closing_a_team_ends_its_threads():
    before = threading.active_count()
    made = ThreadRanks(4)
    made.run(lambda comm: comm.barrier())
    made.close()
    for thread in threading.enumerate():
        if thread.name.startswith("nbflow-rank-"):
            thread.join(timeout=5)
    assert threading.active_count() <= before

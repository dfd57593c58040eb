"""Ranks as threads: exchanges, counted bytes, and what happens when one fails."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nbflow.parallel.comm import Alone, Comm
from nbflow.parallel.threads import RankFailure, RankTeam


@pytest.fixture
def team():
    made = RankTeam(3)
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
            array[:] = -1  # the message must not follow later changes
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


def test_alone_does_nothing_and_keeps_values():
    comm = Alone()
    array = np.ones((2, 2), np.float32)
    comm.Allreduce(array)
    comm.Bcast(array, 0)
    assert (array == 1).all()
    assert comm.bcast_object("a") == "a"
    assert comm.gather_object("a") == ["a"]
    assert not comm.sent


def test_closing_a_team_ends_its_threads():
    before = threading.active_count()
    made = RankTeam(4)
    made.run(lambda comm: comm.barrier())
    made.close()
    for thread in threading.enumerate():
        if thread.name.startswith("nbflow-rank-"):
            thread.join(timeout=5)
    assert threading.active_count() <= before

from __future__ import annotations

import threading
from typing import Any

import pytest

from nbflow.distributed import Comm, SelfComm
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow_experiments.sweep import rank_barrier
from nbflow_experiments.sweep.rank_barrier import Interrupted, StepFailed, StopRequest, in_step


class Waiting(SelfComm):
    """A rank whose partner never comes to agree, until all are ended."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        assert self.ended.wait(timeout=30), "the ranks were not ended"
        raise ConnectionError("ended")

    def abort(self) -> None:
        self.ended.set()


def fail() -> None:
    raise OSError("disk full")


def test_a_failed_rank_ends_the_others_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_barrier, "GRACE_S", 0.01)
    comm = Waiting()
    with pytest.raises(ConnectionError):
        in_step(comm, StopRequest(), fail)
    assert comm.ended.is_set()
    assert "disk full" in capsys.readouterr().err


def test_results_stay_with_their_rank() -> None:
    ranks = ThreadRanks(3)
    assert ranks.run(lambda comm: in_step(comm, StopRequest(), lambda: comm.rank)) == [0, 1, 2]
    ranks.close()


def test_all_failures_are_known_to_all() -> None:
    def main(comm: Comm) -> list[tuple[int, str, str]]:
        with pytest.raises(StepFailed, match=r"rank 1: OSError: disk full") as caught:
            in_step(comm, StopRequest(), fail if comm.rank else lambda: None)
        return [(f.rank, f.type, f.message) for f in caught.value.failures]

    ranks = ThreadRanks(3)
    expected = [(1, "OSError", "disk full"), (2, "OSError", "disk full")]
    assert ranks.run(main) == [expected] * 3
    ranks.close()


def test_a_request_to_one_rank_stops_all() -> None:
    def main(comm: Comm) -> str:
        stop = StopRequest()
        stop.asked = comm.rank == 2
        with pytest.raises(Interrupted):
            in_step(comm, stop, lambda: None)
        return "stopped"

    ranks = ThreadRanks(3)
    assert ranks.run(main) == ["stopped"] * 3
    ranks.close()


def test_a_failure_is_recorded_before_the_stop() -> None:
    stop = StopRequest()
    stop.asked = True
    with pytest.raises(StepFailed):
        in_step(SelfComm(), stop, fail)
    with pytest.raises(Interrupted):
        in_step(SelfComm(), stop, lambda: None)

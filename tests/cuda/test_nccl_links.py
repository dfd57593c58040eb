"""A model whose ranks hand each other device arrays over NCCL: emulated devices, NCCL played."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import nbflow
from nbflow.distributed import nccl
from nbflow.distributed.device import Device
from nbflow_ptx.cupy_stand_in.kernel_device import State
from nbflow_ptx.memory.device import GLOBAL_BASE, WRITTEN

pytestmark = pytest.mark.compiler

FOLDER = Path(__file__).parents[1] / "golden" / "families" / "llama31"
TOLERANCE = 4e-6  # as in test_engine.py: float32 sums in another order


class Meeting:
    """State shared by the ranks of a communicator."""

    def __init__(self) -> None:
        self.parts: dict[int, np.ndarray] = {}
        self.barrier: threading.Barrier | None = None
        self.lock = threading.Lock()
        self.mail: dict[tuple[int, int], SimpleQueue[np.ndarray]] = {}


class Communicator:
    """The calls of `cupy.cuda.nccl.NcclCommunicator` on emulated memory, by threads."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, n: int, meeting: Meeting, rank: int) -> None:
        self.n, self.meeting, self.rank = n, meeting, rank
        with meeting.lock:
            meeting.barrier = meeting.barrier or threading.Barrier(n, timeout=60)

    def _everyone(self, mine: np.ndarray) -> list[np.ndarray]:
        meeting = self.meeting
        assert meeting.barrier is not None
        meeting.parts[self.rank] = mine
        meeting.barrier.wait()
        parts = [meeting.parts[r] for r in range(self.n)]
        meeting.barrier.wait()
        return parts

    def _queue(self, source: int, dest: int) -> SimpleQueue[np.ndarray]:
        with self.meeting.lock:
            return self.meeting.mail.setdefault((source, dest), SimpleQueue())

    def allReduce(self, source: int, out: int, n: int, kind: int, op: int, stream: int) -> None:
        self.calls["allReduce"] += 1
        total, *others = self._everyone(read(source, n))
        for part in others:
            total = total + part
        write(out, total)

    def broadcast(self, source: int, out: int, n: int, kind: int, root: int, stream: int) -> None:
        self.calls["broadcast"] += 1
        empty = np.empty(0, np.float32)
        write(out, self._everyone(read(source, n) if self.rank == root else empty)[root])

    def allGather(self, source: int, out: int, n: int, kind: int, stream: int) -> None:
        self.calls["allGather"] += 1
        write(out, np.concatenate(self._everyone(read(source, n))))

    def send(self, source: int, n: int, kind: int, peer: int, stream: int) -> None:
        self.calls["send"] += 1
        self._queue(self.rank, peer).put(read(source, n))

    def recv(self, out: int, n: int, kind: int, peer: int, stream: int) -> None:
        write(out, self._queue(peer, self.rank).get(timeout=60))


def place(address: int, n: int) -> slice:
    start = address - GLOBAL_BASE
    return slice(start, start + 4 * n)


def read(address: int, n: int) -> np.ndarray:
    return State.device.heap[place(address, n)].view(np.float32).copy()


def write(address: int, values: np.ndarray) -> None:
    here = place(address, values.size)
    State.device.heap[here] = values.view(np.uint8)
    State.device.shadow[here] |= np.uint8(WRITTEN)


PLAYED = SimpleNamespace(
    available=True, NCCL_SUM=0, NCCL_FLOAT32=7, NCCL_FLOAT16=6, NCCL_INT32=2,
    get_unique_id=Meeting, NcclCommunicator=Communicator,
    groupStart=lambda: None, groupEnd=lambda: None,
)  # fmt: skip


@pytest.fixture
def played(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Give each rank, which is a thread, a separate emulated device, and NCCL."""
    Communicator.calls.clear()
    monkeypatch.setattr(nccl, "_nccl", lambda: (cupy, PLAYED))
    identity = property(lambda self: threading.current_thread().name)
    monkeypatch.setattr(Device, "identity", identity)
    return Communicator.calls


@pytest.mark.parametrize(
    ("partition", "kinds"),
    # 101 tokens on two ranks are 51 and 50: parts of different lengths are broadcast
    [("0&1", {"allReduce", "broadcast"}), ("0;1", {"send"})],
)
def test_a_model_on_ranks_uses_nccl(partition: str, kinds: set[str], played: Counter[str]) -> None:
    with np.load(FOLDER / "golden.npz") as file:
        ids, logits = file["ids"][:5], file["logits"][:5]
    options: dict[str, Any] = {"device": "emulator", "kv": "f32", "partition": partition}
    with nbflow.load(FOLDER, **options) as model:
        model.reset_traffic()
        found = model.logits(ids)
        traffic = model.traffic()
    assert np.abs(found - logits).max() < TOLERANCE * np.abs(logits).max()
    assert set(played) == kinds
    assert traffic["measured_bytes"] == traffic["predicted_bytes"] > 0


def test_rounded_sums_go_through_the_host(played: Counter[str]) -> None:
    options: dict[str, Any] = {"device": "emulator", "partition": "0&1", "all_reduce": "q8"}
    with nbflow.load(FOLDER, **options) as model:
        model.reset_traffic()
        model.logits([3, 9])
        traffic = model.traffic()
        assert 0 < model.all_reduce_error() < 0.01  # half a step of 1/127, RMS of a block of 32
    assert played["allReduce"] == 2  # the embedding's, one of each rank
    assert traffic["measured_bytes"] == traffic["predicted_bytes"]

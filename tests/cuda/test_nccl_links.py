"""Ranks that exchange device arrays over NCCL: emulated devices, and a stand-in for NCCL.

The stand-in's calls are work of the current stream: captured while the stream is, else done.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from small_models import write_checkpoint

import nbflow
from nbflow.distributed import nccl
from nbflow.distributed.comm import Comm
from nbflow.distributed.device import Device
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow.executor.bind import PythonOp
from nbflow.executor.bind_cuda import CudaBinder
from nbflow.executor.cuda_graphs import HostOp
from nbflow.program.records import Op
from nbflow_ptx.cupy_stand_in.kernel_device import State
from nbflow_ptx.cupy_stand_in.streams import perform
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
    rejected: ClassVar[set[str]] = set()
    """Calls that cannot be captured."""

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

    def _perform(self, name: str, work: Callable[[], None]) -> None:
        """Do the work of a call, or keep it for a graph, and count how often it is done."""

        def counted() -> None:
            self.calls[name] += 1
            work()

        if name in self.rejected and State.here.capturing is not None:
            raise RuntimeError(f"{name} cannot be captured")
        perform(counted)

    def allReduce(self, source: int, out: int, n: int, kind: int, op: int, stream: int) -> None:
        def work() -> None:  # the last rank's part first: NCCL's order is not that of the ranks
            total, *others = self._everyone(read(source, n))[::-1]
            for part in others:
                total = total + part
            write(out, total)

        self._perform("allReduce", work)

    def broadcast(self, source: int, out: int, n: int, kind: int, root: int, stream: int) -> None:
        def work() -> None:
            mine = read(source, n if self.rank == root else 0)
            write(out, self._everyone(mine)[root])

        self._perform("broadcast", work)

    def allGather(self, source: int, out: int, n: int, kind: int, stream: int) -> None:
        work = lambda: write(out, np.concatenate(self._everyone(read(source, n))))  # noqa: E731
        self._perform("allGather", work)

    def send(self, source: int, n: int, kind: int, peer: int, stream: int) -> None:
        self._perform("send", lambda: self._queue(self.rank, peer).put(read(source, n)))

    def recv(self, out: int, n: int, kind: int, peer: int, stream: int) -> None:
        self._perform("recv", lambda: write(out, self._queue(peer, self.rank).get(timeout=60)))


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
    monkeypatch.setattr(Communicator, "rejected", set())
    monkeypatch.setattr(nccl, "_nccl", lambda: (cupy, PLAYED))
    identity = property(lambda self: threading.current_thread().name)
    monkeypatch.setattr(Device, "identity", identity)
    return Communicator.calls


@pytest.mark.parametrize(
    ("partition", "kinds"),
    # 97 tokens on two ranks are 49 and 48: parts of different lengths are broadcast
    [
        ("0&1", {"allReduce", "broadcast"}),
        ("0;1", {"send", "recv"}),
    ],
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


@pytest.mark.parametrize("one_shot_bytes", [1 << 20, 0])
@pytest.mark.parametrize("n", [37, 48])  # 48: equal shares, which are gathered
def test_more_than_two_ranks_add_in_order(
    n: int, one_shot_bytes: int, played: Counter[str], monkeypatch: pytest.MonkeyPatch, cupy: Any
) -> None:
    """The bits are those of the host's communicators, whatever the size of the message."""
    monkeypatch.setattr(nccl, "ONE_SHOT_BYTES", one_shot_bytes)
    parts = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)

    def run(host: Comm) -> tuple[bytes, bytes]:
        mine = parts[host.rank].copy()
        there = cupy.asarray(mine)
        comm = nccl.NcclComm(host)
        host.Allreduce(mine)
        comm.Allreduce(there)
        assert comm.sent == host.sent
        return mine.tobytes(), there.get().tobytes()

    team = ThreadRanks(3)
    try:
        for on_host, on_device in team.run(run):
            assert on_device == on_host
    finally:
        team.close()
    last = "allGather" if one_shot_bytes or n == 48 else "broadcast"
    assert set(played) == ({last} if one_shot_bytes else {"send", "recv", last})


EXPERTS = {
    "model_type": "mixtral", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 32, "num_local_experts": 3, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Whole blocks of q8_0 on each of two ranks; uneven shares of the experts."""


def generate(model: Path, **options: Any) -> tuple[list[int], Any, dict[str, int]]:
    """Return the tokens of a model on ranks, its executors, and its traffic."""
    with nbflow.load(model, kv="f32", **options) as model:
        model.reset_traffic()
        ids = model.generate([3], 3, ignore_eos=True).ids
        return ids, [engine.executor for engine in model.workers], model.traffic()


def graphs_of(executor: Any) -> Any:
    """Return the graphs of the only shape that has some."""
    (graphs,) = (bound.graphs for bound in executor._bound.values() if bound.graphs)
    return graphs


@pytest.mark.parametrize(
    ("name", "partition", "weights", "n_collectives"),
    [  # of the embedding and the logits, and two in each layer
        ("llama31", "0&1", None, 6),
        ("llama31", "0&1&2", None, 6),
        ("olmoe", "0&1", None, 8),  # experts of both ranks, norms over all heads
        ("", "0&1", "q8_0", 4),  # fused experts, a quantized embedding
    ],
)
def test_a_step_with_its_collectives_is_one_graph(
    name: str, partition: str, weights: str | None, n_collectives: int, played: Counter[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    model = FOLDER.with_name(name) if name else tmp_path
    if not name:
        write_checkpoint(tmp_path, EXPERTS)
    options: dict[str, Any] = {"partition": partition, "weights": weights}
    expected, _, _ = generate(model, device="cpu", **options)
    ids, executors, traffic = generate(model, device="emulator", **options)
    assert ids == expected
    for executor in executors:
        graphs = graphs_of(executor)
        assert (graphs.n_graphs, len(graphs.parts)) == (1, 1)
        assert (executor.steps_by_kernel, executor.steps_by_graph) == (1, 2)
        assert executor.report().endswith("of 1 shapes; arrays between ranks: nccl")
        assert graphs.n_collectives == (n_collectives,)
    assert traffic["measured_bytes"] == traffic["predicted_bytes"] > 0


def test_collectives_that_cannot_be_captured_run_between_graphs(played: Counter[str]) -> None:
    """One warning, on the first rank, and the same tokens."""
    Communicator.rejected.add("allReduce")
    expected, _, _ = generate(FOLDER, device="cpu", partition="0&1")
    with pytest.warns(RuntimeWarning, match="allReduce cannot be captured.*between graphs") as said:
        ids, executors, traffic = generate(FOLDER, device="emulator", partition="0&1")
    assert ids == expected
    assert len(said) == 1
    for executor in executors:
        graphs = graphs_of(executor)
        assert (graphs.n_graphs, len(graphs.parts), set(graphs.n_collectives)) == (6, 12, {0})
    assert traffic["measured_bytes"] == traffic["predicted_bytes"] > 0


def test_ranks_whose_graphs_would_differ_cut_them_alike(
    played: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL rejects a graph whose collectives another rank captured in two."""
    take_rows = CudaBinder._take_rows

    def planted(self: CudaBinder, op: Op, index: int) -> PythonOp:
        made = take_rows(self, op, index)
        return made if self.executor.comm.rank == 0 else HostOp(op.kind, made.call)

    monkeypatch.setattr(CudaBinder, "_take_rows", planted)
    with pytest.warns(RuntimeWarning, match="the ranks' graphs hold different collectives"):
        ids, executors, _ = generate(FOLDER, device="emulator", partition="0&1")
    assert len(ids) == 3
    assert all(set(graphs_of(executor).n_collectives) == {0} for executor in executors)


def test_ranks_that_share_a_device_say_so_once(
    played: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "identity", "one for all")
    options: dict[str, Any] = {"device": "emulator", "partition": "0&1"}
    with pytest.warns(RuntimeWarning, match="ranks 0, 1 exchange arrays through host m") as said:
        model = nbflow.load(FOLDER, **options)
    assert len(said) == 1
    with model:
        for rank in model.transport():
            assert rank["transport"] == "host"
            assert "NCCL needs a device for every rank, and some share one" in rank["reason"]
        assert "ranks: host (NCCL needs" in model.workers[0].executor.report()
    monkeypatch.setenv("NBFLOW_DEVICE_EXCHANGE", "host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with nbflow.load(FOLDER, **options) as model:
            assert model.transport() == [{"transport": "host", "reason": ""}] * 2
    assert not played

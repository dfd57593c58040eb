"""Collectives: q8 all-reduce, idle waiting, and device transports without GPUs."""

from __future__ import annotations

import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from mpirun import MPIRUN, mpirun

from nbflow.distributed import SelfComm
from nbflow.distributed.comm import Comm
from nbflow.distributed.device_comms import RankCapabilities, Transport, choose_transport
from nbflow.distributed.mpi_cuda_aware import cuda_aware
from nbflow.distributed.nccl import NcclComm, has_nccl
from nbflow.distributed.quantized_all_reduce import q8_pack, q8_packed_bytes, q8_unpack
from nbflow.distributed.thread_ranks import RankFailure, ThreadRanks
from nbflow_kernels.errors import MissingExtraError, UsageError


@pytest.mark.parametrize("size", [1, 31, 32, 100])
def test_q8_error_is_within_its_bound(size):
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32) * 10
    packed = q8_pack(x)
    assert packed.nbytes == q8_packed_bytes(size)
    back = q8_unpack(packed, size)
    for start in range(0, size, 32):
        block = slice(start, start + 32)
        # half a step of max / 127, and the float32 rounding of code * scale
        limit = np.abs(x[block]).max() * (0.5 / 127 + 2**-22)
        assert np.abs(back[block] - x[block]).max() <= limit
    assert (q8_unpack(q8_pack(np.zeros(size, np.float32)), size) == 0).all()


def test_q8_codes_agree_with_numpy():
    x = np.random.default_rng(0).standard_normal(32 * 50 + 7).astype(np.float32)
    blocks = np.zeros((51, 32), np.float32)
    blocks.reshape(-1)[: x.size] = x
    scales = np.abs(blocks).max(axis=1) / np.float32(127)
    codes = np.rint(blocks * (np.float32(1) / scales)[:, None]).astype(np.int8)
    assert q8_pack(x).tobytes() == codes.tobytes() + scales.tobytes()
    rounded = (codes * scales[:, None]).reshape(-1)[: x.size]
    np.testing.assert_array_equal(q8_unpack(q8_pack(x), x.size), rounded)


def test_q8_keeps_nan_and_infinity():
    x = np.ones(64, np.float32)
    x[3], x[40] = np.nan, np.inf
    back = q8_unpack(q8_pack(x), 64)
    assert not np.isfinite(back[3])
    assert not np.isfinite(back[40])


def test_q8_sums_are_equal_on_all_ranks():
    parts = np.random.default_rng(1).standard_normal((3, 5, 64)).astype(np.float32)
    team = ThreadRanks(3)

    def run(comm: Comm):
        mine = parts[comm.rank].copy()
        comm.Allreduce_q8(mine)
        return mine, comm.sent["all_reduce"], comm.rounding_error

    try:
        results = team.run(run)
    finally:
        team.close()
    for total, sent, error in results:
        np.testing.assert_array_equal(total, results[0][0])
        assert sent == 2 * q8_packed_bytes(5 * 64) < 2 * 5 * 64 * 4
        # uniform error in a step of max/127: max/127/sqrt(12), with max of about 2.2 sigma
        assert 0.003 < error < 0.008
    exact = parts.sum(axis=0)
    assert np.abs(results[0][0] - exact).max() < 3 * 0.5 / 127 * np.abs(parts).max()


def test_waiting_for_a_hanging_rank_times_out(monkeypatch):
    monkeypatch.setenv("NBFLOW_HANG_S", "0.1")
    team = ThreadRanks(2)

    def run(comm: Comm):
        if comm.rank == 1:
            time.sleep(1.0)
        else:
            comm.Recv(np.empty(1, np.float32), 1)

    try:
        with pytest.raises(RankFailure, match=r"rank 0 has waited for rank 1 of 2 for 0.3 s"):
            team.run(run)
    finally:
        team.close()


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_waiting_ranks_use_no_cpu_time():
    """Two ranks wait for one with almost no CPU time, whatever the number of cores."""
    code = (
        "import time\n"
        "from nbflow.distributed import world\n"
        "comm = world()\n"
        "comm.barrier()\n"
        "before, started = time.process_time(), time.perf_counter()\n"
        "if comm.rank == 0: time.sleep(2.0)\n"
        "comm.barrier()\n"
        "share = (time.process_time() - before) / (time.perf_counter() - started)\n"
        "shares = comm.gather_object(share)\n"
        "if shares: print(max(shares))\n"
    )
    done = mpirun(3, "-m", "mpi4py", "-c", code)
    assert done.returncode == 0, done.stderr
    # half a second of sleeps of 50 us, then of 2 ms: 2 % to 8 % of a core; spinning takes 100 %
    assert float(done.stdout) < 0.25


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_large_messages_move_while_their_sender_computes():
    """Messages arrive in order before the sender calls MPI again."""
    code = (
        "import time\n"
        "import numpy as np\n"
        "from nbflow.distributed import world\n"
        "comm, n = world(), 1 << 20\n"
        "x, small = np.empty(n, np.float32), np.empty(2, np.float32)\n"
        "comm.barrier()\n"
        "started = time.perf_counter()\n"
        "if comm.rank == 0:\n"
        "    for i in range(3):\n"
        "        x[:] = i\n"
        "        comm.Send_later(x, 1)\n"
        "        comm.Post(x[:2], 1)\n"
        "    x[:] = -1\n"
        "    assert time.perf_counter() - started < 2\n"
        "    time.sleep(4)\n"
        "else:\n"
        "    for i in range(3):\n"
        "        comm.Recv(x, 0)\n"
        "        comm.Recv(small, 0)\n"
        "        assert (x == i).all() and (small == i).all()\n"
        "    assert time.perf_counter() - started < 3.5, 'it came when the sender had woken up'\n"
        "comm.barrier()\n"
        "sent = comm.gather_object(dict(comm.sent))\n"
        "if sent: print(sent[0]['send'] == 12 * n, sent[0]['broadcast'] == 24)\n"
    )
    done = mpirun(2, "-m", "mpi4py", "-c", code)
    assert done.stdout.split() == ["True", "True"], done.stdout + done.stderr


# ---- GPUs -------------------------------------------------------------------------------------


def test_cuda_support_of_mpi_is_queried():
    assert cuda_aware() in (False, True)
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from nbflow.distributed.mpi_cuda_aware import cuda_aware\n"
        "assert cuda_aware() is False"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nccl_needs_cupy_and_nccl(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[cuda12\]'"):
        NcclComm(SelfComm())
    stand_in(monkeypatch, available=False)
    with pytest.raises(MissingExtraError, match="nvidia-nccl-cu12"):
        NcclComm(SelfComm())
    assert not has_nccl()
    stand_in(monkeypatch)
    assert has_nccl()


def test_all_ranks_choose_a_common_transport(monkeypatch):
    gpus = [RankCapabilities("a", str(i), nccl=True, mpi=True) for i in range(2)]
    gpus.append(RankCapabilities("b", "0", nccl=True, mpi=True))  # the same number on another host
    assert choose_transport(gpus) == Transport("nccl")
    shared = choose_transport([*gpus, gpus[0]])
    assert (shared.name, shared.reason[-14:]) == ("mpi", "some share one")
    without = choose_transport([*gpus, RankCapabilities("b", "1", nccl=False, mpi=True)])
    assert (without.name, "pip install nvidia-nccl" in without.reason) == ("mpi", True)
    without = choose_transport([*gpus, RankCapabilities("b", "1", nccl=False, mpi=False)])
    assert without.name == "host"
    assert without.reason.endswith("; the MPI library does not report CUDA support")
    mixed = choose_transport([*gpus, RankCapabilities("b", None, nccl=False, mpi=False)])
    assert mixed == Transport("host", "not every rank is on a CUDA device")
    assert choose_transport(gpus, "mpi") == Transport("mpi")  # selected: without a reason
    with pytest.raises(UsageError, match="some share one"):
        choose_transport([gpus[0], gpus[0]], "nccl")
    with pytest.raises(UsageError, match="not every rank is on a CUDA device"):
        choose_transport([gpus[0], RankCapabilities("b", None, nccl=True, mpi=True)], "mpi")
    with pytest.raises(UsageError, match="did you mean 'nccl'"):
        choose_transport(gpus, "ncll")


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_cuda_aware_mpi_sums_in_rank_order():
    """NumPy replaces CuPy: MPI gets the arrays themselves, after a synchronization."""
    code = (
        "from types import SimpleNamespace as Bag\n"
        "import numpy as np\n"
        "from nbflow.distributed import world\n"
        "from nbflow.distributed.mpi_cuda_aware import CudaAwareMpiComm\n"
        "ready = []\n"
        "stream = Bag(synchronize=lambda: ready.append(1))\n"
        "cuda = Bag(get_current_stream=lambda: stream)\n"
        "host = world()\n"
        "comm = CudaAwareMpiComm(host, Bag(cuda=cuda, empty=np.empty))\n"
        "for c in (host, comm):\n"
        "    mine = np.random.default_rng(host.rank).standard_normal(99).astype(np.float32)\n"
        "    x, y, z = mine.copy(), np.empty((3, 5), np.float32), mine[:4].copy()\n"
        "    c.Allreduce(x)\n"
        "    c.Allgather_columns(np.full((3, 2 + c.rank), c.rank, np.float32), y, [2, 3])\n"
        "    c.Send(mine, 1) if c.rank == 0 else c.Recv(mine, 0)\n"
        "    c.Bcast(z, 1)\n"
        "    results = [x.tobytes(), y.tobytes(), mine.tobytes(), z.tobytes(), dict(c.sent)]\n"
        "    assert c is host or results == before\n"
        "    before = results\n"
        "assert len(ready) == 4\n"
        "print('the same')\n"
    )
    done = mpirun(2, "-m", "mpi4py", "-c", code)
    assert done.stdout.count("the same") == 2, done.stderr


def stand_in(monkeypatch, available: bool = True) -> list[tuple]:
    """Replace CuPy by modules that record the calls to NCCL."""
    calls: list[tuple] = []

    class Communicator:
        def __init__(self, n: int, unique: tuple, rank: int) -> None:
            calls.append(("init", n, unique, rank))

        def __getattr__(self, name: str):
            return lambda *arguments: calls.append((name, *arguments))

    stream = SimpleNamespace(ptr=77, synchronize=lambda: calls.append(("synchronize",)))
    nccl = ModuleType("cupy.cuda.nccl")
    vars(nccl).update(
        available=available, NCCL_SUM=0, NCCL_FLOAT32=7, NCCL_FLOAT16=6, NCCL_INT32=2,
        get_unique_id=lambda: ("id",), NcclCommunicator=Communicator,
        groupStart=lambda: calls.append(("groupStart",)),
        groupEnd=lambda: calls.append(("groupEnd",)),
    )  # fmt: skip
    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(nccl=nccl, get_current_stream=lambda: stream)
    cupy = ModuleType("cupy")
    vars(cupy).update(cuda=cuda)
    for module in (nccl, cuda, cupy):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


class DeviceArray:
    """Device array as far as NCCL calls need it."""

    def __init__(self, address: int, size: int, dtype: str = "float32") -> None:
        self.__cuda_array_interface__ = {"version": 3}
        self.data, self.size, self.dtype = SimpleNamespace(ptr=address), size, np.dtype(dtype)
        self.nbytes = size * self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=True)


class Three(SelfComm):
    """Host communicator: rank 1 of 3."""

    rank, size = 1, 3


def test_nccl_gets_addresses_types_and_the_current_stream(monkeypatch):
    calls = stand_in(monkeypatch)
    comm = NcclComm(Three())
    x = DeviceArray(1000, 8, "float16")
    comm.Allreduce(x)
    comm.Send(x, 2)
    comm.Recv(x, 0)
    comm.Bcast(x, 1)
    comm._allgatherv(DeviceArray(0, 4), DeviceArray(100, 12), [4, 4, 4])
    comm._allgatherv(DeviceArray(0, 4), DeviceArray(100, 9), [2, 4, 3])
    assert calls == [
        ("init", 3, None, 1),  # rank 0 makes the id
        ("allReduce", 1000, 1000, 8, 6, 0, 77),
        ("send", 1000, 8, 6, 2, 77),
        ("recv", 1000, 8, 6, 0, 77),
        ("broadcast", 1000, 1000, 8, 6, 1, 77),
        ("allGather", 0, 100, 4, 7, 77),
        ("groupStart",),
        ("broadcast", 100, 100, 2, 7, 0, 77),
        ("broadcast", 0, 108, 4, 7, 1, 77),
        ("broadcast", 124, 124, 3, 7, 2, 77),
        ("groupEnd",),
    ]
    assert comm.sent == {"all_reduce": 32, "send": 16, "broadcast": 32}
    with pytest.raises(TypeError, match="must be on a CUDA device, got ndarray"):
        comm.Allreduce(np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="float32, float16, int32, got float64"):
        comm.Allreduce(DeviceArray(0, 1, "float64"))
    with pytest.raises(UsageError, match="use 'f32'"):
        comm.Allreduce_q8(x)

"""Streams and graphs of the stand-in: what is kept, and what CUDA would refuse."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import nbflow_ptx.cupy_stand_in as cupy
from nbflow_ptx import Emulator, KernelFault
from nbflow_ptx.errors import LaunchError

DOUBLE = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry double(.param .u64 x)
{
    .reg .f32 %f<2>; .reg .b32 %r<2>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.f32 %f1, [%rd1];
    add.f32 %f1, %f1, %f1;
    st.global.f32 [%rd1], %f1;
    ret;
}"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cupy.reset(memory_bytes=1 << 20)
    yield
    cupy.reset()


def double(x: Any) -> None:
    cupy._Function(Emulator(DOUBLE), "double")((1,), (len(x),), (x,))


def captured(*calls: Any) -> Any:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        assert stream.is_capturing()
        try:
            for call in calls:
                call()
        except BaseException:
            with suppress(LaunchError):
                stream.end_capture()
            raise
        return stream.end_capture()


def test_a_graph_does_its_work_when_it_is_launched_with_the_numbers_of_then() -> None:
    x, y = cupy.asarray(np.arange(4, dtype=np.float32)), cupy.zeros(4, np.float32)
    graph = captured(lambda: double(x), lambda: y.__setitem__(..., x))
    assert x.get().tolist() == [0, 1, 2, 3]
    assert len(graph) == 2
    graph.launch()
    assert y.get().tolist() == [0, 2, 4, 6]
    x[...] = 5
    graph.launch()
    assert y.get().tolist() == [10] * 4


def test_what_a_capture_refuses() -> None:
    x = cupy.zeros(4, np.float32)
    event = cupy.cuda.Event()
    for refused in (
        x.get, x[0].item, cupy.cuda.Device().synchronize, event.synchronize,
        lambda: x.set(np.ones(4, np.float32)), lambda: cupy.asarray(np.ones(4)),
        lambda: cupy.empty(4), lambda: cupy.cuda.Stream(non_blocking=True).begin_capture(),
    ):  # fmt: skip
        with pytest.raises(LaunchError, match="while a stream is captured"):
            captured(refused)
    with pytest.raises(LaunchError, match="null stream cannot be captured"):
        cupy.cuda.Stream.null.begin_capture()
    assert x.get().tolist() == [0] * 4


def test_arrays_of_a_pool_stay_the_graphs_own() -> None:
    x, pool = cupy.asarray(np.ones(4, np.float32)), cupy.cuda.MemoryPool()

    def work() -> None:
        made = x.copy()
        double(made)
        x[...] = made

    with cupy.cuda.using_allocator(pool.malloc):
        graph = captured(work)
    assert pool.total_bytes() == 512
    graph.launch()
    assert x.get().tolist() == [2] * 4


def test_a_graph_whose_array_is_gone_is_caught() -> None:
    x = cupy.asarray(np.ones(4, np.float32))
    address = x.data.ptr
    kernel = cupy._Function(Emulator(DOUBLE), "double")
    graph = captured(lambda: kernel((1,), (4,), (np.uint64(address),)))
    gone = weakref.ref(x)
    del x
    assert gone() is None
    with pytest.raises(KernelFault, match="freed"):
        graph.launch()


def test_what_waits_spoils_the_capture() -> None:
    x, stream = cupy.zeros(4, np.float32), cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(LaunchError, match="a copy to the host while"):
            x.get()  # refused by CuPy, CUDA knows nothing of it
        assert len(stream.end_capture()) == 0
        stream.begin_capture()
        with pytest.raises(LaunchError, match="waiting for a stream while"):
            stream.synchronize()
        with pytest.raises(LaunchError, match="cudaErrorStreamCaptureInvalidated"):
            stream.end_capture()
        assert not stream.is_capturing()


def test_copies_between_host_and_device_are_as_strict_as_cupys() -> None:
    x = cupy.zeros((2, 2), np.float32)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)
    pinned[:] = 3
    with pytest.raises(LaunchError, match="a copy from host memory while"):
        captured(lambda: x.data.copy_from_host_async(pinned.ctypes.data, 16))
    x.data.copy_from_host_async(pinned.ctypes.data, 16)
    assert x.get().tolist() == [[3, 3], [3, 3]]
    other = np.ones((2, 2), np.float32)
    with pytest.raises(LaunchError, match="not pinned"):
        x.data.copy_from_host_async(other.ctypes.data, 16)
    for values in (other, [[1.0, 2.0], [3.0, 4.0]]):
        with pytest.raises(ValueError, match="assigns no arrays of the host"):
            x[...] = values
    x[1] = np.float32(5)
    x.set(other + x.get())
    assert x.get().tolist() == [[4, 4], [6, 6]]
    for wrong, refused in (
        (other.astype(np.float64), TypeError),
        (other[0], ValueError),
        ([[1.0]], TypeError),
    ):
        for call in (x.set, lambda out: x.get(out=out)):
            with pytest.raises(refused, match=r"wanted|on the host"):
                call(wrong)
    with pytest.raises(RuntimeError, match="not contiguous"):
        cupy.zeros((2, 3), np.float32)[:, :2].set(other)


def test_pinned_memory_must_not_change_before_the_host_waits() -> None:
    x, stream, event = cupy.zeros(4, np.float32), cupy.cuda.Stream(), cupy.cuda.Event()
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)

    def send(value: float) -> None:
        pinned[:] = value
        x.data.copy_from_host_async(pinned.ctypes.data, 16, stream)

    send(1)
    event.record(stream)
    event.synchronize()
    send(2)  # the first copy has been waited for
    event.synchronize()  # which says nothing of the second
    stream.synchronize()
    for wait in (event.synchronize, stream.synchronize, x.get):
        with stream:
            send(3)
            event.record(stream)
            pinned[:] = 4
            with pytest.raises(LaunchError, match="on its way"):
                wait()


def test_grids_are_tuples_as_for_cupy() -> None:
    kernel = cupy._Function(Emulator(DOUBLE), "double")
    with pytest.raises(TypeError, match="grid and block must be tuples"):
        kernel(1, (4,), (cupy.zeros(4, np.float32),))


def test_a_full_device_is_out_of_memory() -> None:
    with pytest.raises(MemoryError, match="do not fit"):
        cupy.zeros(1 << 20, np.float32)
    assert cupy.cuda.runtime.memGetInfo() == (1 << 20, 1 << 20)

"""Launch code written for CuPy, run on the stand-in with committed PTX."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow_ptx.cupy_stand_in as stand_in
from nbflow_ptx import KernelFault, LaunchError

PTX = Path(__file__).parent / "kernels" / "planted.ptx"


@pytest.fixture
def cupy() -> Iterator[Any]:
    stand_in.reset()
    with stand_in.installed() as module:
        yield module


def test_launch_code_runs_unchanged(cupy: Any) -> None:
    import cupy as cp

    module = cp.RawModule(path=str(PTX))
    x, y = cp.asarray(np.arange(128, dtype=np.float32)), cp.empty(128, cp.float32)
    with cp.cuda.Stream() as stream:
        module.get_function("bounds_ok")((4,), (32,), (x, y, np.int32(128)), stream=stream)
        stream.synchronize()
    np.testing.assert_array_equal(cp.asnumpy(y), np.arange(128))
    assert stand_in.last_launch() is not None


def test_uninitialised_and_freed_memory_is_seen(cupy: Any) -> None:
    kernel = cupy.RawModule(path=str(PTX)).get_function("bounds_ok")
    x, y = cupy.empty(128, np.float32), cupy.zeros(128, np.float32)
    x[:100] = 1
    with pytest.raises(KernelFault, match="byte 400 of array") as e:
        kernel((4,), (32,), (x, y, np.int32(128)))
    assert e.value.finding.check == "uninitialised"
    x[100:] = 2
    kernel((4,), (32,), (x, y, np.int32(128)))
    pointer = np.uint64(x.data.ptr)
    del x
    with pytest.raises(KernelFault) as e:
        kernel((4,), (32,), (pointer, y, np.int32(128)))
    assert e.value.finding.check == "freed"


def test_slices_share_memory(cupy: Any) -> None:
    kernel = cupy.RawModule(path=str(PTX)).get_function("bounds_ok")
    x = cupy.arange(256, dtype=np.float32).reshape(2, 128)
    y = cupy.zeros((2, 128), np.float32)
    kernel((4,), (32,), (x[1], y[0], np.int32(128)))
    np.testing.assert_array_equal(y.get(), [np.arange(128, 256), np.zeros(128)])
    assert y[0].data.ptr == y.data.ptr
    assert x[1].data.ptr == x.data.ptr + 512
    assert float(x[1, 3]) == 131


@pytest.mark.parametrize("bad", [128, 128.0, np.int64(128)])
def test_arguments_of_the_wrong_size(cupy: Any, bad: Any) -> None:
    kernel = cupy.RawModule(path=str(PTX)).get_function("bounds_ok")
    x = cupy.zeros(128, np.float32)
    with pytest.raises(LaunchError, match=r"argument 2 has 8 bytes .*, the parameter 4"):
        kernel((4,), (32,), (x, x, bad))


def test_host_arrays_and_missing_arguments(cupy: Any) -> None:
    kernel = cupy.RawModule(path=str(PTX)).get_function("bounds_ok")
    with pytest.raises(TypeError, match="argument 0 is a NumPy array"):
        kernel((4,), (32,), (np.zeros(128, np.float32), cupy.zeros(128), np.int32(1)))
    with pytest.raises(LaunchError, match="takes 3 arguments, got 1"):
        kernel((4,), (32,), (cupy.zeros(128),))
    with pytest.raises(TypeError, match="implicit conversion"):
        np.asarray(cupy.zeros(3))


def test_large_shared_memory_must_be_asked_for(cupy: Any) -> None:
    kernel = cupy.RawModule(path=str(PTX)).get_function("bounds_shared_ok")
    y = cupy.zeros(32, np.float32)
    kernel((1,), (32,), (y,), shared_mem=128)
    with pytest.raises(LaunchError, match="max_dynamic_shared_size_bytes"):
        kernel((1,), (32,), (y,), shared_mem=64 * 1024)
    kernel.max_dynamic_shared_size_bytes = 64 * 1024
    kernel((1,), (32,), (y,), shared_mem=64 * 1024)


def test_views_and_conversions(cupy: Any) -> None:
    x = cupy.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert x.T.shape == (3, 2)
    assert x.view(np.uint32).dtype == np.uint32
    assert x.astype(np.int32).get().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cupy.full((2,), 3, np.int8).tolist() == [3, 3]
    assert x.__cuda_array_interface__["data"][0] == x.data.ptr
    assert cupy.get_array_module(x) is stand_in
    assert cupy.get_array_module(np.zeros(1)) is np
    x.fill(7)
    assert x.ravel().get().tolist() == [7] * 6


def test_launchers_find_the_device_at_the_arrays_type(cupy: Any) -> None:
    x, y = cupy.arange(128, dtype=np.float32), cupy.empty(128, np.float32)
    device = type(x).__kernel_device__
    assert (device.output, device.arch) == ("ptx", "sm_80")
    launch = device.load(PTX.read_bytes(), "bounds_ok")
    packed = struct.pack("<QQi", x.data.ptr, y.data.ptr, 128)
    launch((4, 1, 1), (32, 1, 1), packed, 0)
    np.testing.assert_array_equal(y.get(), np.arange(128))
    with pytest.raises(
        LaunchError, match="bounds_ok: 24 bytes of arguments, the parameters take 20"
    ):
        launch((4, 1, 1), (32, 1, 1), packed + bytes(4), 0)
    assert device.empty(3, np.int32).shape == (3,)
    device.constants["table"] = x
    stand_in.reset(arch="sm_90")
    assert (device.arch, device.constants) == ("sm_90", {})

"""Arrays of other libraries on a device: the CUDA array interface at the boundary of public ops."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
import nbflow_ptx.cupy_stand_in as stand_in
from nbflow_kernels.errors import MissingExtraError, UsageError
from nbflow_kernels.exchange.array_exchange import native


class DeviceTensor:
    """Device memory behind the CUDA array interface and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.array.__cuda_array_interface__)

    def __array_namespace__(self) -> type[DeviceTensor]:
        return DeviceTensor

    from_dlpack: Any


DeviceTensor.from_dlpack = staticmethod(DeviceTensor)


@pytest.fixture
def device(cupy: Any) -> Iterator[Any]:
    """Emulated CuPy that ``import cupy`` finds."""
    with stand_in.installed():
        yield cupy


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def test_memory_is_shared(device: Any) -> None:
    array = device.asarray(_normal(4, 6))
    found = native("x", DeviceTensor(array[:, 1:3]))
    np.testing.assert_array_equal(found.get(), array[:, 1:3].get())
    found[...] = 2.0
    assert (array.get()[:, 1:3] == 2.0).all()
    with pytest.raises(ValueError, match="no emulated array at address"):
        device.asarray(type("T", (), {"__cuda_array_interface__": {"data": (1 << 60, False)}})())


@pytest.mark.compiler
def test_results_are_of_the_kind_and_the_bits_of_cupy(device: Any) -> None:
    x, weight = device.asarray(_normal(3, 40)), device.asarray(_normal(40))
    wanted = nk.rmsnorm(x, weight).get()
    found = nk.rmsnorm(DeviceTensor(x), DeviceTensor(weight))
    assert isinstance(found, DeviceTensor)
    np.testing.assert_array_equal(found.array.get(), wanted)
    out = DeviceTensor(device.empty((3, 40), np.float32))
    assert nk.rmsnorm(x, weight, out=out) is out
    np.testing.assert_array_equal(out.array.get(), wanted)


@pytest.mark.compiler
def test_float16_and_int64_on_a_device(device: Any) -> None:
    x, weight = _normal(3, 40).astype(np.float16), _normal(40)
    wide = nk.rmsnorm(device.asarray(x.astype(np.float32)), device.asarray(weight))
    found = nk.rmsnorm(device.asarray(x), device.asarray(weight))
    np.testing.assert_array_equal(found.get(), wide.get().astype(np.float16))
    table = device.asarray(_normal(5, 3))
    found = nk.embedding(device.asarray(np.array([4, 0])), table)
    np.testing.assert_array_equal(found.get(), _normal(5, 3)[[4, 0]])


def test_bfloat16_activations_on_a_device_are_refused(device: Any) -> None:
    class Bits(DeviceTensor):
        dtype = "other.bfloat16"

        def view(self, dtype: Any) -> Any:
            return self.array

        def __array_namespace__(self) -> Any:
            return np

    with pytest.raises(UsageError, match="x: bfloat16 on a CUDA device"):
        nk.silu(Bits(device.asarray(np.zeros((2, 2), np.uint16))))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_the_extra_is_named(cupy: Any) -> None:
    with pytest.raises(MissingExtraError, match=r"x is on a CUDA device.*pip install"):
        nk.silu(DeviceTensor(cupy.asarray(_normal(2, 2))))

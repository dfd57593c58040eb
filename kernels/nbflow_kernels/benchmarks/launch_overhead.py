"""Host time of CUDA launches: from the call of an op to the driver, which does nothing.

    python -m nbflow_kernels.benchmarks.launch_overhead

Needs no GPU, CuPy or compiler: arrays have addresses and no memory, kernels no code, and
``cuLaunchKernelEx`` is a C function that returns 0.  So the time is the CPU's, for choosing a
kernel, checking and packing its arguments, and the call through ctypes; a GPU is not involved.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import nbflow_kernels as nk
from nbflow_kernels.activation import cuda as activation
from nbflow_kernels.attention import cuda as attention
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.cuda import cache, cpp_kernel, devices, driver, record_launches
from nbflow_kernels.exchange import array_exchange
from nbflow_kernels.norm import cuda as norm
from nbflow_kernels.quantized_matmul import cuda as quantized
from nbflow_kernels.quantized_matmul import cuda_fused

WIDTH = 4096
CALLS, SAMPLES = 200, 25

Op = Callable[[], Any]


class _Memory:
    """Pointer of an array, as CuPy's ``ndarray.data``."""

    __slots__ = ("device_id", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr, self.device_id = ptr, 0


class ndarray:
    """Array with an address and no memory; its attributes cost what CuPy's do."""

    __slots__ = (
        "_view", "data", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides",
    )  # fmt: skip
    __cuda_array_interface__ = property(lambda self: {"data": (self.data.ptr, False)})

    def __init__(self, view: np.ndarray) -> None:
        self._view, self.data = view, _Memory(view.ctypes.data)
        self.dtype, self.itemsize, self.nbytes = view.dtype, view.itemsize, view.nbytes
        self.shape, self.strides, self.size = view.shape, view.strides, view.size
        self.ndim, self.flags = view.ndim, view.flags

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: Any) -> ndarray:
        return ndarray(self._view[key])

    def get(self) -> np.ndarray:
        """Return the contents, which are the host's."""
        return self._view


def empty(shape: Any, dtype: Any) -> ndarray:
    """Return an array; its memory is reserved and never touched."""
    return ndarray(np.empty(shape, dtype))


class _Driver:
    """The driver's library: every function returns 0."""

    def __init__(self) -> None:
        # returns 0 for different arguments, and ignores those after the second
        self.cuLaunchKernelEx = ctypes.CDLL(None)["pthread_equal"]
        self.cuLaunchKernelEx.restype = ctypes.c_int

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
        """Answer as an H100 does."""
        capability = {driver.CAPABILITY_MAJOR: 9, driver.CAPABILITY_MINOR: 0}
        value._obj.value = {
            **capability, driver.MULTIPROCESSOR_COUNT: 132, driver.MAX_SHARED_BYTES_OPT_IN: 232448,
        }[number]  # fmt: skip
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        """Return a handle."""
        function._obj.value = 0x7F0000000000
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """Let kernels run on arrays of this module, without a device."""
    stream, runtime = types.SimpleNamespace(ptr=0), types.SimpleNamespace(getDevice=lambda: 0)
    cuda = types.SimpleNamespace(get_current_stream=lambda: stream, runtime=runtime)
    cupy = types.SimpleNamespace(
        cuda=cuda, ndarray=ndarray, empty=empty, asarray=lambda a: ndarray(np.array(a))
    )
    cupy_of = types.SimpleNamespace(cupy=cupy)  # a mock would take longer than the launch
    made, library = driver.Driver, _Driver()
    with (
        mock.patch.object(devices, "_cupy", partial(getattr, cupy_of, "cupy")),
        mock.patch.object(driver, "Driver", lambda ordinal: made(ordinal, library)),
        mock.patch.object(cache, "cached", lambda name, *_: (b"", name)),
        mock.patch.dict("os.environ", {"NBFLOW_WGMMA": "1"}),
        mock.patch.object(
            array_exchange, "is_native", lambda a: isinstance(a, np.ndarray | ndarray)
        ),
    ):
        devices._cupy_device.cache_clear()
        try:
            yield
        finally:
            devices._cupy_device.cache_clear()


def ops() -> dict[str, Op]:
    """Return calls of ops of a layer, for one token where not said otherwise."""
    x, out = empty((1, WIDTH), "f4"), empty((1, WIDTH), "f4")
    both, weight = empty((1, 2 * WIDTH), "f4"), empty(WIDTH, "f4")
    prompt, prompt_out = empty((64, WIDTH), "f4"), empty((64, WIDTH), "f4")
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((64, WIDTH), dtype=np.float32)
    w = nk.quantize(matrix, "q4_0", quantizer="reference").to_device()
    small, prompt_small = empty((1, 64), "f4"), empty((64, 64), "f4")
    bare = cpp_kernel(__file__, "copy_bandwidth.cu", "copy", "f32* x, f32* out, i32 n, f32 factor")
    rms = cuda_fused.Norm("rms", weight, None, 1e-5)
    plan = AttentionPlan((32, 8, 128, 128), 64, causal=True)
    table = np.arange(2, dtype=np.int32)
    plan_into(plan, table, table, np.zeros(1, np.int32), np.array([50], np.int32))
    q, pages = empty((1, 32, 128), "f4"), empty((4, 64, 8, 128), "f2")
    q_out = empty((1, 32, 128), "f4")
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper()
    starts, first, length = (np.array(values, np.int32) for values in ([0, 1], [0], [50]))
    wrapper.plan(starts, first, length, 32, 8, 128, 64, q_data_type="float32")
    keys = empty((50, 8, 128), "f2")
    return {
        "kernel of 4 parameters": lambda: bare(16, 256, (x, out, WIDTH, 1.0)),
        "rmsnorm": lambda: norm.rmsnorm(x, weight, 1e-5, 0.0, out),
        "glu": lambda: activation.glu(both, "silu", True, out),
        "qmatmul q4_0": lambda: quantized.qmatmul(x, w, None, False, "f32", small),
        "qmatmul q4_0, 64 tokens": lambda: quantized.qmatmul(
            prompt, w, None, False, "f32", prompt_small
        ),
        "rmsnorm, 64 tokens": lambda: norm.rmsnorm(prompt, weight, 1e-5, 0.0, prompt_out),
        "fused norm and qmatmul": lambda: cuda_fused.fused_gemv(x, w, None, small, norm=rms),
        "attention": lambda: attention.attend(plan, q, pages, pages, q_out, None, (1, 1)),
        "attention, run of a wrapper": lambda: wrapper.run(q, (pages, pages), out=q_out),
        "attention, one request": lambda: nk.single_decode_with_kv_cache(q[0], keys, keys),
    }


def _repeat(launches: list[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


def host_us(op: Op) -> float:
    """Return the time of a call in microseconds: the fastest sample, as other work only adds."""
    times = []
    for _ in range(SAMPLES):
        started = time.thread_time()
        for _ in range(CALLS):
            op()
        times.append(time.thread_time() - started)
    return min(times) / CALLS * 1e6


def measure() -> list[dict[str, Any]]:
    """Return a row for each op."""
    rows = []
    with no_device():
        for name, op in ops().items():
            op()
            with record_launches() as launches:
                op()
            n = len(launches)
            row = {"op": name, "launches": n, "us_per_launch": round(host_us(op) / n, 2)}
            row["recorded_us_per_launch"] = round(host_us(partial(_repeat, launches)) / n, 2)
            rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    rows = measure()
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        times = row["us_per_launch"], row["recorded_us_per_launch"]
        print(f"{row['op']:26} {row['launches']} x {times[0]:6.2f} us, recorded {times[1]:5.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())

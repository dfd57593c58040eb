"""The launcher: declarations, packing, the disk cache, and the calls of the driver."""

from __future__ import annotations

import ctypes
import json
import re
import struct
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
import nbflow_ptx.nvrtc
from nbflow_kernels import cuda
from nbflow_kernels.attention import cuda as attention
from nbflow_kernels.benchmarks import launch_overhead
from nbflow_kernels.cuda import bundle, cache, kernel, nvrtc
from nbflow_kernels.cuda import numba_cuda as numba_code
from nbflow_kernels.cuda.detect import _ask, _too_new, detect, extra
from nbflow_kernels.cuda.driver import Driver
from nbflow_kernels.cuda.kernel_parameters import Parameters
from nbflow_kernels.errors import MissingExtraError, UsageError
from nbflow_kernels.quantized_matmul import cuda as products
from nbflow_kernels.testing.cuda_compile_all import (
    _compile,
    _start,
    check_launch,
    choose,
    compile_all,
)

SOURCE = """
#include "factor.cuh"
template <class T, int N> __global__ void scale(const T* x, T* out, int n, float f) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * f * N * FACTOR;
}
extern "C" __global__ void through_shared(const float* x, float* out, int n) {
  extern __shared__ float room[];
  int i = threadIdx.x;
  if (i < n) room[1024 * i] = x[i];
  __syncthreads();
  if (i < n) out[i] = room[1024 * (n - 1 - i)];
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a source, and an empty disk cache."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "source.cu").write_text(SOURCE)
    (tmp_path / "factor.cuh").write_text("#define FACTOR 2\n")
    return tmp_path


def _scale(folder: Path) -> cuda.Kernel:
    return cuda.cpp_kernel(
        str(folder / "module.py"), "source.cu", "scale<float, 3>",
        "f32* x, f32* out, i32 n, f32 f",
    )  # fmt: skip


@pytest.mark.compiler
def test_template_and_c_kernels_run_on_the_arrays_device(cupy: Any, folder: Path) -> None:
    x = cupy.arange(70, dtype=np.float32)
    out = cupy.empty(70, np.float32)
    with cuda.record_launches() as launches:
        _scale(folder)((3,), 32, (x, out, 70, 0.5))
    out.fill(0)
    (again,) = launches
    again()
    np.testing.assert_array_equal(out.get(), 3 * np.arange(70))
    through = cuda.cpp_kernel(
        str(folder / "module.py"), "source.cu", "through_shared", "f32* x, f32* out, i32 n"
    )
    back = cupy.empty(32, np.float32)
    through(1, 32, (x[:32], back, 32), shared=4096 * 32)  # 128 KB: more than the default
    np.testing.assert_array_equal(back.get(), np.arange(32)[::-1])
    with pytest.raises(UsageError, match="through_shared needs 300000 bytes of shared memory"):
        through(1, 32, (x[:32], back, 32), shared=300000)
    with pytest.raises(UsageError, match="axes of a grid"):
        through((1, 70000), 32, (x[:32], back, 32))


@pytest.mark.compiler
def test_a_kernel_of_one_architecture_is_compiled_for_it(folder: Path) -> None:
    """Devices of compute capability 9.0 get ``sm_90a``, under a separate cache key."""
    (folder / "own.cu").write_text("""
extern "C" __global__ void own(int* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;");
#endif
  out[threadIdx.x] = 1;
}""")
    for arch, target, present in (
        ("sm_80", "sm_80", False),
        ("sm_90", "sm_90a", True),
    ):
        for specific in (True, False):
            made = cuda.cpp_kernel(
                str(folder / "module.py"), "own.cu", "own", "i32* out", arch_specific=specific
            )
            text, _ = made.compile(arch, "ptx")
            assert f".target {target if specific else arch}\n".encode() in text
            assert (b"wgmma.fence" in text) == (present and specific)
    assert len(list(cache.folder().iterdir())) == 3  # sm_80 is the same both ways


@pytest.fixture
def older_nvrtc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An NVRTC that knows no architecture after 9.0."""
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: (80, 86, 89, 90))
    nvrtc.target.cache_clear()
    yield
    nvrtc.target.cache_clear()


@pytest.mark.compiler
def test_a_device_newer_than_the_compiler_gets_ptx_of_the_newest_architecture_before_its_own(
    folder: Path, older_nvrtc: None, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "own.cu").write_text("""
extern "C" __global__ void own(int* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;");
#endif
  out[threadIdx.x] = __CUDA_ARCH__;
}""")
    made = cuda.cpp_kernel(
        str(folder / "module.py"), "own.cu", "own", "i32* out", arch_specific=True
    )
    text, entry = made.compile("sm_100", "cubin")
    assert (text[-1:], entry) == (b"\n", "own")
    assert b".target sm_90\n" in text
    assert b"wgmma" not in text
    assert made.compile("sm_120", "cubin") == (text, entry)  # the same file
    assert [path.suffix for path in cache.folder().iterdir()] == [".ptx"]
    assert made.compile("sm_90", "cubin")[0][:4] == b"\x7fELF"
    assert len(list(cache.folder().iterdir())) == 2
    library = _Library()
    Driver(0, library).load(text, "scale")
    (loaded,) = (args[1] for name, args in library.calls if name == "cuModuleLoadData")
    assert loaded.value == text  # ends with a zero byte for the driver
    assert nvrtc.target("sm_75", "cubin") == ("sm_75", "cubin")  # too old: the compiler says so
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2  # for each architecture once
    assert re.match(r"NVRTC \S+ does not know sm_100: .* PTX for compute_90", lines[0])
    with pytest.raises(UsageError, match="architectures up to sm_90, got sm_100"):
        compile_all([], "sm_100", 1)


@pytest.mark.compiler
def test_ptx_for_a_newer_device_runs(
    cupy: Any, folder: Path, older_nvrtc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator takes the place of the driver, which translates PTX."""
    cupy.reset(arch="sm_100")
    monkeypatch.setattr(type(cupy.ndarray.__kernel_device__), "output", "cubin")
    x = cupy.arange(70, dtype=np.float32)
    out = cupy.full(70, np.nan, np.float32)
    _scale(folder)((3,), 32, (x, out, 70, 0.5))
    np.testing.assert_array_equal(out.get(), 3 * np.arange(70))


@pytest.mark.compiler
def test_numba_kernel_runs_and_its_name_is_short(cupy: Any, folder: Path) -> None:
    from numba import cuda as numba_cuda

    @cuda.numba_kernel("f16* x, f32*? bias, f32* out, i32 n", key=None)
    def bits(x, bias, out, n):  # type: ignore[no-untyped-def]
        i = numba_cuda.grid(1)
        if i < n:
            out[i] = np.float32(x[i])

    x = cupy.asarray(np.float16([1, 2, 3]))
    out = cupy.empty(3, np.float32)
    bits(1, 32, (x, None, out, 3))
    np.testing.assert_array_equal(out.get(), np.float16([1, 2, 3]).view(np.uint16))
    code, entry = bits.compile("sm_90", "cubin")
    assert (code[:4], entry) == (b"\x7fELF", "bits")
    assert not cache.folder().exists()  # key=None


@pytest.mark.compiler
def test_code_is_kept_on_disk_and_made_again_if_anything_changes(folder: Path) -> None:
    first = _scale(folder).compile("sm_90", "cubin")
    files = list(cache.folder().iterdir())
    assert len(files) == 1
    assert first[0][:4] == b"\x7fELF"
    before = files[0].stat().st_mtime_ns
    assert _scale(folder).compile("sm_90", "cubin") == first
    assert files[0].stat().st_mtime_ns == before
    files[0].write_bytes(files[0].read_bytes()[:-7] + b"corrupt")
    assert _scale(folder).compile("sm_90", "cubin") == first
    assert files[0].read_bytes().endswith(first[0])
    (folder / "factor.cuh").write_text("#define FACTOR 3\n")
    assert _scale(folder).compile("sm_90", "cubin") != first
    assert _scale(folder).compile("sm_80", "cubin")[0] != first[0]
    assert len(list(cache.folder().iterdir())) == 3


def test_what_several_ask_for_at_once_is_made_once(folder: Path) -> None:
    made: list[int] = []

    def build() -> cache.Compiled:
        made.append(1)
        time.sleep(0.1)  # so that the others come meanwhile
        return b"code", "entry"

    with ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda _: cache.cached(
                "kernel", "ptx", lambda *versions: f"key{len(versions)}", lambda: ("1.0",), build
            ),
            range(4),
        )
        assert list(found) == 4 * [(b"code", "entry")]
    assert made == [1]
    assert [path.name for path in cache.folder().iterdir()] == ["kernel-key1.ptx"]


@pytest.mark.compiler
def test_kernels_are_compiled_ahead_for_a_device_that_is_not_here(
    cupy: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in choose(["rmsnorm"], timed=False) if case.name == "small"]
    assert compile_all(cases, "sm_90", 1) == []
    (file,) = cache.folder().glob("*.cubin")
    assert b"\x7fELF" in file.read_bytes()
    device = cupy.ndarray.__kernel_device__
    monkeypatch.setattr(cupy.ndarray, "__kernel_device__", device)  # and back, behind what follows
    _start("sm_10")
    line = _compile("rmsnorm-small")
    assert line.startswith("rmsnorm-small: ")
    assert "sm_10" in line
    header, code = file.read_bytes().split(b"\n", 1)
    entry = json.loads(header)["entry"]
    check_launch(code, entry, (1024, 1, 1), 1000, 4000)
    with pytest.raises(cuda.CudaError, match="registers of 8192 threads are too many"):
        check_launch(code, entry, (1024, 8, 1), 0, 4000)
    with pytest.raises(cuda.CudaError, match="4001 dynamic bytes of shared memory"):
        check_launch(code, entry, (32, 1, 1), 4001, 4000)
    with pytest.raises(UsageError, match="did you mean 'rmsnorm'"):
        choose(["rmsnrom"], timed=True)


@pytest.mark.compiler
def test_compile_errors_name_the_kernel_and_keep_the_log(folder: Path) -> None:
    (folder / "factor.cuh").write_text("#define FACTOR no_such_name\n")
    with pytest.raises(cuda.CompileError, match=r"scale<float, 3> of source.cu.*no_such_name"):
        _scale(folder).compile("sm_80", "ptx")


def test_a_closure_needs_a_key_and_names_must_agree() -> None:
    factor = 3

    def scale(x, n):  # type: ignore[no-untyped-def]
        x[0] = n * factor

    with pytest.raises(TypeError, match=r"closes over \('factor',\); it needs a key"):
        cuda.numba_kernel("f32* x, i32 n")(scale)
    with pytest.raises(TypeError, match=r"declared are .f32\* y, i32 n."):
        cuda.numba_kernel("f32* y, i32 n", key="3")(scale)


def test_arguments_are_checked_and_laid_out_as_in_a_c_struct(cupy: Any) -> None:
    declared = Parameters("f32* x, f32*? w, i32 n, i64 m, f32 eps, u8 flag")
    x = cupy.zeros(4, np.float32)
    packed = declared.pack("k", (x, None, -5, 1 << 40, 0.5, 7))
    assert packed == struct.pack("<QQi4xqfB", x.data.ptr, 0, -5, 1 << 40, 0.5, 7)
    good = (x, None, 1, 2, 0.5, 0)
    for at, wrong, message in (
        (0, None, "x must be an array on the device, got NoneType"),
        (0, np.zeros(4, np.float32), "x must be an array on the device, got ndarray"),
        (1, cupy.zeros(4, np.int32), "w must be a f32 array, got int32"),
        (2, 1 << 31, "n must fit i32, got 2147483648"),
        (2, 1.0, "n must fit i32, got 1.0"),
        (5, -1, "flag must fit u8, got -1"),
    ):
        with pytest.raises(TypeError, match=f"k: {message}"):
            declared.pack("k", (*good[:at], wrong, *good[at + 1 :]))
    with pytest.raises(TypeError, match="k takes 6 arguments, got 2"):
        declared.pack("k", (x, None))


@pytest.mark.parametrize("text", ["f32 *x", "f16 x", "i32? n", "float x", "x", "i32 n,"])
def test_wrong_declarations(text: str) -> None:
    with pytest.raises(TypeError, match="is not a parameter like"):
        Parameters(text)


def test_where_there_is_no_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(nvrtc.importlib, "import_module", missing)
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[cuda12\]'"):
        nvrtc._nvrtc()


@pytest.mark.compiler
def test_a_numba_cuda_that_is_too_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_code, "LEAST_VERSION", (99, 1))
    with pytest.raises(MissingExtraError, match=r"numba-cuda 0\.\S+ is older than 99.1: "):
        numba_code.version()


def test_detection_never_raises() -> None:
    found = detect("libm.so.6")  # a library, but no driver
    assert not found.usable
    assert "libm.so.6" in found.reason
    assert detect("no such file").reason.startswith("no CUDA driver found")
    assert [extra(v) for v in (None, (12, 9), (13, 0))] == ["cuda12", "cuda12", "cuda13"]


def test_without_numba_cuda_kernels_of_cuda_cpp_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CuPy and NVRTC are needed, or CuPy and a bundle."""
    missing = {"numba_cuda"}
    detection = sys.modules[detect.__module__]  # the package's `detect` is the function
    monkeypatch.setattr(detection, "_installed", lambda package: package not in missing)
    monkeypatch.setattr(detection, "_ask", lambda driver: ((12, 9), 1, ""))
    monkeypatch.setattr(detection, "_too_new", lambda driver: "")
    found = detect("libm.so.6")
    assert (found.usable, found.compilers, found.nvvm) == (True, True, False)
    assert found.limitation.startswith("numba-cuda is missing, so Numba kernels cannot be compiled")
    missing.add("cuda.bindings")
    assert detect("libm.so.6").reason.startswith("cuda-bindings missing: pip install")
    monkeypatch.setenv(bundle.VARIABLE, str(tmp_path / "kernels.bundle"))
    assert detect("libm.so.6").usable


class _Refuses:
    """A driver for CUDA 12.8 whose ``cuInit`` fails."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0


def test_why_a_driver_cannot_be_used() -> None:
    for code, message in (
        (100, "the CUDA driver finds no CUDA device"),
        (803, r"failed with error 803 \(the driver's library and its kernel module differ"),
        (999, "failed with error 999$"),
    ):
        version, n_devices, reason = _ask(_Refuses(code))  # type: ignore[arg-type]
        assert (version, n_devices) == ((12, 8), 0)
        assert re.search(message, reason)


def test_packages_for_a_newer_cuda_than_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cupy_cuda13x-14.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda13x\nVersion: 14.2.0\n")
    assert _too_new((14, 0)) == ""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _too_new((14, 0)) == ""  # a driver runs what is older
    found = _too_new((12, 8))
    assert re.match("cupy-cuda13x .*need CUDA 13, the driver runs CUDA 12.8: pip uninstall", found)
    assert "pip install -e '.[cuda12]'" in found


class _Library:
    """The driver's functions as the C ABI sees them; every launch is recorded."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.launches: list[Any] = []
        self.context_current = False
        p = ctypes.c_void_p
        self.cuLaunchKernelEx: Any = ctypes.CFUNCTYPE(ctypes.c_int, p, p, p, p)(self._run)

    def _run(self, config: int, function: int, parameters: int | None, extra: int) -> int:
        if not self.context_current:
            return 201
        # the members of CUlaunchConfig, with the padding of a C compiler
        *dims, shared, stream, attributes, n_attributes = struct.unpack(
            "@7IPPI4x", ctypes.string_at(config, 56)
        )
        assert attributes == n_attributes == 0
        words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        n_bytes = ctypes.c_size_t.from_address(words[3] or 0).value
        assert (words[0], words[2], words[4], parameters) == (1, 2, None, None)
        packed = ctypes.string_at(words[1] or 0, n_bytes)
        self.launches.append((function, tuple(dims), shared, stream, packed))
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context_current = True
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
        value._obj.value = {75: 9, 76: 0, 16: 132, 97: 232448}[number]
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 0xF00
        return 0 if name == b"scale" else 500

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"named symbol not found"
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, args)) or 0


def test_launches_of_two_threads_never_lower_a_kernels_shared_memory() -> None:
    library = _Library()
    device = Driver(0, library)
    function = device.load(b"code", "scale")
    allowed, others = [0], []

    def launch(shared: int) -> None:
        device.launch(function, (1, 1, 1), (32, 1, 1), b"", shared, 0)

    def set_attribute(handle: Any, number: int, shared: int) -> int:
        if not others:  # while the first thread is here, another one launches with more
            others.append(threading.Thread(target=launch, args=(200,)))
            others[0].start()
            others[0].join(0.2)  # it ends within that time only if it does not wait
        allowed[0] = shared
        return 0

    library.cuFuncSetAttribute = set_attribute
    launch(100)
    others[0].join(60)
    assert not others[0].is_alive()
    assert (allowed[0], function.shared_bytes) == (200, 200)
    assert len(library.launches) == 2


def test_the_driver_gets_what_cuda_h_says() -> None:
    library = _Library()
    device = Driver(0, library)
    assert device.capability == (9, 0)
    function = device.load(b"\x7fELF\0code", "scale")
    library.context_current = False  # as in a thread that has not used CUDA
    packed = struct.pack("<Qif", 0x7F00, 3, 0.5)
    device.launch(function, (2, 3, 4), (32, 1, 1), packed, 100 * 1024, 0xABC)
    assert library.launches == [(0xF00, (2, 3, 4, 32, 1, 1), 100 * 1024, 0xABC, packed)]
    set_shared = [args for name, args in library.calls if name == "cuFuncSetAttribute"]
    assert [(f.value, *rest) for f, *rest in set_shared] == [(0xF00, 8, 100 * 1024)]
    device.launch(function, (1, 1, 1), (32, 1, 1), packed, 64 * 1024, 0)
    assert len(library.launches) == 2
    with pytest.raises(cuda.CudaError, match=r"error 500 \(named symbol not found\)"):
        device.load(b"", "no_such_kernel")


def test_host_time_of_launches_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_overhead, "CALLS", 1)
    monkeypatch.setattr(launch_overhead, "SAMPLES", 1)
    rows = launch_overhead.measure()
    assert [row["launches"] for row in rows if "64 tokens" in row["op"]] == [2, 1]
    assert all({"us_per_launch", "recorded_us_per_launch"} <= row.keys() for row in rows)


def test_repeated_products_are_planned_once() -> None:
    plans = (products._plan_gemv, products._plan_gemm)
    with launch_overhead.no_device():
        calls = {n: op for n, op in launch_overhead.ops().items() if "qmatmul" in n}
        assert len(calls) == 3  # few rows, many rows, fused
        for op in calls.values():
            op()
        before = [plan.cache_info().misses for plan in plans]
        for op in calls.values():
            op()
        assert [plan.cache_info().misses for plan in plans] == before
        assert all(plan.cache_info().hits for plan in plans)


def test_repeated_attention_is_selected_planned_and_uploaded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with launch_overhead.no_device():
        calls = [op for name, op in launch_overhead.ops().items() if "attention" in name]
        assert len(calls) == 3  # the launch, a wrapper, one request
        for op in calls:
            op()
        uploads: list[Any] = []
        upload = cuda.devices.CupyDevice.asarray
        monkeypatch.setattr(
            cuda.devices.CupyDevice, "asarray", lambda *a: uploads.append(a) or upload(*a)
        )
        caches = (attention._select, attention._mma_launch)
        before = [cache.cache_info().misses for cache in caches]
        with cuda.record_launches() as launches:
            for op in calls:
                op()
        assert len(launches) == 3
        assert not uploads
        assert [cache.cache_info().misses for cache in caches] == before


@pytest.mark.compiler
def test_numba_cuda_is_imported_with_a_numpy_that_lacks_row_stack() -> None:
    """NumPy 2.5 has removed it, numba-cuda 0.30 names it."""
    code = (
        "import numba.np.arrayobj, numpy as np\n"
        "np.__dict__.pop('row_stack', None)\n"
        "from nbflow_kernels.cuda import numba_cuda\n"
        "numba_cuda.module()\n"
        "import sys\n"
        "assert 'numba.cuda.np.arrayobj' in sys.modules and not hasattr(np, 'row_stack')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_includes_are_found_and_part_of_the_digest(folder: Path) -> None:
    (folder / "factor.cuh").write_text('#include "more.cuh"\n#include <cuda_fp16.h>\n')
    (folder / "more.cuh").write_text('#include "factor.cuh"\n')
    assert len(kernel._sources(folder / "source.cu")) == 3


def test_arrays_in_two_places_are_refused(cupy: Any) -> None:
    host, there = np.ones((2, 8), np.float32), cupy.ones((2, 8), np.float32)
    for call in (
        lambda: nk.rmsnorm(host, there[0]),
        lambda: nk.silu(host, out=there),
    ):
        with pytest.raises(TypeError, match="is in host memory, another one on a CUDA device"):
            call()
    for call in (
        lambda: nk.rmsnorm(there, host[0]),
        lambda: nk.silu(there, out=host),
        lambda: nk.soft_cap(there, 1.0, out=host),
    ):
        with pytest.raises(TypeError, match=r"is on a CUDA device|must be an array on the device"):
            call()


def test_the_wheel_holds_every_source() -> None:
    root = Path(nk.__path__[0])
    settings = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["nbflow_kernels"]
    packed = {file for pattern in patterns for file in root.glob(pattern)}
    sources = {*root.rglob("*.cu"), *root.rglob("*.cuh")}
    assert len(sources) > 10
    assert sources <= packed


@pytest.mark.compiler
def test_compiling_leaves_pythons_shared_objects_alone() -> None:
    """An empty log is one byte long, and NVRTC writes it in place."""
    source = 'extern "C" __global__ void nothing() {}'
    code, entry = nvrtc.compile_source(source, "nothing.cu", "sm_80", "ptx", "nothing", [])
    assert entry.encode() in code
    assert nbflow_ptx.nvrtc.compile_source(source, "sm_80").text
    for number in (0, 32):  # not as literals, which the compiler of Python knows
        assert chr(number).encode() == np.array([number], np.uint8).tobytes()
        assert chr(number).encode()[0] == number

"""Kernels compiled here and now: Numba CUDA and NVRTC, neither of which needs a GPU or a driver."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx.test_planted import CASES
from ptx.test_planted import launch as launch_planted

from nbflow_ptx import Emulator, KernelFault, LaunchError, compile_kernel, launch, lint, nvrtc, out

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(
        not nvrtc.available(), reason="needs numba-cuda: pip install -e '.[cuda-test]'"
    ),
]
KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def cuda() -> Any:
    pytest.importorskip("numba_cuda", reason="needs numba-cuda: pip install -e '.[cuda-test]'")
    from numba import cuda

    return cuda


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_planted_kernels_recompiled(arch: str) -> None:
    source = (KERNELS / "planted.cu").read_text()
    emulator = Emulator(nvrtc.compile_source(source, arch, file_name="planted.cu").text)
    for name in CASES:
        launch_planted(emulator, f"{name}_ok")
        with pytest.raises(KernelFault) as e:
            launch_planted(emulator, name)
        assert e.value.finding.check == name.split("_")[0]


def test_grid_barrier_of_cooperative_groups() -> None:
    text = nvrtc.compile_source((KERNELS / "grid.cu").read_text()).text
    x, y = np.zeros(1024, np.int32), np.zeros(1024, np.int32)
    Emulator(text).launch("grid_barrier", 16, 64, x, y)
    assert y.tolist() == list(range(1023, -1, -1))


def test_templates_and_errors() -> None:
    source = "template <int N> __global__ void scale(float* x) { x[threadIdx.x] *= N; }"
    made = nvrtc.compile_source(source, name_expressions=["scale<3>"])
    x = np.arange(32, dtype=np.float32)
    Emulator(made.text).launch(made.names["scale<3>"], 1, 32, x)
    assert x.tolist() == [3 * t for t in range(32)]
    assert lint(nvrtc.compile_source(source, output="cubin", name_expressions=["scale<3>"]).code)[
        "scale"
    ].registers
    with pytest.raises(nvrtc.CompileError, match='identifier "y" is undefined'):
        nvrtc.compile_source(
            source.replace("x[threadIdx.x]", "y[threadIdx.x]"), name_expressions=["scale<3>"]
        )


def test_numba_kernel(cuda: Any) -> None:
    @cuda.jit(device=True)
    def clip(v: Any, low: Any) -> Any:
        return v if v > low else low

    @cuda.jit
    def kernel(x: Any, y: Any, low: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            v = x[i]
            y[i] = (
                math.exp(-v) + math.log(v * v + 1) + math.sin(v * 1e5) + math.erf(v) + clip(v, low)
            )

    x = np.random.default_rng(0).standard_normal(500)
    y = np.empty(500)
    launch(kernel, 4, 128, x, out(y), 0.25)
    want = (
        np.exp(-x)
        + np.log(x * x + 1)
        + np.sin(x * 1e5)
        + [math.erf(v) for v in x]
        + np.maximum(x, 0.25)
    )
    # five float64 functions, each good to 2 units in the last place of a value below 10
    np.testing.assert_allclose(y, want, rtol=0, atol=5 * 2 * 10 * 2.0**-53)


def test_numba_layouts_and_tuples(cuda: Any) -> None:
    @cuda.jit
    def kernel(x: Any, y: Any, pair: Any) -> None:
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            y[i, j] = x[i, j] * pair[0] + pair[1]

    base = np.arange(60, dtype=np.float32).reshape(5, 12)
    for x in (base, np.asfortranarray(base), base[:, ::2], base.T):
        y = np.zeros(x.shape, np.float32)
        launch(kernel, (2, 2), (8, 8), x, y, (np.float32(2), np.float32(1)))
        np.testing.assert_array_equal(y, x * 2 + 1)


def test_numba_reports_the_python_line(cuda: Any) -> None:
    @cuda.jit
    def kernel(x: Any, y: Any) -> None:
        i = cuda.grid(1)
        y[i] = x[i + 1]  # one too far

    with pytest.raises(KernelFault, match="behind the end of array 'x'") as e:
        launch(kernel, 1, 32, np.zeros(32, np.float32), np.zeros(32, np.float32))
    file, line = e.value.finding.where.split(" ")[0].rsplit(":", 1)
    assert "# one too far" in Path(file).read_text().splitlines()[int(line) - 1]
    assert e.value.finding.kernel == "kernel"


def test_numba_shared_memory_warps_and_grid(cuda: Any) -> None:
    from numba.cuda import cg

    @cuda.jit
    def kernel(x: Any, part: Any, y: Any) -> None:
        tile = cuda.shared.array(64, np.float32)
        t = cuda.threadIdx.x
        tile[t] = x[cuda.grid(1)]
        cuda.syncthreads()
        v = tile[63 - t]
        for offset in (16, 8, 4, 2, 1):
            v += cuda.shfl_xor_sync(0xFFFFFFFF, v, offset)
        if t % 32 == 0:
            cuda.atomic.add(part, cuda.blockIdx.x, v)
        cg.this_grid().sync()
        y[cuda.grid(1)] = part[0] + part[1]

    x = np.arange(128, dtype=np.float32)
    part, y = np.zeros(2, np.float32), np.zeros(128, np.float32)
    launch(kernel, 2, 64, x, part, y)
    assert y.tolist() == [8128.0] * 128


def test_numba_print(cuda: Any) -> None:
    @cuda.jit
    def kernel(n: Any) -> None:
        if cuda.threadIdx.x == n:
            print("thread", cuda.threadIdx.x, 0.5)

    assert launch(kernel, 1, 8, 3).printed == "thread 3 0.500000\n"


def test_numba_exceptions(cuda: Any) -> None:
    """An exception of a debug kernel is recorded on the device and reported."""

    @cuda.jit(debug=True, opt=False)
    def kernel(x: Any) -> None:
        if x[cuda.threadIdx.x] < 0:
            raise ValueError("negative")

    launch(kernel, 1, 8, np.ones(8))
    with pytest.raises(LaunchError, match="raised a Python exception"):
        launch(kernel, 1, 8, -np.ones(8))


def test_compile_kernel_states_facts(cuda: Any) -> None:
    from numba import float32

    @cuda.jit
    def double_literal(x: Any) -> None:
        x[cuda.grid(1)] = x[cuda.grid(1)] * 2.0 + 0.1  # Python floats are float64

    facts = lint(compile_kernel(double_literal, (float32[::1],))).kernels[0]
    assert facts.fp64
    assert facts.registers


def test_shared_memory_that_several_lanes_read_may_be_written_again() -> None:
    source = """extern "C" __global__ void turns(int* out) {
      __shared__ int codes[4][32];
      int lane = threadIdx.x & 31, warp = threadIdx.x / 32, sum = 0;
      for (int turn = 0; turn < 3; turn++) {
        __syncwarp();
        codes[warp][lane] = lane + turn;
        %s
        sum += codes[warp][lane / 2] + codes[warp][lane / 2 + 16];
      }
      out[threadIdx.x] = sum;
    }"""
    found = np.empty(128, np.int32)
    text = nvrtc.compile_source(source % "__syncwarp();", "sm_80").text
    Emulator(text).launch("turns", 1, 128, out(found))
    lane = np.arange(128) % 32
    np.testing.assert_array_equal(found, 3 * (2 * (lane // 2) + 16) + 6)
    racing = Emulator(nvrtc.compile_source(source % "", "sm_80").text)
    with pytest.raises(KernelFault, match="race"):
        racing.launch("turns", 1, 128, out(found))

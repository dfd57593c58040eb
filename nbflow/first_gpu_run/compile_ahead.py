"""Compile what a run launches into a bundle, on a machine without a GPU.

Beside the cases of the ops these are the kernels of whole models, which fuse several ops: a model
of one layer runs on a device that only compiles.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbflow
from nbflow.benchmark.timing import Test, time_test
from nbflow.first_gpu_run.models import BATCHES
from nbflow.first_gpu_run.random_model import SHAPES, write
from nbflow_kernels import cuda
from nbflow_kernels.benchmarks import device_bandwidth, gpu
from nbflow_kernels.cuda import all_reduce, bundle, probes
from nbflow_kernels.cuda.kernel import Kernel
from nbflow_kernels.errors import UsageError
from nbflow_kernels.matmul.cuda import same_bits
from nbflow_kernels.norm import cuda_tensor_parallel
from nbflow_kernels.testing import cuda_compile_all as ahead

MODELS = (
    *(f"{shape}/{format}" for shape in ("1.1b", "7b") for format in ("q4_0", "q4_k")),
    "3.4b-moe/q4_0",
)
_TESTS = (*(Test(0, 2, batch) for batch in BATCHES), *(Test(n, 0) for n in (64, 512)))


def write_bundle(
    path: Path, arch: str, n_jobs: int, ops: tuple[str, ...] = (), models: tuple[str, ...] = MODELS
) -> tuple[str, list[str]]:
    """Compile the ops' cases, the probes and the models; return a line, and what went wrong.

    Raises
    ------
    UsageError
        If the bundle's folder does not exist.
    """
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} does not exist, for the bundle {path}")
    os.environ.pop(bundle.VARIABLE, None)
    started = time.perf_counter()
    used: ahead.Used = {}
    wrong = ahead.compile_tasks(compile_one, ("probes", *models), arch, n_jobs, used)
    wrong += ahead.compile_all(ahead.choose(ops, timed=False), arch, n_jobs, used)
    line = ahead.write_bundle(path, arch, used)
    failed = [message for message in wrong if not message.startswith(ahead.LEFT_OUT)]
    return f"{line}, in {time.perf_counter() - started:.0f} s", failed


def compile_one(name: str) -> str:
    """Compile the probes or a model's kernels in a process that `cuda_compile_all` started."""
    try:
        if name == "probes":
            _compile_probes()
        else:
            _compile_model(*name.split("/"))
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def unlaunched() -> Iterator[Kernel]:
    """Yield the kernels that neither a case of an op nor a step of these models launches."""
    yield from (gpu.copy_kernel, device_bandwidth.read_kernel)
    yield from (cuda_tensor_parallel.sum_squares_kernel, cuda_tensor_parallel.rms_kernel)
    yield all_reduce.ordered_sum_kernel
    for algorithm in ("one_shot", "two_shot"):
        yield from (all_reduce.kernel_of(algorithm, dtype) for dtype in all_reduce.DTYPES)


def _compile_probes() -> None:
    """Compile the probes and the kernels of `unlaunched`."""
    import nbflow_ptx.cupy_stand_in as arrays

    device = cuda.device_of(arrays.zeros(1))
    probes.arithmetic(device)
    probes.uses_shared_memory(device, 1024)
    if probes.has_clusters(device):
        probes.reads_a_peer(device)
    if device.arch == "sm_90":
        for dtype in ("float16", "uint16"):
            same_bits(device, dtype)
    for kernel in unlaunched():
        kernel.prepare(device)


def _compile_model(shape: str, format: str) -> None:
    """Run steps of a model with one layer, whose kernels are those of all layers.

    Prompts run by both kinds of tensor-core instructions, as the device will choose one.
    """
    with tempfile.TemporaryDirectory(prefix="nbflow-") as folder:
        path = Path(folder, "model.gguf")
        write(path, SHAPES[shape], format, n_layers=1)
        for switch in ("1", "0"):
            os.environ["NBFLOW_WGMMA"] = switch
            with nbflow.load(path, device="emulator", kv="f16") as model:
                for test in _TESTS:
                    time_test(model, test)

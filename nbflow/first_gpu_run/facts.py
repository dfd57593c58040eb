"""Sections ``facts`` and ``arithmetic``: what the machine is and how its device computes."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from nbflow.first_gpu_run.sections import Context
from nbflow_kernels import cuda
from nbflow_kernels.cuda import bundle, nvrtc, probes
from nbflow_kernels.cuda.detect import find_nvvm
from nbflow_kernels.matmul.cuda import same_bits

PACKAGES = (
    "numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "cuda-pathfinder", "cupy-cuda12x",
    "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-nvvm", "torch", "triton",
    "tokenizers", "safetensors", "pytest", "pytest-xdist",
)  # fmt: skip
PROGRAMS = ("nvidia-smi", "nvcc", "compute-sanitizer", "ncu", "cuobjdump")
SMI_FIELDS = (
    "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit,"
    "temperature.gpu,mig.mode.current"
)


def device_facts(context: Context) -> None:
    """Write what the machine has; each fact that cannot be found is an error in its row."""
    context.emit({"fact": "machine", **_machine()})
    context.emit({"fact": "packages", **_versions()})
    context.emit({"fact": "programs", **{name: find_program(name) for name in PROGRAMS}})
    context.emit({"fact": "nvidia-smi", **_smi()})
    found = cuda.detect()
    context.emit(
        {
            "fact": "detect", "driver": found.driver_version, "devices": found.n_devices,
            "reason": found.reason, "limitation": found.limitation,
        }
    )  # fmt: skip
    context.emit({"fact": "compilers", "libnvvm": find_nvvm(), **_nvrtc()})
    context.emit({"fact": "bundle", **_bundle()})
    context.emit({"fact": "device", **_device(context)})


def find_program(name: str) -> str:
    """Return the path of a program of the CUDA toolkit; empty if it is not installed."""
    home = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which(name) or shutil.which(name, path=home) or ""


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _smi() -> dict[str, Any]:
    program = find_program("nvidia-smi")
    if not program:
        return {"error": "nvidia-smi is not installed"}
    command = [program, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    rows = [line.split(", ") for line in asked.stdout.splitlines()]
    return {"gpus": [dict(zip(SMI_FIELDS.split(","), row, strict=False)) for row in rows]}


def _nvrtc() -> dict[str, Any]:
    found: dict[str, Any] = {"headers": nvrtc.header_folders()}
    try:
        found["nvrtc"] = nvrtc.version()
    except Exception as error:
        found["error"] = str(error)
    return found


def _bundle() -> dict[str, Any]:
    try:
        opened = bundle.current()
    except Exception as error:
        return {"error": str(error)}
    if opened is None:
        return {"path": ""}
    return {
        "path": str(opened.path), "kernels": len(opened), "target": opened.target,
        "compilers": opened.compilers,
    }  # fmt: skip


def _device(context: Context) -> dict[str, Any]:
    cupy = context.cupy()
    device = cuda.device_of(cupy.zeros(1))
    found = {
        "arch": device.arch, "n_sms": device.n_sms, "max_shared_bytes": device.max_shared_bytes,
        "cupy": cupy.__version__,
    }  # fmt: skip
    if not context.emulator:
        found["free_bytes"], found["total_bytes"] = cupy.cuda.Device().mem_info
        found["l2_bytes"] = cupy.cuda.Device().attributes.get("L2CacheSize")
        found["torch_sees_it"] = _torch_sees_it()
    return found


def _torch_sees_it() -> Any:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    try:
        torch = importlib.import_module("torch")
        return bool(torch.cuda.is_available())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def arithmetic(context: Context) -> None:
    """Write how tensor cores add, and whether handles of streams are used again."""
    cupy = context.cupy()
    device = cuda.device_of(cupy.zeros(1))
    context.emit({"probe": "alignment", "arch": device.arch, **probes.arithmetic(device)})
    if device.arch == "sm_90":
        for dtype in ("float16", "uint16"):
            context.emit({"probe": "wgmma has the bits of mma", dtype: same_bits(device, dtype)})
    else:
        context.emit({"probe": "wgmma has the bits of mma", "skipped": f"{device.arch} has none"})
    handles = []
    for _ in range(3):
        stream = cupy.cuda.Stream(non_blocking=True)
        handles.append(int(stream.ptr))
        del stream
        gc.collect()
    context.emit({"probe": "stream handles", "reused": len(set(handles)) < len(handles)})

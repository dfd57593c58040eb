"""GPUs, driver, clocks and CUDA packages of a machine, for provenance."""

from __future__ import annotations

import subprocess
from typing import Any

from nbflow_kernels.cuda import detect
from nbflow_kernels.cuda.detect import installed_version

_FIELDS = (
    *("index", "name", "pci.bus_id", "driver_version", "memory.total", "power.limit"),
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
)


def describe_gpus() -> list[dict[str, str]] | None:
    """Return what ``nvidia-smi`` says about each GPU; None without a driver or a GPU."""
    query = f"--query-gpu={','.join(_FIELDS)}"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    rows = [[word.strip() for word in line.split(",")] for line in lines]
    whole = [dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)]
    return whole or None


def describe_cuda() -> dict[str, str] | None:
    """Return the newest CUDA version that the driver runs, and CuPy's; None without a GPU."""
    found = detect()
    if found.driver_version is None or not found.n_devices:
        return None
    cupy = next(filter(None, map(installed_version, ("cupy-cuda12x", "cupy-cuda13x", "cupy"))), "")
    facts = {"driver_cuda": "{}.{}".format(*found.driver_version), "cupy": cupy}
    if cupy:
        try:
            import cupy as module

            facts["runtime"] = str(module.cuda.runtime.runtimeGetVersion())
        except (ImportError, RuntimeError, OSError) as error:
            facts["error"] = str(error)
    return facts


def describe_emulator() -> dict[str, Any]:
    """Return target and compiler of the emulated device."""
    from nbflow_kernels.cuda import nvrtc
    from nbflow_ptx.cupy_stand_in import ndarray

    try:
        compiler = nvrtc.version()
    except ImportError:  # its points fail and say why
        compiler = None
    return {
        "note": "CUDA kernels ran in nbflow_ptx on the CPU; no GPU was used",
        "arch": ndarray.__kernel_device__.arch,
        "nvrtc": compiler,
    }

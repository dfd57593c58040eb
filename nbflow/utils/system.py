"""Facts about the machine, the installed packages and the memory of the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "nbflow",
    "numpy",
    "numba",
    "llvmlite",
    "tokenizers",
    "jinja2",
    "sentencepiece",
    "mpi4py",
    "mpich",
    "h5py",
    "pandas",
    "matplotlib",
    "rich",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba-cuda",
    "cuda-bindings",
    "nvidia-ml-py",
)
"""Packages that results can depend on."""
_VARIABLES = re.compile(r"(NUMBA|OMP|OPENBLAS|MKL|CUDA|SLURM|GOMP)_\w+")


def package_versions() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def memory_bytes() -> int | None:
    """Return the size of the main memory, None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def available_memory_bytes() -> int:
    """Return the memory that the process can still allocate without swapping.

    On Linux ``MemAvailable``, bounded by the limit of the control group; elsewhere half of the
    main memory.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text())
        found.append(most - int((group / "memory.current").read_text()))
    return max(0, min(found)) if found else (memory_bytes() or 2**32) // 2


def relevant_variables() -> dict[str, str]:
    """Return the environment variables that configure Numba, threads, devices and launchers."""
    return {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(k)}


def peak_rss_bytes() -> int:
    """Return the peak resident memory since `reset_peak_rss`, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    scale = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def reset_peak_rss() -> None:
    """Reset the peak (Linux only; elsewhere the peak covers the whole process).

    Freed memory that the C library keeps is first returned to the system.
    """
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

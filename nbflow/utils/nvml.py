"""Memory that NVIDIA's management library counts for this process (optional: nvidia-ml-py)."""

from __future__ import annotations

import contextlib
import os


def process_bytes(pci_bus_id: str) -> int | None:
    """Return the bytes of this process on a device, its CUDA context and code included.

    None without the package ``nvidia-ml-py``, or where the driver does not list the process (some
    containers hide it).
    """
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            device = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
        finally:
            pynvml.nvmlShutdown()
    return None

"""Memory of a rank's device: the driver's numbers around loading and running a model.

The driver counts a whole device: all ranks on it, and other programs.  The difference to the
reading before the model was loaded is the model's, as long as other programs keep what they have.
"""

from __future__ import annotations

import gc
import os
import platform
from typing import Any

from nbflow.distributed.comm import Comm
from nbflow.distributed.device import Device
from nbflow.utils.nvml import process_bytes
from nbflow.utils.system import processor_name


class DeviceMemory:
    """Readings of the memory of a rank's device; without any for a rank on the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before = self._loaded = self._peak = 0
        self._communicator_bytes = 0

    def begin(self, comm: Comm) -> None:
        """Take the reading before loading; collective over the model's ranks.

        No rank may allocate until all have returned: a collective call must follow.
        """
        self._trim()
        self._used()  # creates the process's CUDA context, which is not the model's
        comm.bcast_object(comm.gather_object(None))
        self._before = self._loaded = self._peak = self._used()

    def note_communicators(self, n_comms: int) -> None:
        """Attribute what was allocated since `begin` to `n_comms` communicators."""
        if n_comms:
            self._communicator_bytes = max(0, self.sample() - self._before)

    def note_loaded(self) -> None:
        """Take the reading after loading."""
        self._loaded = self.sample()

    def restart(self) -> None:
        """Return freed memory to the device and restart the peak."""
        self._trim()
        self._peak = self._used()

    def sample(self) -> int:
        """Read the bytes in use, and keep the largest."""
        used = self._used()
        self._peak = max(self._peak, used)
        return used

    def readings(self) -> dict[str, int]:
        """Return the readings in bytes; empty on the host.

        ``vram_before_bytes`` is what the device held before loading; the other ``vram_`` values are
        in addition to it.
        """
        device = self._device
        if device.on_host:
            return {}
        found = {
            "vram_before_bytes": self._before,
            "vram_load_bytes": self._loaded - self._before,
            "vram_bytes": self.sample() - self._before,
            "vram_peak_bytes": self._peak - self._before,
            "communicator_bytes": self._communicator_bytes,
        }
        if device.name == "cuda":
            found["pool_bytes"] = int(device.xp.get_default_memory_pool().total_bytes())
        if device.identity is not None:
            of_process = process_bytes(device.identity)
            found |= {} if of_process is None else {"nvml_bytes": of_process}
        return found

    def describe(self) -> dict[str, str]:
        """Return name and hardware of the device, and keys of the device and of the process.

        Ranks with equal keys share a device, or a process.
        """
        device, process = self._device, f"{platform.node()} {os.getpid()}"
        if device.on_host:
            return {"device": "cpu", "hardware": processor_name(), "key": "", "process": process}
        if device.name == "emulator":
            arch = str(device.xp.ndarray.__kernel_device__.arch)
            hardware = f"nbflow_ptx emulator of {arch} on the CPU, no GPU"
            return {
                "device": "emulator", "hardware": hardware, "key": f"{process} emulator",
                "process": process,
            }  # fmt: skip
        return {
            "device": f"cuda:{device.ordinal}",
            "hardware": _cuda_name(device),
            "key": f"{platform.node()} {device.identity}",
            "process": process,
        }

    def _used(self) -> int:
        return 0 if self._device.on_host else self._device.used_bytes

    def _trim(self) -> None:
        """Free the arrays of closed models and what CuPy's pools keep."""
        if self._device.on_host:
            return
        gc.collect()
        if self._device.name == "cuda":
            self._device.xp.get_default_memory_pool().free_all_blocks()


def _cuda_name(device: Device) -> str:
    name: Any = device.xp.cuda.runtime.getDeviceProperties(device.ordinal)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)

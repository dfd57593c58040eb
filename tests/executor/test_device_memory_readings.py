"""Readings of a device's memory around loading and running, with a driver that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbflow.distributed.comm import SelfComm
from nbflow.distributed.device import HOST, Device, find_device
from nbflow.executor import device_memory
from nbflow.executor.device_memory import DeviceMemory
from nbflow_kernels.errors import MissingExtraError


class PlayedDevice(Device):
    """CUDA device 1 whose driver counts `used` bytes, of which the pool keeps some."""

    def __init__(self) -> None:
        self.used, self.kept = 1000, 0
        pool = SimpleNamespace(free_all_blocks=self._free, total_bytes=lambda: 77)
        runtime = SimpleNamespace(getDeviceProperties=lambda ordinal: {"name": b"Played GPU"})
        cuda = SimpleNamespace(runtime=runtime)
        xp = SimpleNamespace(get_default_memory_pool=lambda: pool, cuda=cuda)
        super().__init__("cuda", xp, ordinal=1)

    def _free(self) -> None:
        self.used, self.kept = self.used - self.kept, 0

    @property
    def identity(self) -> str | None:
        return "0000:02:00.0"

    @property
    def used_bytes(self) -> int:
        return self.used


def test_differences_to_the_reading_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "process_bytes", {"0000:02:00.0": 5000}.get)
    device = PlayedDevice()
    device.used, device.kept = 1500, 500  # blocks of an earlier model are not this one's
    memory = DeviceMemory(device)
    memory.begin(SelfComm())
    device.used += 30
    memory.note_communicators(1)
    device.used += 200
    memory.note_loaded()
    device.used += 50
    memory.sample()
    device.used -= 20
    assert memory.readings() == {
        "vram_before_bytes": 1000, "vram_load_bytes": 230, "vram_bytes": 260,
        "vram_peak_bytes": 280, "communicator_bytes": 30, "pool_bytes": 77, "nvml_bytes": 5000,
    }  # fmt: skip
    device.kept = 10
    memory.restart()
    assert (memory.readings()["vram_bytes"], memory.readings()["vram_peak_bytes"]) == (250, 250)
    found = memory.describe()
    assert (found["device"], found["hardware"]) == ("cuda:1", "Played GPU")
    assert found["key"].endswith(" 0000:02:00.0")


def test_without_communicators_and_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "process_bytes", lambda pci: None)
    device = PlayedDevice()
    memory = DeviceMemory(device)
    memory.begin(SelfComm())
    device.used += 30
    memory.note_communicators(0)
    found = memory.readings()
    assert found["communicator_bytes"] == 0
    assert "nvml_bytes" not in found


def test_the_host_has_no_readings() -> None:
    memory = DeviceMemory(HOST)
    memory.begin(SelfComm())
    memory.note_loaded()
    memory.restart()
    assert memory.readings() == {}
    assert memory.describe()["key"] == ""


def test_an_emulator_without_compilers_says_what_to_install(monkeypatch: Any) -> None:
    from nbflow_ptx import nvrtc

    monkeypatch.setattr(nvrtc, "available", lambda: False)
    with pytest.raises(MissingExtraError, match=r"device 'emulator' compiles .*\[cuda-test\]"):
        find_device("emulator")

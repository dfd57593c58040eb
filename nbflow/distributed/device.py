"""Devices of ranks: the host, a CUDA device, or the emulator."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow.options import OffloadConfig
from nbflow_kernels import QuantTensor
from nbflow_kernels.cpu import huge_pages
from nbflow_kernels.cuda import device_of
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command, unknown_name

DEVICES = ("auto", "cpu", "cuda", "emulator")
"""Names of devices.

``auto`` is the CPU: CUDA must be chosen.  ``emulator`` executes every CUDA kernel's PTX
on the CPU, with all checks of `nbflow_ptx` (bounds, races, uninitialised memory): millions of times
slower than a device, for debugging with tiny models.
"""


class Device:
    """Allocator of arrays in one memory; its errors name the purpose of the arrays.

    Parameters
    ----------
    name : {"cpu", "cuda", "emulator"}
        Kind of device.
    xp : module
        NumPy, CuPy, or the emulator's stand-in.
    purpose : str
        Purpose of the arrays, for error messages.
    ordinal : int
        Number of the CUDA device.
    is_mapped : bool
        Allocate in pinned host memory; see `mapped`.
    graphs : bool
        Run steps as CUDA graphs where possible.
    """

    def __init__(
        self,
        name: str,
        xp: Any,
        purpose: str = "",
        ordinal: int = 0,
        is_mapped: bool = False,
        graphs: bool = True,
    ) -> None:
        self.name = name
        self.xp = xp
        self.ordinal = ordinal
        self.is_mapped = is_mapped
        self.graphs = graphs
        self._purpose = purpose

    @property
    def on_host(self) -> bool:
        """True if arrays are NumPy arrays."""
        return self.xp is np

    def for_purpose(self, purpose: str) -> Device:
        """Return the same device for another purpose."""
        return self._replaced(_purpose=purpose)

    def mapped(self) -> Device:
        """Return the allocator of pinned host memory that the device's kernels can read."""
        return self._replaced(is_mapped=not self.on_host)

    def _replaced(self, **changes: Any) -> Device:
        result = copy.copy(self)
        vars(result).update(changes)
        return result

    def activate(self) -> None:
        """Make the device the current one of this thread."""
        if self.name == "cuda":
            self.xp.cuda.Device(self.ordinal).use()

    @property
    def identity(self) -> str | None:
        """PCI bus id of the CUDA device; None for other devices."""
        if self.name != "cuda":
            return None
        return str(self.xp.cuda.runtime.deviceGetPCIBusId(self.ordinal))

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return a new array of zeros."""
        try:
            if self.on_host:
                return huge_pages.zeros_array(shape, dtype)
            return self._mapped(shape, dtype) if self.is_mapped else self.xp.zeros(shape, dtype)
        except MemoryError as error:
            raise self.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, error) from error

    def put(self, array: np.ndarray) -> Any:
        """Return a NumPy array as an array on this device."""
        if self.on_host:
            return array
        try:
            if self.is_mapped:
                return self._mapped(array.shape, array.dtype, array)
            return self.xp.asarray(np.ascontiguousarray(array))
        except MemoryError as error:
            raise self.full(array.nbytes, error) from error

    def quantized(self, tensor: QuantTensor) -> QuantTensor:
        """Return a quantized tensor on this device."""
        if self.on_host:
            return tensor
        if self.is_mapped and not tensor.extra_nbytes:
            return QuantTensor(tensor.format, tensor.shape, self.put(tensor.data))
        try:
            return tensor.to_device(self.xp.zeros((1,), np.uint8))
        except MemoryError as error:
            raise self.full(tensor.nbytes, error) from error

    def drop_storage(self, tensor: QuantTensor) -> None:
        """Keep only the layout of a quantized tensor that matrix products read."""
        try:
            tensor.drop_storage()
        except MemoryError as error:
            raise self.full(tensor.nbytes, error) from error

    @property
    def used_bytes(self) -> int:
        """Bytes in use on the device, by all processes; 0 on the host."""
        if self.name == "emulator":
            return int(self.xp.memory_bytes()["device_bytes"])
        if self.name == "cuda":
            left, total = self.xp.cuda.Device(self.ordinal).mem_info
            return int(total - left)
        return 0

    def synchronize(self) -> None:
        """Wait for the current stream of the device."""
        if self.name == "cuda":
            self.xp.cuda.get_current_stream().synchronize()

    def _mapped(self, shape: Any, dtype: Any, values: np.ndarray | None = None) -> Any:
        return device_of(self.xp.zeros((1,), np.uint8)).mapped(shape, dtype, values)

    def full(self, n_bytes: int | None, error: MemoryError) -> UsageError:
        """Return the error of a failed allocation; `n_bytes` is None if unknown."""
        free = ""
        if self.name == "emulator":
            use = self.xp.memory_bytes()
            free = f"; it holds {use['device_bytes']:,} of {use['total_bytes']:,} bytes"
        if self.name == "cuda":
            left, total = self.xp.cuda.runtime.memGetInfo()
            free = f"; {left:,} of the device's {total:,} bytes are free"
        memory = "pinned host memory" if self.is_mapped else "memory"
        asked = "more memory" if n_bytes is None else f"{n_bytes:,} bytes"
        return UsageError(
            f"out of {memory} on {self.name}: {self._purpose} asked for {asked}{free} "
            f"({error}); use fewer bits (weights=, kv=), a shorter max_context, or more ranks"
        )


HOST = Device("cpu", np)


@dataclass(frozen=True)
class RankDevice:
    """Device of a rank by name; only its own rank resolves it (`find`), on its host."""

    name: str
    """A name of `DEVICES`, or ``cuda:N``."""
    turn: int = 0
    """For ``cuda``: number of earlier ranks on the host with that name."""
    taken: frozenset[int] = frozenset()
    """For ``cuda``: devices of the host that other ranks name by number."""
    graphs: bool = True
    """Run steps on a CUDA device as graphs."""

    def find(self) -> Device:
        """Return the device; see `find_device`."""
        return find_device(self.name, self.turn, self.taken, self.graphs)


def name_devices(devices: str, hosts: Sequence[Hashable], graphs: bool = True) -> list[RankDevice]:
    """Return the device of each rank by name, without looking for it.

    Parameters
    ----------
    devices : str
        One name for all ranks, or one for each, separated by commas (``"cpu,cuda"``).  ``cuda:1``
        is device 1 of the rank's host; ranks of a host with ``cuda`` take its other devices in
        turn.
    hosts : sequence of hashable
        Host of each rank.
    graphs : bool
        Run steps on CUDA devices as graphs.

    Raises
    ------
    UsageError
        If a name is unknown, or the number of names is neither one nor that of the ranks.

    Examples
    --------
    >>> [(d.name, d.turn) for d in name_devices("cuda", ["a", "b", "a", "b"])]
    [('cuda', 0), ('cuda', 0), ('cuda', 1), ('cuda', 1)]
    """
    names = check_names(devices, len(hosts))
    numbered = [_number(name) for name in names]
    found = []
    for rank, (host, name) in enumerate(zip(hosts, names, strict=True)):
        here = [r for r, other in enumerate(hosts) if other == host]
        turn = sum(r < rank and names[r] == "cuda" for r in here)
        taken = frozenset(n for r in here if (n := numbered[r]) is not None)
        is_cuda = name == "cuda"
        found.append(
            RankDevice(name, turn if is_cuda else 0, taken if is_cuda else frozenset(), graphs)
        )
    return found


def check_names(devices: str, n_ranks: int) -> list[str]:
    """Return the device name of each rank; raises as `name_devices`."""
    names = [name.strip() for name in devices.split(",")]
    if len(names) not in (1, n_ranks):
        raise UsageError(
            f"device={devices!r} names {len(names)} devices for {n_ranks} ranks; give one for all, "
            "or one for each rank of the partition"
        )
    for name in names:
        _number(name)
    return names * n_ranks if len(names) == 1 else names


def _number(device: str) -> int | None:
    """Return the number of ``cuda:N``, None for another name of `DEVICES`."""
    name, colon, number = device.partition(":")
    is_numbered = name == "cuda" and number.isascii() and number.isdigit()
    if is_numbered if colon else name in DEVICES:
        return int(number) if colon else None
    if name == "gpu":
        raise UsageError(f"unknown device {device!r}; GPUs of NVIDIA are cuda, one of them cuda:1")
    raise unknown_name("device", device, DEVICES)


def choose_ordinal(turn: int, taken: frozenset[int], n_devices: int) -> int:
    """Return the device of a rank that names none by number.

    Ranks take the devices that others do not name in turn; all devices if none is left.

    Examples
    --------
    >>> [choose_ordinal(turn, frozenset({1}), 3) for turn in range(3)]
    [0, 2, 0]
    """
    free = [n for n in range(n_devices) if n not in taken] or list(range(n_devices))
    return free[turn % len(free)]


def find_device(
    device: str, turn: int = 0, taken: frozenset[int] = frozenset(), graphs: bool = True
) -> Device:
    """Return the device of a name on this host.

    Parameters
    ----------
    device : str
        A name of `DEVICES`, or ``cuda:N``.
    turn, taken : int, frozenset of int
        For ``cuda`` without a number: see `RankDevice`.
    graphs : bool
        Run steps on a CUDA device as graphs.

    Raises
    ------
    MissingExtraError
        If CUDA is chosen, and a driver, a device or a package is missing.
    UsageError
        If the name is unknown, or the host has no device of that number.
    """
    number = _number(device)
    if device in ("auto", "cpu"):
        return HOST
    if device == "emulator":
        stand_in = importlib.import_module("nbflow_ptx.cupy_stand_in")
        from nbflow_ptx import nvrtc

        if not nvrtc.available():
            raise MissingExtraError(
                "device 'emulator' compiles CUDA kernels; install the compilers (no driver is "
                f"needed): {install_command('cuda-test')}"
            )
        return Device("emulator", stand_in, graphs=graphs)
    from nbflow_kernels.cuda import detect

    found = detect()
    if not found.usable:
        raise MissingExtraError(f"device {device!r}: {found.reason}")
    ordinal = choose_ordinal(turn, taken, found.n_devices) if number is None else number
    if ordinal >= found.n_devices:
        raise UsageError(f"device {device!r}: this machine has {found.n_devices} CUDA devices")
    return Device("cuda", importlib.import_module("cupy"), ordinal=ordinal, graphs=graphs)


def is_host(device: str) -> bool:
    """Return True if all devices are the host."""
    return all(name.strip() in ("auto", "cpu") for name in device.split(","))


def split_host_layers(
    offload: OffloadConfig, n_layers: int, partition: str, device: str
) -> tuple[str, str]:
    """Return partition and devices with the first `cpu_layers` layers on a CPU rank.

    Raises
    ------
    UsageError
        If the model has fewer layers, or the partition has several ranks.

    Examples
    --------
    >>> from nbflow.options import OffloadConfig
    >>> split_host_layers(OffloadConfig(cpu_layers=2), 8, "0", "cuda")
    ('0:2;1:6', 'cpu,cuda')
    """
    n_host = offload.cpu_layers
    if not n_host or is_host(device):
        return partition, device
    if n_host > n_layers:
        raise UsageError(f"cpu_layers must be at most {n_layers}, the model's layers, got {n_host}")
    if partition != "0" or "," in device:
        raise UsageError(
            f"cpu_layers={n_host} needs one rank on one device; for several ranks, name a CPU "
            f"rank instead, e.g. partition='0:2;1:6', device='cpu,cuda'; got "
            f"partition={partition!r}, device={device!r}"
        )
    if n_host == n_layers:
        return partition, "cpu"
    return f"0:{n_host};1:{n_layers - n_host}", f"cpu,{device}"

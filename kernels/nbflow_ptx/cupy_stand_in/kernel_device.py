"""The emulated device as launchers of kernels see it: what to compile for, how to load and launch.

An array type that has an attribute ``__kernel_device__`` brings its device along; code that
launches kernels through it does not depend on the emulator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nbflow_ptx.cupy_stand_in.state import State
from nbflow_ptx.cupy_stand_in.streams import current_stream, perform
from nbflow_ptx.emulator import Emulator
from nbflow_ptx.errors import LaunchError
from nbflow_ptx.parsing.parser import parse

Dim3 = tuple[int, int, int]
ONE_LAUNCH = threading.Lock()
"""The device runs one launch at a time: launches share the memory of their parameters."""
#: Shared memory of a thread block in KB (CUDA C++ Programming Guide); other devices have 227.
SHARED_KB = {
    "sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_120": 99,
    "sm_121": 99,
}  # fmt: skip


def enqueue(
    emulator: Emulator, name: str, grid: Dim3, block: Dim3, values: list[bytes], shared_bytes: int
) -> None:
    """Launch a kernel on the current stream; `values` are the bytes of its arguments."""

    def run() -> None:
        with ONE_LAUNCH:
            emulator.checks = State.checks
            emulator.arch, emulator.exact_mma = State.arch, State.exact_mma
            State.n_launches += 1
            State.last = emulator.launch(
                name, grid, block, *values, shared_bytes=shared_bytes, device=State.device
            )

    perform(run)


class EmulatedDevice:
    """The device of `cupy_stand_in`, with the target and the checks set by its `reset`.

    Parameters
    ----------
    empty, asarray : callable
        Make arrays in its memory, as CuPy's functions of these names.
    mapped : callable
        Makes arrays in pinned memory of the host.
    """

    def __init__(
        self,
        empty: Callable[..., Any],
        asarray: Callable[..., Any],
        mapped: Callable[..., Any],
    ) -> None:
        self.empty, self.asarray, self.mapped = empty, asarray, mapped

    output = "ptx"

    @property
    def n_sms(self) -> int:
        """Return the number of multiprocessors, on which only launchers look."""
        return State.n_sms

    @property
    def max_shared_bytes(self) -> int:
        """Return the bytes of shared memory of a thread block."""
        return 1024 * SHARED_KB.get(State.arch.rstrip("a"), 227)

    @property
    def arch(self) -> str:
        """Return the compilation target."""
        return State.arch

    @property
    def key(self) -> tuple[str, str]:
        """Return the key of loaded kernels."""
        return "nbflow_ptx", self.arch

    @property
    def constants(self) -> dict[Any, Any]:
        """Arrays that launchers keep in this device's memory."""
        return State.constants

    @property
    def stream(self) -> tuple[int, int]:
        """Stand for the current stream, as long as nothing resets the device."""
        return id(State.device), current_stream().ptr

    @property
    def is_capturing(self) -> bool:
        """Return whether launches on the current stream become a graph."""
        return current_stream().is_capturing()

    def load(self, code: bytes, entry: str) -> Callable[[Dim3, Dim3, bytes, int], None]:
        """Return the launch of the kernel `entry` of a PTX text."""
        emulator = Emulator(parse(code, entry))
        kernel = emulator.program(entry).kernel

        def launch(grid: Dim3, block: Dim3, packed: bytes, shared: int) -> None:
            ends = [kernel.param_offsets[p.name] + p.size for p in kernel.params]
            if len(packed) != max(ends, default=0):
                raise LaunchError(
                    f"{entry}: {len(packed)} bytes of arguments, the parameters take {max(ends)}"
                )
            values = [packed[e - p.size : e] for e, p in zip(ends, kernel.params, strict=True)]

            enqueue(emulator, kernel.name, grid, block, values, shared)

        return launch

    def synchronize(self) -> None:
        """Wait for the current stream, which checks what it was sent."""
        current_stream().synchronize()

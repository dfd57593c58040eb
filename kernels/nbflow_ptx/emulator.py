"""Launching kernels of a PTX text on NumPy arrays."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_ptx.checks import Checks
from nbflow_ptx.errors import LaunchError
from nbflow_ptx.execution import scheduler
from nbflow_ptx.execution.program import Program, bind
from nbflow_ptx.machine.machine import Launch, Machine
from nbflow_ptx.memory.device import Allocation, Device
from nbflow_ptx.memory.profile import Profile
from nbflow_ptx.memory.races import Cells
from nbflow_ptx.memory.variables import place_variables
from nbflow_ptx.parsing.linker import find_entry, link
from nbflow_ptx.parsing.parser import parse
from nbflow_ptx.parsing.syntax import Module, Variable
from nbflow_ptx.threads.launch_layout import Layout, short_name
from nbflow_ptx.threads.vector_clocks import Grid

#: Threads executed together.  More amortise the cost of an instruction, fewer stay in the cache.
LANES_AT_ONCE = 16384
#: Threads of a kernel whose blocks wait for each other, which must all run together.
MAX_COOPERATIVE_LANES = 1 << 20


@dataclass
class Out:
    """An argument that is only written: its memory starts uninitialised."""

    array: np.ndarray


def out(array: np.ndarray) -> Out:
    """Mark an array argument as output: reading an element before writing it is reported.

    Examples
    --------
    >>> import numpy as np, nbflow_ptx
    >>> nbflow_ptx.out(np.empty(3)).array.shape
    (3,)
    """
    return Out(array)


@dataclass
class Result:
    """Statistics and reports of a launch.

    Attributes
    ----------
    printed : str
        What the kernel printed.
    instructions : int
        Instructions executed, each for many threads at once.
    thread_instructions : int
        The same, counted per thread.
    profile : Profile or None
        Memory behaviour per access, if it was asked for.
    """

    printed: str = ""
    instructions: int = 0
    thread_instructions: int = 0
    profile: Profile | None = None


class Emulator:
    """The kernels of one PTX text, ready to be launched.

    Parameters
    ----------
    ptx : str, bytes or Module
        The text, or what `parse` made of it.
    device : Device, optional
        The memory of its variables and of pointers.  Default: a fresh one for every
        launch, so that nothing outlives it (also not the module's own variables).
    checks : Checks
        Which checks run.
    arch : str, optional
        The emulated device (``"sm_80"``), whose tensor cores round sums; default: the PTX text's
        target.
    exact_mma : bool
        Whether tensor cores add exactly and round once, to the nearest.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_ptx import Emulator
    >>> double = Emulator('''
    ... .version 8.0
    ... .target sm_80
    ... .address_size 64
    ... .visible .entry double(.param .u64 x)
    ... {
    ...     .reg .f32 %f<2>; .reg .b32 %r<2>; .reg .b64 %rd<3>;
    ...     ld.param.u64 %rd1, [x];
    ...     mov.u32 %r1, %tid.x;
    ...     mul.wide.u32 %rd2, %r1, 4;
    ...     add.s64 %rd1, %rd1, %rd2;
    ...     ld.global.f32 %f1, [%rd1];
    ...     add.f32 %f1, %f1, %f1;
    ...     st.global.f32 [%rd1], %f1;
    ...     ret;
    ... }''')
    >>> x = np.arange(4, dtype=np.float32)
    >>> result = double.launch("double", 1, 4, x)
    >>> x.tolist()
    [0.0, 2.0, 4.0, 6.0]
    """

    def __init__(
        self,
        ptx: str | bytes | Module,
        *,
        device: Device | None = None,
        checks: Checks | None = None,
        arch: str | None = None,
        exact_mma: bool = False,
    ) -> None:
        self.module = ptx if isinstance(ptx, Module) else parse(ptx)
        self.device, self.checks = device, checks or Checks()
        self.arch, self.exact_mma = arch or self.module.target, exact_mma
        self.programs: dict[str, Program] = {}

    def program(self, name: str) -> Program:
        """Return the bound kernel; the first call links and binds it."""
        full_name = find_entry(self.module, name).name
        if full_name not in self.programs:
            with _collector_paused():
                self.programs[full_name] = bind(link(self.module, full_name))
        return self.programs[full_name]

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared_bytes: int = 0,
        names: Sequence[str] | None = None,
        profile: bool = False,
        device: Device | None = None,
    ) -> Result:
        """Run a kernel to its end.

        Parameters
        ----------
        name : str
            The entry point, or a part of its (mangled) name that only it has.
        grid, block : int or sequence of int
            Blocks and threads per block, (x, y, z).
        *args
            One per kernel parameter.  A NumPy array goes to emulated memory and comes back, `out`
            marks one that is only written, an `Allocation` or an int is a pointer; numbers
            take the parameter's type; ``bytes`` fill a parameter that is a struct.
        shared_bytes : int
            Dynamic shared memory.
        names : sequence of str, optional
            Names of the arguments for reports; default: their numbers.
        profile : bool
            Count bank conflicts and sectors per access.
        device : Device, optional
            The memory to run on, instead of the emulator's.

        Returns
        -------
        Result

        Raises
        ------
        KernelFault
            If a check fails; arrays are then left as they were.
        LaunchError
            If arguments, grid or block do not fit the kernel.
        UnsupportedInstruction
            If the kernel holds an instruction the emulator does not execute.
        """
        program = self.program(name)
        kernel = program.kernel
        if len(args) != len(kernel.params):
            raise LaunchError(
                f"{short_name(kernel.name)} takes {len(kernel.params)} arguments, got {len(args)}"
            )
        device = device or self.device or Device(needed(args, self.module))
        layout = Layout(self.module, kernel, grid, block, shared_bytes)
        layout.addresses.update(place_variables(self.module, device))
        moved: list[tuple[Allocation, np.ndarray]] = []
        for k, (a, p) in enumerate(zip(args, kernel.params, strict=True)):
            label = names[k] if names is not None else f"argument {k}"
            data = _argument(a, p, device, label, moved)
            at = kernel.param_offsets[p.name]
            layout.params[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self._parameters_in_memory(program, layout, device)
        try:
            result = self._run(program, layout, device, Profile() if profile else None)
            for a, array in moved:
                _copy_back(device, a, array)
        finally:
            for a, _ in moved:
                device.free(a)
        return result

    def _parameters_in_memory(self, program: Program, layout: Layout, device: Device) -> None:
        """Put the parameters where a kernel that takes their address finds them."""
        place = device.parameters(layout.params)
        for name, at in program.kernel.param_offsets.items():
            layout.addresses[name] = place.address + at

    def _run(
        self, program: Program, layout: Layout, device: Device, profile: Profile | None
    ) -> Result:
        n, size = layout.n_blocks, layout.threads_per_block
        together = layout.blocks_per_cluster
        at_once = max(LANES_AT_ONCE // (size * together), 1) * together
        if program.grid_barrier:
            if n * size > MAX_COOPERATIVE_LANES:
                raise LaunchError(
                    f"{n * size} threads whose blocks wait for each other; "
                    f"at most {MAX_COOPERATIVE_LANES} run together"
                )
            at_once = n
        device.grid_workspace()
        granule, warps = program.granules["global"], layout.warps_per_cluster
        cells = _history(device, granule, warps) if self.checks.races else None
        launch = Launch(
            layout, device, self.checks, Grid(n), cells, profile, program.granules["shared"],
            program.registers.rows, self.arch, self.exact_mma,
        )  # fmt: skip
        result = Result(profile=profile)
        for first in range(0, n, at_once):
            m = Machine(launch, np.arange(first, min(first + at_once, n)))
            scheduler.run(m, program.blocks)
            result.instructions += m.executed
            result.thread_instructions += m.lane_instructions
        result.printed = "".join(launch.printed)
        if cells is not None:
            device.histories[granule, warps > 32] = cells
        return result


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from scanning a program's functions while they are made.

    There are several per instruction, and all of them stay: scanning them again and again was
    two thirds of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _history(device: Device, granule: int, warps: int) -> Cells:
    """Return the empty access history of a device's memory.

    Those of earlier launches are reused: fresh memory is a tenth of the time of a small model.
    """
    starts = [a.start for a in device.allocations]
    cells: Cells | None = device.histories.pop((granule, warps > 32), None)
    if cells is None or cells.nbytes < device.top:
        return Cells(2 * device.top, granule, across=True, starts=starts, warps=warps)
    cells.renew(starts)
    return cells


def needed(args: Sequence[Any], module: Module) -> int:
    """Return how much emulated memory a launch on fresh memory takes."""
    arrays = [a.array if isinstance(a, Out) else a for a in args]
    sizes = [a.nbytes for a in arrays if isinstance(a, np.ndarray)]
    sizes += [v.size for v in module.variables.values()]
    return sum(sizes) + 2048 * (len(sizes) + 8) + (1 << 16)


def _argument(a: Any, p: Variable, device: Device, label: str, moved: list[Any]) -> bytes:
    """Return the bytes of one parameter; arrays are moved to the device."""
    if isinstance(a, (np.ndarray, Out)) and (isinstance(a, Out) or a.ndim or p.size != a.itemsize):
        array = a.array if isinstance(a, Out) else a
        if p.size != 8:
            raise LaunchError(
                f"{label} is an array, but the parameter has {p.size} bytes (a pointer has 8)"
            )
        place = _shared_place(array, label, moved)
        if place is None:
            place = device.copy_in(array, label, written=not isinstance(a, Out))
            moved.append((place, array))
        return place.address.to_bytes(8, "little")
    if isinstance(a, Allocation):
        return a.address.to_bytes(8, "little")
    if isinstance(a, (bytes, bytearray)):
        if len(a) != p.size:
            raise LaunchError(f"{label} has {len(a)} bytes, the parameter {p.size}")
        return bytes(a)
    return scalar_bytes(a, p, label)


def _shared_place(array: np.ndarray, label: str, moved: list[Any]) -> Allocation | None:
    """Return where an array already is, if an earlier argument is the same memory."""
    for place, other in moved:
        same = array.ctypes.data == other.ctypes.data and array.nbytes == other.nbytes
        if same and array.strides == other.strides:
            found: Allocation = place
            return found
        if np.may_share_memory(array, other) and np.shares_memory(array, other):
            raise LaunchError(
                f"{label} overlaps {place.name} in part; pass slices of one device array instead"
            )
    return None


def scalar_bytes(a: Any, p: Variable, label: str) -> bytes:
    """Return a number in the representation of a parameter."""
    if isinstance(a, (np.generic, np.ndarray)) and not isinstance(a, np.bool_):
        if a.itemsize == p.size and not (p.type.kind == "f" and a.dtype.kind != "f"):
            return a.tobytes()
        a = a.item()
    if not isinstance(a, (bool, int, float, np.bool_)):
        raise LaunchError(f"{label} must be an array, a number or bytes, got {type(a).__name__}")
    if p.type.kind == "f":
        return bytes(p.type.dtype(a).tobytes())
    if isinstance(a, float):
        raise LaunchError(
            f"{label} is a float, the parameter an integer of {p.size} bytes; "
            "pass a NumPy scalar of its type"
        )
    value = int(a)
    if not -(1 << (8 * p.size - 1)) <= value < 1 << 8 * p.size:
        raise LaunchError(f"{label} = {value} does not fit a parameter of {p.size} bytes")
    return (value & ((1 << 8 * p.size) - 1)).to_bytes(p.size, "little")


def _copy_back(device: Device, a: Allocation, array: np.ndarray) -> None:
    if array.flags.writeable and array.nbytes:
        array[...] = device.bytes_of(a).view(array.dtype).reshape(array.shape)

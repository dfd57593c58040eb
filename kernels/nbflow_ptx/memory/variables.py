"""Memory of a module's global and constant variables."""

from __future__ import annotations

import numpy as np

from nbflow_ptx.errors import UnsupportedInstruction
from nbflow_ptx.memory.device import Device
from nbflow_ptx.parsing.syntax import Imm, Module, Variable
from nbflow_ptx.parsing.types import STORAGE


def place_variables(module: Module, device: Device) -> dict[str, int]:
    """Give global and constant variables memory on the device, once; return their addresses."""
    variables = [v for v in module.variables.values() if v.space in ("global", "const")]
    new = [v for v in variables if v.name not in device.variables]
    for v in new:
        device.variables[v.name] = device.allocate(max(v.size, 1), v.name, written=True)
    for v in new:
        if v.init:
            data = _initial_bytes(v, device)
            device.bytes_of(device.variables[v.name])[: len(data)] = np.frombuffer(data, np.uint8)
    return {v.name: device.variables[v.name].address for v in variables}


def _initial_bytes(v: Variable, device: Device) -> bytes:
    width = v.type.nbytes
    store = STORAGE[width]
    out = []
    for item in v.init:
        if isinstance(item, Imm):
            value = item.value
        elif item in device.variables:
            value = device.variables[item].address
        else:
            raise UnsupportedInstruction(f"variable {v.name} is initialised with {item}")
        out.append(value & ((1 << 8 * width) - 1))
    return np.array(out, store).tobytes()[: v.size]

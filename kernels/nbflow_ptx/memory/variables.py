"""Memory of a module's global and constant variables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nbflow_ptx.errors import UnsupportedInstruction
from nbflow_ptx.memory.device import Allocation, Device
from nbflow_ptx.parsing.syntax import Imm, Module, Variable
from nbflow_ptx.parsing.types import STORAGE


def place_variables(module: Module, device: Device) -> dict[str, int]:
    """Give a module's variables memory on the device, once; return their addresses."""
    places = device.variables.get(module)
    if places is None:
        variables = [v for v in module.variables.values() if v.space in ("global", "const")]
        places = {v.name: device.allocate(max(v.size, 1), v.name, written=True) for v in variables}
        for v in variables:
            if v.init:
                data = _initial_bytes(v, places)
                device.bytes_of(places[v.name])[: len(data)] = np.frombuffer(data, np.uint8)
        device.variables[module] = places
    return {name: place.address for name, place in places.items()}


def _initial_bytes(v: Variable, places: Mapping[str, Allocation]) -> bytes:
    width = v.type.nbytes
    store = STORAGE[width]
    out = []
    for item in v.init:
        if isinstance(item, Imm):
            value = item.value
        elif item in places:
            value = places[item].address
        else:
            raise UnsupportedInstruction(f"variable {v.name} is initialised with {item}")
        out.append(value & ((1 << 8 * width) - 1))
    return np.array(out, store).tobytes()[: v.size]

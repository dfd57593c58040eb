"""State of the emulated GPU that `cupy_stand_in` uses."""

from __future__ import annotations

import threading
from typing import Any

from nbflow_ptx.checks import Checks
from nbflow_ptx.emulator import Result
from nbflow_ptx.memory.device import Device


class Here(threading.local):
    """State of each host thread."""

    def __init__(self) -> None:
        self.streams: list[Any] = []
        """The streams that are current, the innermost last; none: the null stream."""
        self.capturing: Any = None
        """The stream that is being captured."""
        self.pool: Any = None
        """The `pools.MemoryPool` that arrays are made from, if not the device's."""


class State:
    """Global state; `cupy_stand_in.reset` clears it."""

    device = Device()
    checks = Checks()
    arch = "sm_80"
    exact_mma = False
    n_sms = 4
    last: Result | None = None
    constants: dict[Any, Any] = {}  # noqa: RUF012 - the state is the class
    n_launches = 0
    """Kernels launched, those of graphs included."""
    here = Here()

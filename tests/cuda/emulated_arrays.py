"""Copying a case's arrays to the emulated device."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.testing.checks import placer


def emulated(cupy: Any) -> Any:
    """Return the `place` for the emulator's CuPy: an output's contents count as uninitialised."""
    place = placer(cupy)

    def place_there(array: np.ndarray, is_output: bool) -> Any:
        if not is_output:
            return place(array, False)
        found = cupy.empty(array.shape, array.dtype)
        found._view[...] = array
        return found

    return place_there

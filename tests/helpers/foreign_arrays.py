"""Arrays of another library: host memory behind DLPack and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Foreign:
    """An array that can do no more than the protocol asks for."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign

    @staticmethod
    def from_dlpack(array: Any) -> Foreign:
        return Foreign(np.from_dlpack(array))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument, or to those in a tuple, list or dict."""
    if isinstance(value, dict):
        return {name: mapped(function, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def foreign(value: Any) -> Any:
    """Return arguments with Foreign arrays in place of NumPy's."""
    return mapped(lambda v: Foreign(v) if isinstance(v, np.ndarray) else v, value)


def unwrapped(value: Any) -> Any:
    """Return the NumPy arrays of Foreign ones."""
    return mapped(lambda v: v.array if isinstance(v, Foreign) else v, value)

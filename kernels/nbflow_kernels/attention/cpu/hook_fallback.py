"""Hooks as Python functions, for kernels in interpreter mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HOOKS: dict[int, Callable[..., None]] = {}
"""Number that stands for an address to its function."""


def address_of_hook(function: Callable[..., None]) -> int:
    """Return a number for a function."""
    HOOKS[id(function)] = function
    return id(function)


def call_hook(address: int, *arguments: Any) -> None:
    """Call a function by its number."""
    HOOKS[address](*arguments)

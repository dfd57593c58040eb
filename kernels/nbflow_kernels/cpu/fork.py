"""Fork hooks: reset locks, threads and counters in a forked child.

A child has only the thread that forked.  Locks that other threads held stay locked, and their
queues have no reader.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Forked(Protocol):
    """Object with state to reset in a forked child."""

    def in_child(self) -> None:
        """Reset the state; the child has no other thread."""


_objects: weakref.WeakSet[Any] = weakref.WeakSet()
F = TypeVar("F", bound=Callable[[], None])


def in_child(function: F) -> F:
    """Register a function to run in each forked child, right after the fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


def notify_in_child(target: Forked) -> None:
    """Call the object's `in_child` in each forked child, while the object is alive."""
    _objects.add(target)


@in_child
def _notify_objects() -> None:
    for target in list(_objects):
        target.in_child()


def lock_during_fork(acquire: Callable[[], None], release: Callable[[], None]) -> None:
    """Hold a lock during each fork, so that the child never sees a half-done update."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)

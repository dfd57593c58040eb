"""Steps that a forked child takes before it computes.

Of the threads of a process only the one that forks is in the child.  Locks that others held stay
locked there, and nothing answers what is put into their queues.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Forked(Protocol):
    """An object that must change in a forked child."""

    def in_child(self) -> None:
        """Do so; no thread but the present one exists."""


_objects: weakref.WeakSet[Any] = weakref.WeakSet()
F = TypeVar("F", bound=Callable[[], None])


def in_child(function: F) -> F:
    """Call the function in each forked child, at once."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


def tell_in_child(made: Forked) -> None:
    """Call the object's `in_child` in each forked child, as long as the object lives."""
    _objects.add(made)


@in_child
def _tell_objects() -> None:
    for made in list(_objects):
        made.in_child()


def around_fork(take: Callable[[], None], give_back: Callable[[], None]) -> None:
    """Hold a lock during each fork, so that nothing it protects is half done in the child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=take, after_in_parent=give_back, after_in_child=give_back)

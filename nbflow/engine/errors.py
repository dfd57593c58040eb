"""Errors of an engine that callers tell apart."""

from __future__ import annotations

from nbflow_kernels.errors import UsageError


class QueueFull(UsageError):
    """As many requests wait as may; try again later."""


class EngineClosed(UsageError):
    """The engine takes no requests: it is closed, or about to be, or has failed."""


class Unsendable(UsageError):
    """Something cannot be sent to the other ranks, which have not been told of it."""

"""Errors of an engine that callers tell apart."""

from __future__ import annotations

from nbflow_kernels.errors import UsageError


class QueueFull(UsageError):
    """The waiting queue is full; retry later."""


class EngineClosed(UsageError):
    """The engine is closed, closing or failed and accepts no requests."""


class Unsendable(UsageError):
    """A command cannot be pickled for the other ranks; nothing was sent."""

"""Errors of an engine that callers tell apart."""

from __future__ import annotations

import pickle

from nbflow.sampling.logits_processors import AllBannedError
from nbflow.sampling.structured_output import StructureError
from nbflow_kernels.errors import UsageError

ERROR_BYTES = 1024
"""Bytes of an `encoded` error."""


class QueueFull(UsageError):
    """The waiting queue is full; retry later."""


class EngineClosed(UsageError):
    """The engine is closed, closing or failed and accepts no requests."""


class Unsendable(UsageError):
    """A command cannot be pickled for the other ranks; nothing was sent."""


def sendable(error: BaseException) -> Exception:
    """Return a picklable error: those that a request can cause unchanged, others as text."""
    if isinstance(error, UsageError):
        known = type(error) in (UsageError, AllBannedError, StructureError)
        return error if known else UsageError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def encoded(error: Exception) -> bytes:
    """Return a pickled `sendable` error in at most `ERROR_BYTES`; a long text is cut."""
    found = sendable(error)
    data = pickle.dumps(found)
    if len(data) <= ERROR_BYTES:
        return data
    kind = UsageError if isinstance(found, UsageError) else RuntimeError
    text = str(found).encode(errors="replace")[: ERROR_BYTES - 128]
    return pickle.dumps(kind(text.decode(errors="ignore")))

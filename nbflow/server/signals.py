"""SIGTERM and SIGINT: the first starts an orderly shutdown, the second exits at once.

Python runs signal handlers between bytecodes of the main thread, hence never while a thread in C
code holds the GIL.  This handler is compiled and does not need the interpreter: it counts signals,
wakes the event loop by closing a pipe, and calls ``_exit``.
"""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType
from typing import Any

import numba

from nbflow_kernels.cpu import atomics
from nbflow_kernels.cpu.interpreter import numba_config

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_N_SEEN = ctypes.c_int64(0)
"""Number of signals received."""
_KEPT: list[Any] = []
"""Keeps the compiled handler alive."""


def listen_to_signals() -> int:
    """Install the handler of SIGTERM and SIGINT for the rest of the process; call it once.

    Returns a file descriptor that reaches its end with the first signal.  The second signal exits
    the process with code 128 + its number.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    if numba_config.DISABLE_JIT:
        _listen_in_python(writer)
    else:
        _listen_in_c(writer)
    return reader


def _listen_in_c(writer: int) -> None:
    library = ctypes.CDLL(None)
    close, end = (ctypes.cast(f, ctypes.c_void_p).value for f in (library.close, library._exit))
    n_seen = ctypes.addressof(_N_SEEN)

    def handle(number):  # type: ignore[no-untyped-def]
        if atomics.add(n_seen, 1) == 0:
            atomics.call_int(close, writer)
        else:
            atomics.call_int(end, 128 + number)

    compiled = numba.cfunc("void(int32)")(handle)
    _KEPT.append(compiled)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # asyncio replaces Python's own handler of SIGINT
        library.signal(number, compiled.address)


def _listen_in_python(writer: int) -> None:
    """Python handler for runs with the JIT disabled."""

    def handle(number: int, _: FrameType | None) -> None:
        _N_SEEN.value += 1
        if _N_SEEN.value == 1:
            os.close(writer)
        else:
            os._exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, handle)

"""Compile kernels in forked processes, into the cache on disk.

Numba compiles one kernel at a time in a process.  A forked child has the modules, the weights and
the types of its parent at no cost; it compiles what it is given into the cache
(`nbflow_kernels.compilation.jit_cache`) and ends.  Whichever process comes first to a kernel
compiles it; another one that needs it waits and loads it.  A child ends with the thread that forked
it, or after `LONGEST_S`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence

from numba.core.registry import cpu_target

from nbflow_kernels.compilation.jit_cache import cache_root
from nbflow_kernels.cpu.cpu_quota import available_cores

VARIABLE = "NBFLOW_COMPILE_HELPER"
LONGEST_S = 100
MOST_PROCESSES = 8
_PR_SET_PDEATHSIG = 1

Task = Callable[[], object]


def may_fork() -> bool:
    """Return whether children may compile: on Linux, with two processors and a cache to write."""
    if sys.platform != "linux" or os.environ.get(VARIABLE) == "0" or available_cores() < 2:
        return False
    folder = cache_root()
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def compile_in_processes(tasks: Sequence[Task]) -> list[int]:
    """Start to compile in children and return their process numbers.

    Parameters
    ----------
    tasks : sequence of callable
        Each compiles a kernel, the longest first.  Errors are ignored: the parent finds no entry
        in the cache and compiles the kernel itself.
    """
    n = min(available_cores() - 1, len(tasks), MOST_PROCESSES) if may_fork() else 0
    if n:  # once, instead of in each child
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
    made = [_fork(tasks[i::n]) for i in range(n)]
    return [child for child in made if child]


def _fork(tasks: Sequence[Task]) -> int:
    """Fork a child that runs the tasks and return its number; 0 if the system allows none."""
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            # Python warns of locks that other threads hold; `nbflow_kernels.cpu.fork` has ours
            warnings.simplefilter("ignore")
            child = os.fork()
    except OSError:
        return 0
    if child == 0:
        try:
            _begin(parent)
            for task in tasks:
                with contextlib.suppress(Exception):
                    task()
        finally:
            os._exit(0)
    threading.Thread(target=_reap, args=(child,), daemon=True, name="nbflow-compile").start()
    return child


def _begin(parent: int) -> None:
    """Make the child quiet, and let it end with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group, the parent too
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LONGEST_S)
    gc.disable()  # little of what compilation leaves is garbage, and the process is short-lived
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)


def _reap(child: int) -> None:
    with contextlib.suppress(OSError):
        os.waitpid(child, 0)

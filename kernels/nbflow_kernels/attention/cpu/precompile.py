"""Compile attention in a helper process, while the caller compiles the other kernels.

Attention takes 40 % of the time that an empty kernel cache costs before a model's first token.
The helper compiles it, and the kernel that appends keys and values, into the cache on disk
(`nbflow_kernels.compilation.jit_cache`).  Whichever process comes first to a kernel compiles it;
the other one waits and loads it.  The helper is a new interpreter.  It ends after its two kernels,
with the caller, or after `LONGEST_S`.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cpu.graph import GraphNode, signature_of
from nbflow_kernels.cpu.jit import CachedKernel
from nbflow_kernels.cpu.parallel_for import capture, set_num_threads
from nbflow_kernels.cpu.thread_pool import available_cores
from nbflow_kernels.kv_cache.cpu import append_paged_kv_cache

VARIABLE = "NBFLOW_COMPILE_HELPER"
LONGEST_S = 600.0

_PROGRAM = """import sys
sys.path[:] = {path!r}
from nbflow_kernels.attention.cpu.precompile import compile_attention
compile_attention({kinds!r}, {dims!r})
"""
_PAGE = 16


def start_helper(kinds: tuple[int, int], dims: tuple[int, int]) -> subprocess.Popen[bytes] | None:
    """Start compiling attention if the cache lacks it, and return the process.

    None if the cache has the kernel, there is one processor only, `VARIABLE` is 0, or the system
    allows no processes.

    Parameters
    ----------
    kinds : tuple of int
        Cache formats of keys and values (`nbflow_kernels.kv_cache.cpu_codec.KINDS`).
    dims : tuple of int
        Head sizes of keys and values.
    """
    if os.environ.get(VARIABLE) == "0" or available_cores() < 2:
        return None
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    call = _attention(kinds, dims)
    kernel: Any = call.kernel
    if not isinstance(kernel, CachedKernel) or kernel.is_cached(signature_of(call)):
        return None
    program = _PROGRAM.format(path=sys.path, kinds=kinds, dims=dims)
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        helper = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, **quiet)
    except OSError:  # a sandbox may forbid processes
        return None
    threading.Thread(target=_reap, args=(helper,), daemon=True).start()
    atexit.register(_end, helper)
    return helper


def compile_attention(kinds: tuple[int, int], dims: tuple[int, int]) -> None:
    """Compile attention and what writes its keys and values; the program of the helper."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    timer = threading.Timer(LONGEST_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
    set_num_threads(1)
    for call in (_append(kinds, dims), _attention(kinds, dims)):
        kernel: Any = call.kernel
        kernel.compile(signature_of(call))


def _attention(kinds: tuple[int, int], dims: tuple[int, int]) -> GraphNode:
    """Return the launch of a model's attention kernel, which is not made."""
    plan = AttentionPlan((1, 1, *dims), _PAGE)
    plan.n_shares = 1
    q, out = (np.zeros((1, 1, d), np.float32) for d in dims)
    keys, values = _caches(dims)
    with capture() as seen:
        launch.attend(plan, q, keys, values, out, None, kinds)
    (call,) = seen.calls
    return call


def _append(kinds: tuple[int, int], dims: tuple[int, int]) -> GraphNode:
    """Return the launch that appends keys and values to the cache, which is not made."""
    k, v = (np.zeros((1, 1, d), np.float32) for d in dims)
    keys, values = _caches(dims)
    token, indptr = np.zeros(1, np.int32), np.zeros(2, np.int32)
    with capture() as seen:
        append_paged_kv_cache(k, v, token, token, keys, values, token, indptr, "NHD", kinds)
    (call,) = seen.calls
    return call


def _caches(dims: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    keys, values = (np.zeros((1, _PAGE, 1, d), np.float32) for d in dims)
    return keys, values


def _end_with_caller() -> None:
    """Wait until the caller has ended, which closes the pipe, and exit."""
    while os.read(0, 1):  # without a buffer, whose lock would abort the interpreter's end
        pass
    os._exit(1)


def _reap(helper: subprocess.Popen[bytes]) -> None:
    helper.wait()
    atexit.unregister(_end)


def _end(helper: subprocess.Popen[bytes]) -> None:
    helper.kill()
    helper.wait()

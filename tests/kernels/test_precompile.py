"""Processes that fill one kernel cache: locks, children that compile, an unusable folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numba.core import types

from nbflow_kernels.compilation.file_lock import FileLock
from nbflow_kernels.cpu import graph, jit
from nbflow_kernels.cpu.compile_processes import VARIABLE, compile_in_processes, may_fork
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode

KERNEL = """
import warnings
from numba.core import event
from nbflow_kernels.cpu import jit

@jit.kernel
def total(x, n):
    s = x
    for i in range(n):
        for j in range(i):
            s += (i * x + j) % 7 if i % 3 else j // 5
    return s

@jit.kernel
def wrong(x):
    return x.no_such_attribute

with event.install_recorder("numba:compile") as compiled, warnings.catch_warnings(record=True) as w:
    warnings.simplefilter("always")
    assert total(1, 4) == total(1, 4)
    assert total(1.0, 4) > 0
    try:
        wrong(1)
    except Exception:
        pass
print(sum(e.is_start for _, e in compiled.buffer), *(str(one.message) for one in w))
"""


def _start(code: str, cache: Path, **more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), **more}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )


def _output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return out


def _until(found):
    end = time.monotonic() + 60.0
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def program(tmp_path):
    """Return a program with kernels in a module, which the cache needs."""
    (tmp_path / "some_kernels.py").write_text(KERNEL)
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import some_kernels"


def test_a_kernel_that_two_processes_need_is_compiled_once(tmp_path, program):
    cache = tmp_path / "cache"
    both = [_start(program, cache) for _ in range(2)]
    counts = [int(_output(process)) for process in both]
    assert sum(counts) == 2 + 2  # two signatures once, and in each process the kernel that fails
    assert not list(cache.rglob("*.lock"))
    assert int(_output(_start(program, cache))) == 1


def test_a_cache_that_cannot_be_written_is_warned_of_once(tmp_path, program):
    cache = tmp_path / "file"
    cache.write_text("not a folder")
    count, warning = _output(_start(program, cache)).split(" ", 1)
    assert int(count) == 3
    assert warning.count("cannot be written") == 1
    assert "nbflow warm MODEL --to FOLDER" in warning


def test_a_lock_is_for_one_at_a_time(tmp_path):
    path, waited = tmp_path / "folder" / "entry.lock", []
    first, second = FileLock(path), FileLock(path)
    assert first.acquire() is False
    thread = threading.Thread(target=lambda: waited.append(second.acquire()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    first.release()
    thread.join(60)
    assert waited == [True]
    second.release()
    second.release()
    assert not path.exists()


def test_the_lock_of_a_process_that_ended_is_free(tmp_path):
    path = tmp_path / "entry.lock"
    code = "import os, pathlib; from nbflow_kernels.compilation.file_lock import FileLock\n"
    code += f"FileLock(pathlib.Path({str(path)!r})).acquire(); os._exit(0)"
    _output(_start(code, tmp_path))
    assert path.exists()
    assert FileLock(path).acquire() is False


def test_the_kernels_of_a_graph_are_shared_with_a_child(monkeypatch):
    tasks = []
    monkeypatch.setattr(graph, "compile_in_processes", lambda given: tasks.extend(given))
    monkeypatch.setattr(jit.CachedKernel, "is_cached", lambda kernel, signature: False)
    out = np.zeros(3, np.int32), np.zeros(3, np.int64), np.zeros(3, np.float32)
    CpuGraph([GraphNode(_count, (array,), 3, 1.0) for array in out], 1)
    signatures = [task.args[0][0] for task in tasks]
    assert signatures == [types.float32[::1], types.int64[::1]]  # this process begins with int32


@jit.kernel
def _count(out, start, stop):
    for i in range(start, stop):
        out[i] = i


CHILDREN = """
import os, sys, time
from numba import float32, int64
from numba.core import event
from nbflow_kernels.cpu.compile_processes import compile_in_processes
from nbflow_kernels.cpu.graph import missing_kernel

task = missing_kernel(some_kernels.total, (float32, int64))
print(*compile_in_processes([(lambda: time.sleep(90)) if "wait" in sys.argv else task]), flush=True)
if "wait" in sys.argv:
    sys.stdin.read()
while missing_kernel(some_kernels.total, (float32, int64)):
    time.sleep(0.01)
with event.install_recorder("numba:compile") as compiled:
    some_kernels.total.compile((float32, int64))
print(len(compiled.buffer), missing_kernel(some_kernels.total, (float32, int64)))
"""
two_processors = pytest.mark.skipif(
    not may_fork(), reason="children are for Linux with two processors"
)


@two_processors
def test_the_parent_loads_what_a_child_compiled(tmp_path, program):
    child, found = _output(_start(f"{program}\n{CHILDREN}", tmp_path / "cache")).splitlines()[-2:]
    assert int(child) > 0
    assert found == "0 None"


@two_processors
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_child_ends_with_its_parent(tmp_path, program, how):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{program}\n{CHILDREN}", "wait"], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdout.readline()  # of the module
    child = int(parent.stdout.readline())
    assert _runs(child)
    parent.send_signal(how)
    parent.wait(60)
    _until(lambda: not _runs(child))
    parent.stdin.close()
    parent.stdout.close()


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # an ended process without a parent


def test_no_child_where_the_variable_forbids_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    assert compile_in_processes([lambda: None]) == []

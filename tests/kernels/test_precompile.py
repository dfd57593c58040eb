"""Processes that fill one kernel cache: locks, the helper for attention, an unusable folder."""

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

from nbflow_kernels.compilation.file_lock import FileLock
from nbflow_kernels.compilation.jit_cache import lock_path
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode, compile_meanwhile, signature_of
from nbflow_kernels.cpu.thread_pool import ThreadPool

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


def _until(found, seconds=60.0):
    end = time.monotonic() + seconds
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


@jit.kernel
def _count(out, start, stop):
    for i in range(start, stop):
        out[i] = i


def test_a_graph_that_waits_for_another_process_compiles_something_else():
    out = np.zeros(3, np.int32)
    call = GraphNode(_count, (out,), 3, 1.0)
    entry = _count._cache._entry(signature_of(call), _count.targetctx)
    other, begun = FileLock(lock_path(entry)), []
    other.acquire()
    compile_meanwhile.extend([lambda: begun.append(1), other.release, lambda: begun.append(2)])
    try:
        graph = CpuGraph([call], 1)
        assert begun == [1]  # then the other process was done
        assert len(compile_meanwhile) == 1
    finally:
        compile_meanwhile.clear()
        other.release()
    ThreadPool(1).run_graph(graph)
    assert out.tolist() == [0, 1, 2]


HELPER = """
import sys
from pathlib import Path
from numba.core import event
from nbflow_kernels.attention.cpu import precompile
from nbflow_kernels.attention.cpu.flash_attention import flash_attention
from nbflow_kernels.cpu.graph import signature_of
from nbflow_kernels.compilation.jit_cache import cache_root

helper = precompile.start_helper((1, 1), (32, 32))
print(helper and helper.pid, flush=True)
if helper is None or "wait" in sys.argv:
    sys.stdin.read()
while not list(cache_root().rglob("flash_attention*.lock")):
    assert helper.poll() is None
with event.install_recorder("numba:compile") as compiled:
    flash_attention.compile(signature_of(precompile._attention((1, 1), (32, 32))))
print(len(compiled.buffer), helper.wait(), precompile.start_helper((1, 1), (32, 32)))
"""
two_processors = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="the helper needs a second processor"
)


@two_processors
def test_the_caller_loads_the_attention_that_the_helper_compiles(tmp_path):
    first, second = _output(_start(HELPER, tmp_path)).splitlines()
    assert int(first) > 0
    assert second == "0 0 None"  # nothing compiled here, a clean end, and nothing left to do


@two_processors
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_helper_ends_with_its_caller(tmp_path, how):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    caller = subprocess.Popen(
        [sys.executable, "-c", HELPER, "wait"], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert caller.stdin is not None
    assert caller.stdout is not None
    helper = int(caller.stdout.readline())
    _until(lambda: list(tmp_path.rglob("*.lock")))
    caller.send_signal(how)
    caller.wait(60)
    _until(lambda: not _runs(helper))
    caller.stdin.close()
    caller.stdout.close()


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # an ended process without a parent


@pytest.mark.parametrize("value", ["0"])
def test_no_helper_where_the_variable_forbids_it(tmp_path, value):
    process = _start(HELPER, tmp_path, NBFLOW_COMPILE_HELPER=value)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    process.kill()
    process.communicate()

"""Kernels made for a format come from the disk in the next process: nothing is compiled twice."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

from nbflow_kernels.compilation.jit_cache import KernelCache, KeyedFiles
from nbflow_kernels.quantizers.search import trellis


def _source_copies(folder: Path) -> list[Any]:
    """Return one function of two copies of its source, written at different times."""
    made = []
    for i, name in enumerate(("first", "second")):
        file = folder / name / "kernel.py"
        file.parent.mkdir()
        file.write_text("def twice(x):\n    return 2 * x\n")
        os.utime(file, (1000 + i, 1000 + i))
        found: dict[str, Any] = {}
        exec(compile(file.read_text(), file, "exec"), found)
        made.append(found["twice"])
    return made


@pytest.mark.parametrize("by_time", [False, True])
def test_copies_of_sources_share_kernels_if_the_folder_is_named_after_all(tmp_path, by_time):
    one, other = (
        KernelCache(function, tmp_path / "cache", lambda: True, by_time)._cache_file
        for function in _source_copies(tmp_path)
    )
    Path(one._cache_path).mkdir(parents=True)
    one.save("key", b"compiled")
    assert one.load("key") == b"compiled"
    assert other.load("key") == (None if by_time else b"compiled")


class _Raises:
    """Raises, when a pickle with it is read, what such reading may raise."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, (self.error,)


def _raise(error: type[Exception]) -> None:
    raise error("a foreign pickle")


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    "error", [AttributeError, ImportError, IndexError, KeyError, TypeError, MemoryError]
)
def test_a_foreign_file_in_the_cache_counts_as_absent(tmp_path, error, inner):
    files = KeyedFiles(IndexDataCacheFile(str(tmp_path), "kernel-1", "stamp"))
    files.save("key", b"compiled")
    assert files.load("key") == b"compiled"
    foreign = pickle.dumps(_Raises(error))
    whole = pickle.dumps((files._stamp, "key", foreign)) if inner else foreign
    next(tmp_path.iterdir()).write_bytes(whole)
    assert files.load("key") is None


def test_a_kernel_whose_file_is_not_its_own_is_compiled_again(tmp_path):
    """The pickle is right, but not what Numba has written: another version's, say."""

    def twice(x):
        return 2 * x

    def make():
        compiled = numba.njit(twice)
        compiled._cache = KernelCache(twice, tmp_path, lambda: True, False)
        return compiled

    assert make()(21) == 42
    (file,) = tmp_path.iterdir()
    again = make()
    assert again(21) == 42
    assert sum(again._cache_hits.values()) == 1
    stamp, key, _ = pickle.loads(file.read_bytes())
    for payload in (("not", "a", "kernel"), None, 3):
        file.write_bytes(pickle.dumps((stamp, key, pickle.dumps(payload))))
        again = make()
        assert again(21) == 42
        assert not sum(again._cache_hits.values())


def test_device_functions_of_a_factory_are_known_by_their_source():
    """Numba tells them apart by a number of its own: trellis search was never found on disk."""

    def key(bits):
        made = trellis._kernel.__wrapped__(bits)
        return made._cache._index_key((), made.targetctx.codegen())

    assert key(2) == key(2) != key(3)


PROGRAM = """
import numpy as np
from numba.core import event
import nbflow_kernels as nk

x = np.ones((1, 64), np.float32)
w = nk.QuantTensor.from_bytes(bytes(36), "q4_0", (1, 64))
with event.install_recorder("numba:compile") as compiled:
    for activations in ("f32", "int8"):
        nk.qmatmul(x, w, activations=activations)
names = [str(e.data["dispatcher"]) for _, e in compiled.buffer if e.is_start]
print(len(names), names)
"""


def test_kernels_of_formats_are_cached_on_disk(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    first, second = (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    )
    assert int(first.split()[0]) >= 3
    assert second.split()[0] == "0", second


def test_each_compiled_kernel_is_a_file_that_knows_what_it_is(tmp_path):
    """Two processes that save at the same time for different types do not get each other's code."""
    numbas = IndexDataCacheFile(str(tmp_path), "kernel-1", "stamp")
    ours, theirs = KeyedFiles(numbas), KeyedFiles(numbas)
    ours.save(("float32", 1), b"ours")
    theirs.save(("float64", 1), b"theirs")
    for files in (ours, theirs):
        assert files.load(("float32", 1)) == b"ours"
        assert files.load(("float64", 1)) == b"theirs"
        assert files.load(("int8", 1)) is None
    other_source = KeyedFiles(IndexDataCacheFile(str(tmp_path), "kernel-1", "other"))
    assert other_source.load(("float32", 1)) is None
    first, second = sorted(tmp_path.iterdir())
    mixed = first.read_bytes()
    second.write_bytes(mixed)  # as if a file were in another's place
    found = [files.load(key) for key in (("float32", 1), ("float64", 1))]
    assert found.count(None) == 1
    first.write_bytes(mixed[:20])
    assert [files.load(key) for key in (("float32", 1), ("float64", 1))] == [None, None]
    files.flush()
    assert not list(tmp_path.iterdir())


FACTORY = """
import sys
import numpy as np
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.thread_pool import ThreadPool

def make(number):
    @jit.kernel
    def kernel(out, start, stop):
        for i in range(start, stop):
            out[i] = number
    return kernel

out = np.zeros(1, np.int64)
kernels = [make(int(word)) for word in sys.argv[1:]]
for kernel in kernels:
    kernel(out, 0, 1)
for kernel in kernels:
    ThreadPool(1).run_graph(CpuGraph([GraphNode(kernel, (out,), 1, 1.0)], 1))
    print(out[0])
"""


def test_kernels_of_a_factory_that_processes_have_compiled_are_told_apart(tmp_path):
    """One that is compiled here has not the name of one that another process has compiled."""
    (tmp_path / "factory.py").write_text(FACTORY)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for numbers in (["2"], ["3"], ["4", "3", "2"]):
        command = [sys.executable, str(tmp_path / "factory.py"), *numbers]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        assert done.stdout.split() == numbers

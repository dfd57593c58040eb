"""Kernels made for a format come from the disk in the next process: nothing is compiled twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from numba.core.caching import IndexDataCacheFile

from nbflow_kernels._disk_cache import KeyedFiles

PROGRAM = """
import numpy as np
from numba.core import event
import nbflow_kernels as nk

x = np.ones((1, 64), np.float32)
w = nk.quantize(x, "q4_0", encoder="plain")
with event.install_recorder("numba:compile") as compiled:
    for activations in ("f32", "bf16", "int8"):
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
    assert int(first.split()[0]) >= 4
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
    for stamp in ("stamp", "another time"):  # of a folder named after all the sources
        copy = KeyedFiles(IndexDataCacheFile("elsewhere", "kernel-1", stamp), folder=tmp_path / "b")
        (tmp_path / "b").mkdir(exist_ok=True)
        assert (copy.load(("float32", 1)) is None) == (stamp == "stamp")
        copy.save(("float32", 1), b"of all copies")
    shutil.rmtree(tmp_path / "b")
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
from nbflow_kernels._jit import njit
from nbflow_kernels.calls import Call, CallList
from nbflow_kernels.team import Team

def make(number):
    @njit
    def kernel(out, start, stop):
        for i in range(start, stop):
            out[i] = number
    return kernel

out = np.zeros(1, np.int64)
kernels = [make(int(word)) for word in sys.argv[1:]]
for kernel in kernels:
    kernel(out, 0, 1)
for kernel in kernels:
    Team(1).run_list(CallList([Call(kernel, (out,), 1, 1.0)], 1))
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

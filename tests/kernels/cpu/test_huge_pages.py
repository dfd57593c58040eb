"""Huge-page memory of weights and caches: placement, sharing and release."""

from __future__ import annotations

import gc
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from nbflow.distributed.device import HOST
from nbflow.kv_cache.storage import KVStorage
from nbflow.spec.layer_specs import HeadShape
from nbflow_kernels.cpu import huge_pages
from nbflow_kernels.cpu.huge_pages import ALIGNMENT, CHUNK, LEAST, PAGE, zeros
from nbflow_kernels.quantizers import quantize

HUGE_PAGES = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages"
)


def mapping(address: int) -> tuple[int, int, str]:
    """Return begin, end and flags of the mapping of this process that holds an address."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = (int(head[1], 16), int(head[2], 16))
        elif line.startswith("VmFlags:") and found and found[0] <= address < found[1]:
            return *found, line.removeprefix("VmFlags:")
    raise AssertionError(f"{address:#x} is mapped nowhere")


@pytest.mark.parametrize("n_bytes", [1, LEAST - 1, LEAST, CHUNK // 2 - 1, CHUNK // 2, CHUNK + 1])
def test_sizes(n_bytes):
    a = zeros(n_bytes)
    assert (a.dtype, a.shape, a.any(), a.ctypes.data % ALIGNMENT) == (
        np.uint8,
        (n_bytes,),
        False,
        0,
    )
    a[:] = 1  # all of it may be written
    assert a.flags.writeable
    assert a.flags.c_contiguous


@HUGE_PAGES
def test_large_arrays_begin_with_a_huge_page_and_small_ones_share_a_chunk():
    large = zeros(CHUNK)
    assert large.ctypes.data % PAGE == 0
    assert "hg" in mapping(large.ctypes.data)[2].split()  # huge pages are asked for
    first, *others = [zeros(LEAST + 1) for _ in range(3)]
    begin, end, flags = mapping(first.ctypes.data)
    assert "hg" in flags.split()
    # parts of one chunk, or the second one began a new chunk
    step = LEAST + ALIGNMENT
    distances = {
        b.ctypes.data - a.ctypes.data for a, b in zip([first, *others], others, strict=False)
    }
    assert step in distances
    assert begin <= first.ctypes.data < end


def test_arrays_do_not_overlap_whoever_makes_them():
    made: list[np.ndarray] = []

    def make(value: int) -> None:
        for _ in range(20):
            array = zeros(LEAST)
            assert not array.any()
            array[:] = value
            made.append(array)

    threads = [threading.Thread(target=make, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(np.unique(array)) == 1 for array in made)
    assert len(made) == 80


@HUGE_PAGES
def test_memory_goes_with_the_last_array():
    def mapped() -> int:
        return len(re.findall(r"\bhg\b", Path("/proc/self/smaps").read_text()))

    before = mapped()
    arrays = [zeros(LEAST) for _ in range(2 * CHUNK // LEAST)]
    assert mapped() > before
    del arrays
    gc.collect()
    assert mapped() <= before


def test_no_memory_is_said():
    with pytest.raises(MemoryError, match=f"cannot allocate {1 << 60} bytes"):
        zeros(1 << 60)


@HUGE_PAGES
def test_keys_and_values_lie_in_it():
    storage = KVStorage([0, 1], 64, HeadShape(4, 64, 64), "f16", HOST)
    storage.ensure(40)
    for keys, values in storage.layers.values():
        for pages in (keys, values):
            assert (pages.shape, pages.dtype, pages.any()) == ((40, 4, 64, 64), np.float16, False)
            assert " hg" in mapping(pages.ctypes.data + pages.nbytes // 2)[2]


def test_weights_lie_in_it():
    w = quantize(np.ones((512, 1024), np.float32), "q4_0", quantizer="reference").packed()
    assert w.nbytes >= LEAST
    assert isinstance(w.data.base, np.ndarray)
    assert w.data.ctypes.data % ALIGNMENT == 0
    if hasattr(huge_pages.mmap, "MADV_HUGEPAGE"):
        assert isinstance(w.data.base.base, memoryview | huge_pages.mmap.mmap)

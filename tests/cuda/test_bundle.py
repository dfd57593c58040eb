"""Bundles of compiled kernels: found whatever compiler made them; damaged files."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbflow_kernels import cuda
from nbflow_kernels.cuda import bundle, cache, numba_cuda, nvrtc
from nbflow_kernels.cuda.bundle import Bundle, BundledKernel
from nbflow_kernels.cuda.detect import Detected
from nbflow_kernels.errors import MissingExtraError, UsageError
from nbflow_kernels.testing import cuda_compile_all

SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'


@pytest.fixture(autouse=True)
def no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an empty folder, and no bundle after the test."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(bundle.VARIABLE, raising=False)
    monkeypatch.setattr(cache, "used", {})
    yield
    bundle.use(None)


def _kernels(n: int) -> list[BundledKernel]:
    rng = np.random.default_rng(0)
    return [
        BundledKernel(f"key{i}", f"name{i % 3}", f"entry{i}", f"12.{i % 2}", rng.bytes(100 + i))
        for i in range(n)
    ]


def test_a_bundle_holds_each_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "GROUP_BYTES", 300)
    kernels = _kernels(20)
    path = tmp_path / "kernels.bundle"
    assert bundle.write(path, "sm_90", kernels) == path.stat().st_size
    opened = Bundle(path)
    assert (len(opened), opened.target, opened.compilers) == (20, "sm_90", ("12.0", "12.1"))
    assert len(opened._groups) > 5
    for kernel in kernels:
        assert opened.find(kernel.key) == (kernel.code, kernel.entry)
    assert opened.find("another") is None


def test_damaged_bundles_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "kernels.bundle"
    bundle.write(path, "sm_90", _kernels(5))
    whole = path.read_bytes()
    with pytest.raises(UsageError, match=r"cannot be read \(No such file"):
        Bundle(tmp_path / "missing")
    for cut in (0, 5, len(bundle.MAGIC) + 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="is not a whole bundle of CUDA kernels"):
            Bundle(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(UsageError, match="its groups end at byte"):
        Bundle(path)
    path.write_bytes(whole[:-9] + b"corrupted")
    with pytest.raises(UsageError, match=r"is not a whole bundle"):
        Bundle(path).find("key0")
    path.write_bytes(b"PK\3\4" + whole[4:])
    with pytest.raises(UsageError, match="it begins differently"):
        Bundle(path)


def _index(path: Path, index: Any) -> Path:
    """Write a file with the index of a stranger."""
    packed = zlib.compress(index if isinstance(index, bytes) else json.dumps(index).encode())
    head = struct.pack("<Q32s", len(packed), hashlib.sha256(packed).digest())
    path.write_bytes(bundle.MAGIC + head + packed + b"group")
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": [[5, 1 << 60, ""]]},
        {"groups": [[-5, 1, ""], [10, 1, ""]]},
        {"groups": [[5, True, ""]]},
        {"groups": [[5]]},
        {"groups": 7},
        {"kernels": []},
        {"kernels": {"key": [1, 0, 1, "entry", 0]}},
        {"kernels": {"key": [-1, 0, 1, "entry", 0]}},
        {"kernels": {"key": [0, 90, 20, "entry", 0]}},
        {"kernels": {"key": [0, 0, 1.5, "entry", 0]}},
        {"kernels": {"key": [0, 0, 1, 5, 0]}},
        {"kernels": {"key": "none"}},
        {"target": None},
        {"compilers": [5]},
    ],
)
def test_numbers_of_strangers_are_checked(changes: dict[str, Any], tmp_path: Path) -> None:
    index = {"target": "sm_90", "compilers": [], "groups": [[5, 100, ""]], "kernels": {}}
    assert len(Bundle(_index(tmp_path / "good", index))) == 0
    with pytest.raises(UsageError, match="is not a whole bundle"):
        Bundle(_index(tmp_path / "bad", index | changes))


def test_a_strangers_group_is_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.bundle"
    bundle.write(path, "sm_90", [BundledKernel("key", "name", "entry", "", bytes(1 << 22))])
    opened = Bundle(path)
    opened._groups = [(*opened._groups[0][:2], 10, opened._groups[0][3])]
    with pytest.raises(UsageError, match="differs from its digest"):
        opened.find("key")
    for text in (b"[" * 100_000, b"[]", b"\xff", b"{}"):
        with pytest.raises(UsageError, match="is not a whole bundle"):
            Bundle(_index(path, text))
    monkeypatch.setattr(bundle, "MAX_INDEX_BYTES", 1000)
    with pytest.raises(UsageError, match="index has more than 1000 bytes"):
        Bundle(_index(path, b" " * 100_000))


def _twice(tmp_path: Path) -> cuda.Kernel:
    (tmp_path / "twice.cu").write_text(SOURCE)
    return cuda.cpp_kernel(str(tmp_path / "module.py"), "twice.cu", "twice", "f32* x")


def _bundled(tmp_path: Path, arch: str) -> Path:
    """Write a bundle of the kernels in use, and empty the folder."""
    path = tmp_path / "kernels.bundle"
    line = cuda_compile_all.write_bundle(path, arch, cache.used)
    assert f"{len(cache.used)} kernels for {arch}" in line
    for file in cache.used:
        file.unlink()
    return path


@pytest.mark.compiler
def test_a_kernel_comes_from_the_bundle_whatever_compiler_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = _twice(tmp_path).compile("sm_90", "cubin")
    path = _bundled(tmp_path, "sm_90")
    assert Bundle(path).compilers == (nvrtc.version(),)

    def no_compiler(*_: Any) -> Any:
        raise MissingExtraError("compiling CUDA C++ needs NVRTC")

    bundle.use(path)
    monkeypatch.setattr(nvrtc, "compile_source", no_compiler)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    assert _twice(tmp_path).compile("sm_90", "cubin") == code
    monkeypatch.setattr(nvrtc, "version", no_compiler)
    assert _twice(tmp_path).compile("sm_90", "cubin") == code
    assert not list(cache.folder().glob("*.cubin"))
    bundle.use(None)
    monkeypatch.setenv(bundle.VARIABLE, str(path))
    assert _twice(tmp_path).compile("sm_90", "cubin") == code
    with pytest.raises(MissingExtraError, match="needs NVRTC"):  # another target
        _twice(tmp_path).compile("sm_80", "cubin")
    (tmp_path / "twice.cu").write_text(SOURCE + "\n")
    with pytest.raises(MissingExtraError, match="needs NVRTC"):  # another source
        cuda.cpp_kernel(str(tmp_path / "m.py"), "twice.cu", "twice", "f32* x").compile(
            "sm_90", "cubin"
        )


@pytest.mark.compiler
def test_a_numba_kernel_comes_from_the_bundle_without_libnvvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @cuda.numba_kernel("f32* x, i32 n", key="test of bundles")
    def fill(x, n):  # type: ignore[no-untyped-def]
        x[0] = n

    code = fill.compile("sm_90", "cubin")
    path = _bundled(tmp_path, "sm_90")
    monkeypatch.setattr(numba_cuda, "find_nvvm", lambda: "")
    with pytest.raises(MissingExtraError, match=r"fill for sm_90: libNVVM is missing, so Numba"):
        fill.compile("sm_90", "cubin")
    bundle.use(path)
    assert fill.compile("sm_90", "cubin") == code

    def fails(name: str) -> None:
        raise RuntimeError("no libcudart.so.13\n  searched: ...")

    with monkeypatch.context() as patch:  # numba-cuda loads it when it is imported
        patch.setattr(numba_cuda.importlib, "import_module", fails)
        with pytest.raises(MissingExtraError, match=r"does not import \(.*libcudart.so.13\): pip"):
            numba_cuda.module()
    monkeypatch.setattr(numba_cuda, "LEAST_VERSION", (99, 0))  # too old a numba-cuda
    assert fill.compile("sm_90", "cubin") == code


def test_detection_says_what_fails_without_libnvvm() -> None:
    whole = Detected((13, 0), 1, True, True, True, "")
    assert (whole.usable, whole.limitation) == (True, "")
    without = Detected((13, 0), 1, True, True, False, "")
    assert without.usable
    assert "libNVVM is missing" in without.limitation
    assert "quantizing on the device, user formats and attention variants" in without.limitation
    assert Detected(None, 0, True, True, False, "no driver").limitation == ""
